"""HOW is a measured process told what to do? Orders on stdin, times on stdout, everything printed goes to the log.

Used by lab/worker_script and lab/carriers; the other side, and the protocol, is lab/processes.
Must never wait other than in a blocking read: what is not measured just now must not use the processor.
"""

import os
import sys
import time
from collections.abc import Callable

import msgspec

from paceline.lab.processes import Reply


class Orders:
    """Takes stdout away from `print` when it is made, so make it first."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)

    def obey(self, steps: Callable[[int], None]) -> None:
        """Until the lab closes stdin: so many steps untimed, then so many timed; `steps` returns when all is done."""
        self._say(Reply())
        for line in iter(sys.stdin.readline, ""):
            untimed, timed = map(int, line.split())
            steps(untimed)
            began_s = time.perf_counter()
            steps(timed)
            self._say(Reply(us=1e6 * (time.perf_counter() - began_s) / timed))

    def _say(self, reply: Reply) -> None:
        self._out.write(msgspec.json.encode(reply) + b"\n")
