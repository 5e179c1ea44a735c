"""WHAT went wrong, and what only followed from it? Each failure in a line when it happens, and all of them at the end.

Called by launchers/supervisor. At the end the root cause comes first, with its traceback: the failure for good that
came before all others, or the death of the task that it names, though that one was started again. The same reason is
told in full only once.
"""

from collections.abc import Sequence

import msgspec

from paceline.cluster.spec import Task
from paceline.errors import EXIT_CLUSTER
from paceline.launchers import closing
from paceline.launchers.crew import Crew, Run
from paceline.launchers.live import View
from paceline.launchers.restart import Again, Over


class Failure(msgspec.Struct, frozen=True):
    """A process of a task that ended badly."""

    task: Task
    code: int
    reason: list[str]
    is_back: bool = False  # another one was started in its place


class Failures:
    """Every failure of a run, in the order in which they happened."""

    def __init__(self, run: Run, crew: Crew, view: View) -> None:
        self.view = view
        self._run = run
        self._crew = crew
        self._for_good: dict[Task, Failure] = {}
        self._came_back: list[Failure] = []

    def tell(self, task: Task, code: int, decision: Again | Over) -> None:
        """A task has failed, and this is what follows."""
        reason = self._crew.reason(task)
        head = closing.failure(task, code, self._run.paths.logs(task), [])
        gist = closing.gist(reason)
        says = follows(decision, self._crew.restarts.get(task, 0), self._run.settings.max_restarts)
        self.view.say("\n".join([head + says, *([f"  {gist}"] if gist else [])]))
        if isinstance(decision, Over):
            self._for_good[task] = Failure(task, code, reason)
        else:
            self._came_back.append(Failure(task, code, reason, is_back=True))

    def note_all(self, failed: dict[Task, int]) -> None:
        """Those that failed while everything was ended; nothing follows from that any more."""
        for task, code in failed.items():
            if task not in self._for_good:
                self._for_good[task] = Failure(task, code, self._crew.reason(task))

    @property
    def will_repeat(self) -> bool:
        """Whether something must be put right before the same command is of use."""
        return any(self._crew.will_repeat(task) for task in self._for_good)

    def report(self) -> list[str]:
        """All failures for good, and the root cause before them."""
        lines: list[str] = []
        gists: set[str] = set()
        for failure in in_order(list(self._for_good.values()), self._came_back):
            gist = closing.gist(failure.reason)
            reason = failure.reason if not lines else [gist] if gist else []
            if gist and gist in gists:
                reason = [f"for the same reason: {gist}"]
            gists.add(gist)
            text = closing.failure(failure.task, failure.code, self._run.paths.logs(failure.task), reason)
            back = " (it was started again)" if failure.is_back else ""
            head, *rest = text.splitlines()
            lines.append("\n".join([f"{'Then' if lines else 'Root cause'}: {head}{back}", *rest]))
        return lines


def in_order(for_good: Sequence[Failure], came_back: Sequence[Failure]) -> list[Failure]:
    """What is told, the root cause first. Whoever failed because another task went away names it: if that one had died
    before, and was started again, its death is where it began.

    >>> died = Failure(Task("worker", 1), -9, [], is_back=True)
    >>> client = Failure(Task("worker", 0), 3, ["paceline: error: /job:worker/replica:0/task:1 went away"])
    >>> [str(failure.task) for failure in in_order([client], [died])]
    ['worker:1', 'worker:0']
    """
    if not for_good or for_good[0].code != EXIT_CLUSTER:
        return list(for_good)
    said = closing.gist(for_good[0].reason)
    named = [failure for failure in came_back if f"{failure.task.device} " in f"{said} "]
    return [*named[-1:], *for_good]


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
