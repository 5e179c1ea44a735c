"""WHAT does a launcher ask of the Linux kernel? Deaths that follow a death, adopted orphans, a name in `ps`, the clock.

Called by launchers/entry, launchers/nursery, launchers/forking and hosts/machine. Elsewhere than on Linux each does
nothing.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import EXIT_INTERRUPTED

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TIMEX_BYTES, UNSYNCHRONISED = 512, 5  # more than any struct timex has; what adjtimex says of a clock that nobody sets
ARG_START, ARG_END = 45, 46  # counted behind the name in /proc/self/stat, which may hold anything


def die_with(parent: int) -> None:
    """Let the kernel end this process when the thread of the launcher that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(EXIT_INTERRUPTED)


@contextmanager
def adopting() -> Iterator[None]:
    """Be the parent of whatever loses its own below us; not for longer than needed, for orphans are nobody's else."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this kernel lets no process adopt orphans")
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def show_as(title: str) -> None:
    """Let `ps` and `top` show this text, in the room that our own command line has."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        start, room = int(fields[ARG_START]), int(fields[ARG_END]) - int(fields[ARG_START])
    except (OSError, IndexError, ValueError):
        return
    if start and room > 1:
        text = title.encode(errors="replace")[: room - 2]
        ctypes.memmove(start, text.ljust(room - 1, b"\0") + b".", room)  # no zero at the end: it ends at the first one


def is_clock_set() -> bool | None:
    """Whether somebody (ntp, the host of a virtual machine) keeps the clock right; None: this system does not say."""
    if sys.platform != "linux":
        return None
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))  # all zero: only asks
    return None if state < 0 else state != UNSYNCHRONISED
