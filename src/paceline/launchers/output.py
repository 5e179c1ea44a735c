"""WHAT if a task's log cannot be written? What is printed is lost, and nothing else: a print ends no training.

Called by launchers/entry in a task's process, before its script. Only a log that is a file is treated so, and only
because of the disk; to the script stdout and stderr look as before.
"""

import io
import os
import stat
import sys
from pathlib import Path
from typing import Any

from paceline.telemetry import losses

LOST = "what its task prints is lost until there is room again; training goes on"


class Lossy(io.FileIO):
    """A file that forgets what does not fit on the disk."""

    path: Path | None = None  # where it lies; None where that cannot be told

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in losses.OF_THE_DISK:
                raise
            losses.tell(self.path or str(self.name), error, LOST)
            return memoryview(data).nbytes


def keep_printing() -> None:
    """From now on print() in this process works on a full disk too."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            stream.flush()
            setattr(sys, name, lossy(stream))


def lossy(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Another stream to the same file, which forgets."""
    raw = Lossy(stream.fileno(), "wb", closefd=False)
    raw.name = stream.name
    raw.path = path_of(stream.fileno())
    is_unbuffered = isinstance(stream.buffer, io.RawIOBase)  # so the launcher wants it: a line is in the log at once
    made = io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    made.mode = stream.mode  # type: ignore[misc]
    return made


def path_of(descriptor: int) -> Path | None:
    """Which file that is, where the system says it."""
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        return None
