"""WHERE does a feeder's time go? The steps of an in-graph client, divided into parts that add up to them.

Used by lab/scripts/feeder_script; the parts of the product are timed from outside, because it has no such clock and
must never get one. Nothing but the lab may import this.
"""

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.ingraph import values
from paceline.ingraph.mirror import Mirror
from paceline.ingraph.remote_towers import RemoteTower
from paceline.ingraph.towers import Towers
from paceline.transport.channel import Channel

PICK = "pick"  # a batch of each worker's own, out of all data
PACK = "pack"  # which values have changed, their copies, and the description of it all
SEND = "send"  # until the last byte has left
WAIT = "wait"  # nobody here has anything to do: the workers compute
RECEIVE = "receive"  # from the first byte of an answer to its tensors
UPDATE = "update"  # the mean of the gradients, the optimizer's step, and whatever has no other name
PARTS = (PICK, PACK, SEND, WAIT, RECEIVE, UPDATE)
_PLACES = (
    (Towers, "_compute", WAIT),
    (RemoteTower, "compute", PACK),
    (Mirror, "news", PACK),
    (values, "pack", PACK),
    (Channel, "send", SEND),
    (Channel, "recv", WAIT),
    (Channel, "recv_bulk", RECEIVE),
    (values, "unpack", RECEIVE),
)


class Split:
    """Seconds by part. Of parts within parts the inner one counts; while several threads work, each has its share of
    the time, and only when all of them wait it is `wait`. So the sum is the time that has passed.

    >>> split = Split()
    >>> split.begin(1, UPDATE, 0.0)
    >>> split.begin(1, WAIT, 1.0)
    >>> split.begin(2, SEND, 3.0)
    >>> split.end(2, 4.0)
    >>> split.end(1, 6.0)
    >>> split.end(1, 7.0)
    >>> split.taken()
    {'send': 1.0, 'wait': 4.0, 'update': 2.0}
    """

    def __init__(self) -> None:
        self._inside: dict[int, list[str]] = {}
        self._seconds: dict[str, float] = {}
        self._since_s = 0.0

    def begin(self, thread: int, part: str, now_s: float) -> None:
        self._account(now_s)
        self._inside.setdefault(thread, []).append(part)

    def end(self, thread: int, now_s: float) -> None:
        self._account(now_s)
        self._inside[thread].pop()
        if not self._inside[thread]:
            del self._inside[thread]

    def taken(self) -> dict[str, float]:
        """What there is so far; it begins again at nothing."""
        told, self._seconds = self._seconds, {}
        return {part: told[part] for part in PARTS if part in told}

    def _account(self, now_s: float) -> None:
        passed_s, self._since_s = now_s - self._since_s, now_s
        at = [parts[-1] for parts in self._inside.values()]
        working = [part for part in at if part != WAIT] or at[:1]
        for part in working:
            self._seconds[part] = self._seconds.get(part, 0.0) + passed_s / len(working)


class FeederClock:
    """Tells a Split what this process's threads do."""

    def __init__(self) -> None:
        self._split = Split()
        self._lock = threading.Lock()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            self._split.begin(thread, name, time.perf_counter())
        try:
            yield
        finally:
            with self._lock:
                self._split.end(thread, time.perf_counter())

    def taken(self) -> dict[str, float]:
        with self._lock:
            return self._split.taken()

    def watch_the_client(self) -> None:
        """From now on the product's own functions are parts, in this process."""
        for owner, name, part in _PLACES:
            setattr(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, function: Any, part: str) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return function(*args, **kwargs)

        return timed
