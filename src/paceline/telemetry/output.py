"""Lose what cannot be printed (closed terminal, full disk) without an error: printing ends no run and no task.

Called by cli/main for every verb, and in a task's process by launchers/entry, launchers/task and ingraph/server. To
the script stdout and stderr look as before. complain() prints every failure.
"""

import errno
import io
import json
import os
import re
import select
import stat
import sys
from pathlib import Path
from typing import Any, TextIO

import msgspec

from paceline import files
from paceline.telemetry import losses

LOST = "what its task prints is lost until there is room again; training goes on"
REMOVED = "what its task prints from here on is lost; training goes on"
BUSY_MS = 1000  # how long a full pipe that does not block is waited for
NOT_READ = (errno.EPIPE, errno.ECONNRESET, errno.EIO)  # a reader that has gone, a terminal that was closed
STANDARD = (0, 1, 2)


class Lossy(io.FileIO):
    """A stream that drops what cannot be written, and keeps the first error."""

    lost: OSError | None = None
    log: Path | None = None  # the file that it is, where that is the log of a task

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        try:
            written = super().write(data)
            if written is None and self._is_free():
                written = super().write(data)
        except OSError as error:
            self.lost = self.lost or error
            if self.log is not None and error.errno in losses.OF_THE_DISK:
                losses.tell(self.log, error, LOST)
            return size
        if self.log is not None and losses.removed(self.log, self.fileno(), REMOVED):
            self.log = None  # that was it
        return size if written is None else written

    def _is_free(self) -> bool:
        """Wait a moment for room in a pipe that does not block."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        return bool(poll.poll(BUSY_MS))


def keep_printing(is_task: bool) -> None:
    """Have print() in this process raise nothing from now on: closed terminal, gone reader, full disk, odd encoding."""
    _open_closed()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream, original = getattr(sys, name), getattr(sys, f"__{name}__")
        if stream is None:  # it was closed when this process began
            stream = original = io.TextIOWrapper(io.FileIO(descriptor, "wb", closefd=False), encoding="utf-8")
        if stream is original and isinstance(stream, io.TextIOWrapper):  # not one that a library has put there
            stream.flush()
            setattr(sys, name, lossy(stream, is_task))


def _open_closed() -> None:
    """Put /dev/null where a standard stream was closed, or the next file that is opened would be printed into."""
    for descriptor in STANDARD:
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)


def lossy(stream: io.TextIOWrapper, is_task: bool) -> io.TextIOWrapper:
    """Make a stream to the same file that drops what cannot be written; letters its encoding lacks become escapes."""
    raw = Lossy(stream.fileno(), "wb", closefd=False)
    raw.name = stream.name
    if is_task and is_file(raw):
        raw.log = path_of(stream.fileno()) or Path(str(stream.name))
    is_unbuffered = isinstance(stream.buffer, io.RawIOBase)  # so the launcher wants it: a line is in the log at once
    escapes = stream.errors == "strict" or stream.encoding.lower().replace("-", "") != "utf8"
    made = io.TextIOWrapper(
        raw if is_unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace" if escapes else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    made.mode = getattr(stream, "mode", "w")  # type: ignore[misc]
    return made


def is_file(raw: Lossy) -> bool:
    """Tell whether this is a file on a disk."""
    return stat.S_ISREG(os.fstat(raw.fileno()).st_mode)


def path_of(descriptor: int) -> Path | None:
    """Return the path of an open file, where the system says it."""
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:
        return None


def unwritten() -> OSError | None:
    """Return why some of stdout could not be written; None if all was, or if the reader of a pipe has gone."""
    sys.stdout.flush()
    buffer = getattr(sys.stdout, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if not isinstance(raw, Lossy) or raw.lost is None:
        return None
    return None if raw.lost.errno in NOT_READ and not is_file(raw) else raw.lost


def json_text(value: object, indent: int = 0) -> str:
    """Encode a value as JSON that can be printed: letters that stdout's encoding lacks become escapes."""
    encoded = files.as_json(value)
    text = (msgspec.json.format(encoded, indent=indent) if indent else encoded).decode()
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return re.sub(r"[^\x00-\x7f]", lambda letter: json.dumps(letter[0])[1:-1], text)
    return text


def stream_of(code: int) -> TextIO:
    """Return the stream for the last block of a run with this exit code."""
    return sys.stderr if code else sys.stdout


def complain(text: str) -> None:
    """Print a failure on stderr, with our name in front; results, which programs read, go to stdout."""
    print(f"paceline: {text}", file=sys.stderr, flush=True)
