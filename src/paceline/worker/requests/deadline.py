"""Say now and then for whom a task waits, and give up at its deadline.

Used by worker/requests/client, joining, evaluators, the saver and worker/kv, one a wait. Must never wait itself: the
caller waits, and calls `again`.
"""

import time
from collections.abc import Callable, Sequence

from paceline.cluster.settings import PACELINE
from paceline.errors import HostNotFound, WaitTimeout
from paceline.telemetry.lines import waiting_line
from paceline.wire.messages import Status
from paceline.worker.requests.identity import Identity

SAY_EVERY_S = 10.0


class Deadline:
    """One wait. Says for whom, at once or after `first_after_s`, then every ten seconds; raises at the deadline."""

    def __init__(
        self,
        wait_s: float,
        names: Sequence[str],
        say: Callable[[str], None],
        first_after_s: float = 0.0,
        since_s: float | None = None,
        style: str = PACELINE,
    ) -> None:
        self.names = names
        self._wait_s = wait_s
        self._say = say
        self._style = style
        self._began = time.monotonic() if since_s is None else since_s
        self._next_s = first_after_s

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def left_s(self) -> float:
        return max(0.0, self._wait_s - self.waited_s)

    def again(self, why: str, more: Sequence[str] = (), error: BaseException | None = None) -> None:
        """Note that the wait goes on. Say `more` beside the names, and an `error` that waiting cannot mend."""
        waited_s = self.waited_s
        if waited_s > self._wait_s:
            raise WaitTimeout(f"gave up after {round(waited_s, None if waited_s >= 1 else 1):g} s: {why}")
        if waited_s >= self._next_s:
            self._next_s = waited_s - waited_s % SAY_EVERY_S + SAY_EVERY_S
            for name in self.names:
                reason = str(error) if isinstance(error, HostNotFound) else ""
                self._say(waiting_line(name, waited_s, reason, self._style))
            for line in more:
                self._say(line)


def awaited(status: Status, me: Identity) -> tuple[list[str], list[str]]:
    """Return for whom this worker waits according to ps:0, and what is known of them; none: for that ps itself."""
    if status.lacks:
        return [f"{status.lacks} more worker(s), as --min-workers asks"], []
    names = [me.worker_devices[w] for w in status.waiting_for if w != me.worker]
    more = []
    for each in status.awaited:
        if each.worker != me.worker:
            ends = f"; evicted in {each.evicted_in_s:.0f} s" if each.evicted_in_s is not None else ""
            more.append(f"{me.worker_devices[each.worker]} {each.does}, since {each.for_s:.0f} s{ends}")
    return names, more
