"""Tell the launcher that a file cannot be written, through a pipe: that needs no disk.

A full disk loses logs and records first, so they cannot hold this message. launchers/here makes the pipe and the
launcher prints what comes; a task that was started by hand prints to its own stderr. Each file is named once, and again
only after it could be written meanwhile. Must never wait and never raise.
"""

import errno
import fcntl
import os
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline import files
from paceline.cluster.spelling import listed

VARIABLE = "PACELINE_LOSSES_FD"
PIPE_BYTES = 4096  # at most so much is written in one piece
TEXT_CHARS = 500
NAMED = 3  # files in a line
# Errors of the file system, not of our code: full, over quota, damaged, read-only, gone, too large.
OF_THE_DISK = (
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENOENT, errno.ESTALE, errno.ENODEV, errno.ENXIO,
    errno.EFBIG,
)  # fmt: skip

_pipe = -1
_told: set[Path] = set()


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A file that could not be written; `lost`: the end of a sentence that says what that costs; `model`: where the
    final checkpoint lies instead."""

    file: str
    why: str
    lost: str
    model: str = ""


class Losses:
    """The launcher's end of the pipe of its tasks."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) if hasattr(os, "pipe2") else _pipe_of_two()
        self._rest = b""
        self._last: list[Loss] = []
        self._lock = threading.Lock()

    def new(self) -> list[Loss]:
        """Return what has come since the last call."""
        with self._lock:
            return self._new()

    def _new(self) -> list[Loss]:
        if self._reader < 0:
            found, self._last = self._last, []
            return found
        with suppress(BlockingIOError):
            while piece := os.read(self._reader, 1 << 16):
                self._rest += piece
        *whole, self._rest = self._rest.split(b"\n")
        found = []
        for line in whole:
            with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                found.append(msgspec.json.decode(line, type=Loss))
        return found

    def close(self) -> None:
        """Close the pipe when no task runs any more; the next call of new() returns what is left in it."""
        with self._lock:
            if self._reader >= 0:
                self._last = self._new()
                os.close(self._reader)
                os.close(self.writer)
                self._reader = -1


def begin(number: str) -> None:
    """Use the pipe that this task was started with; programs that it starts itself do not inherit it."""
    global _pipe
    if number.isdecimal():
        _pipe = int(number)
        with suppress(OSError):
            os.set_inheritable(_pipe, False)


def tell(file: Path | str, error: BaseException, lost: str, model: str = "") -> None:
    """Tell that a file cannot be written, unless that was told already."""
    path = Path(file)
    if path in _told and not model:
        return
    _told.add(path)
    loss = Loss(file=str(path), why=reason(error)[:TEXT_CHARS], lost=lost[:TEXT_CHARS], model=model)
    with suppress(OSError, ValueError):
        line = files.as_json(loss) + b"\n"
        if _pipe >= 0 and len(line) <= PIPE_BYTES:
            os.write(_pipe, line)
        elif _pipe < 0 and sys.__stderr__ is not None:
            print("\n".join(lines([loss])), file=sys.__stderr__, flush=True)


def removed(file: Path | str, descriptor: int, lost: str) -> bool:
    """Tell whether an open file was removed, so that what is written is lost; if so, say it."""
    if os.fstat(descriptor).st_nlink:
        return False
    tell(file, OSError(errno.ENOENT, "it was removed"), lost)
    return True


def written(file: Path | str) -> None:
    """Note that this file could be written, so that the next failure is told again."""
    _told.discard(Path(file))


def reason(error: BaseException) -> str:
    """Return the reason of an error, in the system's words if it is the system's.

    >>> reason(OSError(28, "No space left on device", "/x"))
    'No space left on device'
    """
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    return (cause.strerror if isinstance(cause, OSError) else None) or str(error)


def lines(losses: Iterable[Loss]) -> list[str]:
    """Write a line for each reason and consequence, with all files that share them.

    >>> lines([Loss(file=f"w-{n}.log", why="Disk full", lost="what is printed is lost") for n in (0, 1)])
    ['paceline: w-0.log, w-1.log cannot be written (Disk full): what is printed is lost']
    """
    names: dict[tuple[str, str], set[str]] = {}
    for loss in losses:
        names.setdefault((loss.why, loss.lost), set()).add(loss.file)
    return [
        f"paceline: {listed(sorted(those), NAMED)} cannot be written ({why}): {lost}"
        for (why, lost), those in names.items()
    ]


def _pipe_of_two() -> tuple[int, int]:
    """Make the pipe on systems without pipe2."""
    ends = os.pipe()
    for end in ends:
        fcntl.fcntl(end, fcntl.F_SETFL, os.O_NONBLOCK)
    return ends
