"""HOW is a measured process told what to do? Orders on stdin, times on stdout, everything printed goes to the log.

Used by lab/scripts/worker_script and lab/scripts/carriers; the other side, and the protocol, is
lab/measuring/processes. Must never wait other than in a blocking read: what is not measured just now must not use the
processor.
"""

import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import msgspec

from paceline.lab.measuring.processes import Reply

Resting = Callable[[], AbstractContextManager[object]]
Parts = Callable[[], Mapping[str, float]]


class Orders:
    """Takes stdin and stdout away from everybody else when it is made, so make it first."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._in = os.dup(0)
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._pending = b""

    def obey(self, steps: Callable[[int], None], resting: Resting = nullcontext, parts: Parts = dict) -> None:
        """Until the lab closes stdin: so many steps untimed, then so many timed; `steps` returns when all is done.

        Between orders the process is in `resting()`. `parts()`: what the seconds since it was last asked went into.
        """
        reply = Reply()
        while (order := self._next(reply, resting)) is not None:
            untimed, timed = order
            steps(untimed)
            parts()
            began_s = time.perf_counter()
            steps(timed)
            us = 1e6 * (time.perf_counter() - began_s) / timed
            reply = Reply(us=us, parts={name: 1e6 * seconds / timed for name, seconds in parts().items()})

    def run_along(self, steps: Callable[[int], None], resting: Resting = nullcontext) -> None:
        """As obey, but from each order to the next one, which only says that the others are done."""
        reply = Reply()
        while self._next(reply, resting) is not None:
            began_s, count = time.perf_counter(), 0
            while count == 0 or not self._has_more():
                steps(1)
                count += 1
            reply = Reply(us=1e6 * (time.perf_counter() - began_s) / count)
            self._read()

    def lack(self, what: str) -> None:
        """Instead of obeying: why this cannot be measured here."""
        self._out.write(msgspec.json.encode(Reply(missing=what)) + b"\n")

    def _next(self, reply: Reply, resting: Resting) -> tuple[int, int] | None:
        """Answer, then the next order; None at the end."""
        with resting():
            self._out.write(msgspec.json.encode(reply) + b"\n")
            line = self._read()
        if line is None:
            return None
        untimed, timed = map(int, line.split())
        return untimed, timed

    def _read(self) -> bytes | None:
        """A line, read without a buffer that `select` could not see into."""
        while b"\n" not in self._pending:
            data = os.read(self._in, 4096)
            if not data:
                return None
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _has_more(self) -> bool:
        return bool(self._pending) or bool(select.select([self._in], [], [], 0)[0])
