"""WHAT went wrong, and what only followed from it? Each failure in a line when it happens, and all of them at the end.

Called by launchers/supervisor. At the end the root cause comes first, with its traceback: the failure for good that
came before all others. The same reason is told in full only once.
"""

import msgspec

from paceline.cluster.spec import Task
from paceline.launchers import closing
from paceline.launchers.crew import Crew, Run
from paceline.launchers.live import View
from paceline.launchers.restart import Again, Over


class Failure(msgspec.Struct, frozen=True):
    """A task that did not come back."""

    task: Task
    code: int
    reason: list[str]


class Failures:
    """Every failure of a run, in the order in which they happened."""

    def __init__(self, run: Run, crew: Crew, view: View) -> None:
        self.view = view
        self._run = run
        self._crew = crew
        self._for_good: dict[Task, Failure] = {}

    def tell(self, task: Task, code: int, decision: Again | Over) -> None:
        """A task has failed, and this is what follows."""
        reason = self._crew.reason(task)
        head = closing.failure(task, code, self._run.paths.logs(task), [])
        gist = closing.gist(reason)
        says = follows(decision, self._crew.restarts.get(task, 0), self._run.settings.max_restarts)
        self.view.say("\n".join([head + says, *([f"  {gist}"] if gist else [])]))
        if isinstance(decision, Over):
            self._for_good[task] = Failure(task, code, reason)

    def note_all(self, failed: dict[Task, int]) -> None:
        """Those that failed while everything was ended; nothing follows from that any more."""
        for task, code in failed.items():
            if task not in self._for_good:
                self._for_good[task] = Failure(task, code, self._crew.reason(task))

    def report(self) -> list[str]:
        """All failures for good, the root cause first."""
        lines: list[str] = []
        gists: set[str] = set()
        for failure in self._for_good.values():
            gist = closing.gist(failure.reason)
            reason = failure.reason if not lines else [gist] if gist else []
            if gist and gist in gists:
                reason = [f"for the same reason: {gist}"]
            gists.add(gist)
            text = closing.failure(failure.task, failure.code, self._run.paths.logs(failure.task), reason)
            lines.append(f"{'Then' if lines else 'Root cause'}: {text}")
        return lines


def follows(decision: Again | Over, restarts: int, max_restarts: int) -> str:
    """What follows from a failure, to be added to what is said about it.

    >>> follows(Again(after_s=0.1), 1, 3)
    '; starting it again (1 of 3)'
    >>> follows(Over("it was interrupted"), 1, 3)
    '; not started again: it was interrupted'
    """
    if isinstance(decision, Again):
        memory = ", without its old memory" if decision.is_empty else ""
        return f"; starting it again ({restarts} of {max_restarts}){memory}"
    return f"; not started again: {decision.why}" if decision.why else ""
