"""WHEN have all tasks done their part? Each is asked in a thread of its own; the first error, or the deadline, ends it.

Used by ingraph/master for a step, and for the first meeting of all tasks. Must never wait for an op after the step has
failed: nobody can end one that runs.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from paceline.cluster.spec import Task
from paceline.errors import PacelineError, StepAborted, WaitTimeout

LOOK_S = 1.0  # how often it is looked whether the client is still there
GRACE_S = 5.0  # after an error: an op that takes longer is left to itself, and its value to nobody


class Awaited(msgspec.Struct, frozen=True):
    """How long a step is waited for: as long as `is_wanted`, and until `timeout_s` (0: for ever)."""

    is_wanted: Callable[[], bool] = lambda: True
    timeout_s: float = 0.0

    def look_s(self, passed_s: float) -> float:
        """How long to wait until it is to be asked again."""
        return min(LOOK_S, max(0.0, self.timeout_s - passed_s)) if self.timeout_s else LOOK_S

    def over(self, passed_s: float, missing: Sequence[Task]) -> PacelineError | None:
        """Why nobody waits any longer."""
        if not self.is_wanted():
            return StepAborted("the client went away")
        if self.timeout_s and passed_s >= self.timeout_s:
            names = ", ".join(task.device for task in missing)
            ended = "have not ended their parts" if len(missing) > 1 else "has not ended its part"
            told = f"gave up after {self.timeout_s:g} s (operation_timeout_in_ms)"
            return WaitTimeout(f"{told}: {names} {ended} of the step")
        return None


def together(
    actions: Mapping[Task, Callable[[], Any]], on_error: Callable[[BaseException], None], awaited: Awaited
) -> dict[Task, Any]:
    """All at the same time. The first error is told to `on_error` at once; when the others have ended too, or GRACE_S
    later, the first one that is a cause is raised. What nobody waits for any longer is given up in the same way, but
    at once: no cause is to come."""
    began_s = time.monotonic()
    results: dict[Task, Any] = {}
    errors: list[BaseException] = []
    changed = threading.Condition()

    def act(task: Task, action: Callable[[], Any]) -> None:
        try:
            result = action()
        except BaseException as error:  # whatever it is, somebody waits
            with changed:
                errors.append(error)
                is_first = len(errors) == 1
                changed.notify()
            if is_first:
                on_error(error)
        else:
            with changed:
                results[task] = result
                changed.notify()

    for task, action in actions.items():
        threading.Thread(target=act, args=(task, action), name=f"step {task}", daemon=True).start()
    with changed:
        given_up = None
        while not errors and len(results) < len(actions) and given_up is None:
            if not changed.wait(awaited.look_s(time.monotonic() - began_s)):
                missing = [task for task in actions if task not in results]
                given_up = awaited.over(time.monotonic() - began_s, missing)
        if errors:
            changed.wait_for(lambda: len(errors) + len(results) == len(actions), GRACE_S)
            raise next((each for each in errors if not isinstance(each, StepAborted)), errors[0])
    if given_up is not None:
        on_error(given_up)
        raise given_up
    return results
