"""HOW long does a task wait, and what does it say meanwhile? Whom it waits for, now and then, until its deadline.

Used by worker/client and worker/evaluator, one a wait. Must never wait itself: it is asked again by whoever does.
"""

import time
from collections.abc import Callable, Sequence

from paceline.errors import WaitTimeout
from paceline.telemetry.lines import waiting_line

SAY_EVERY_S = 10.0


class Patience:
    """Says for whom we wait, at once and then every ten seconds; raises at the deadline."""

    def __init__(
        self, wait_s: float, names: Sequence[str], say: Callable[[str], None], first_after_s: float = 0.0
    ) -> None:
        self.names = names
        self._wait_s = wait_s
        self._say = say
        self._began = time.monotonic()
        self._next_s = first_after_s

    def again(self, why: str) -> None:
        waited_s = time.monotonic() - self._began
        if waited_s > self._wait_s:
            raise WaitTimeout(f"gave up after {waited_s:.0f} s: {why}")
        if waited_s >= self._next_s:
            self._next_s = waited_s - waited_s % SAY_EVERY_S + SAY_EVERY_S
            for name in self.names:
                self._say(waiting_line(name, waited_s))
