"""WHERE do a task's records go? One JSON line each into `telemetry/<task>.jsonl`, from a background thread.

Called by the runtime of every task: an event when something happens, a tick once a second.
Must never block training or raise into it: what a full disk or buffer refuses is counted, not waited for.
"""

import errno
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, SupportsFloat

from paceline import files
from paceline.telemetry import losses
from paceline.telemetry.background import Background

LOST = "its records are missing from the telemetry, and at the end perhaps from summary.json; training goes on"

REMOVED = "it is made again, without what it held"


class Sink:
    """A place for records; without a path it does nothing.

    >>> sink = Sink(None)
    >>> sink.event("start", task="worker:0")
    >>> sink.close()
    """

    def __init__(self, path: Path | str | None, *, capacity: int = 1024) -> None:
        self._background: Background[bytes] | None = None
        if path is not None:
            # Absolute at once: the file is opened later, and the script may change its folder until then.
            lines = _JsonLines(Path(path).absolute())
            self._background = Background("paceline-telemetry", lines, capacity)

    @property
    def dropped(self) -> int:
        """How many records were lost so far."""
        return self._background.dropped if self._background else 0

    @property
    def cpu_s(self) -> float:
        """Processor time that writing has taken so far."""
        return self._background.cpu_s if self._background else 0.0

    def event(self, kind: str, **fields: object) -> None:
        """Record that something happened; values are taken as they are now."""
        if self._background is None:
            return
        try:
            self._background.put(_line({"t": time.time(), "kind": kind, **fields}))
        except Exception:
            self._background.drop()

    def tick(self, **fields: object) -> None:
        """Record how things stand, about once a second."""
        self.event("tick", **fields)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left, and last how much was dropped; safe to call twice."""
        if self._background is not None:
            self._background.close(timeout_s)


def append(path: Path, kind: str, **fields: object) -> None:
    """Write one record at once, into a file that a task may write to as well; a full disk loses it."""
    record = _line({"t": time.time(), "kind": kind, **fields})
    with suppress(OSError), files.appending(path.parent.parent, path) as file:
        file.write(b"\n" + record)  # a killed task may have left half a line


class _JsonLines:
    """Appends whole lines to one file; opened on first use, and again after a failure."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def write(self, line: bytes) -> None:
        try:
            if self._file is not None and losses.removed(self._path, self._file.fileno(), REMOVED):
                self._let_go()
            file = self._file or self._open()
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # it took only a part of the line
        except OSError as error:
            self._let_go()
            losses.tell(self._path, error, LOST)
            raise

    def flush(self) -> None:
        """Nothing to do: the file has no buffer."""

    def finish(self, dropped: int) -> None:
        try:
            self.write(_line({"t": time.time(), "kind": "close", "dropped": dropped}))
        finally:
            self._let_go()

    def _open(self) -> BinaryIO:
        file = files.appending(self._path.parent.parent, self._path)
        if _ends_inside_a_line(self._path):
            try:
                file.write(b"\n")
            except OSError:
                file.close()
                raise
        self._file = file
        return file

    def _let_go(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _ends_inside_a_line(path: Path) -> bool:
    """A killed task, or a full disk, leaves half a line; the next record must not be glued to it."""
    with files.reading(path.parent.parent, path) as file:
        if not file.seek(0, 2):
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _line(record: dict[str, object]) -> bytes:
    return files.as_json(record, enc_hook=_plain) + b"\n"


def _plain(value: object) -> object:
    """Numbers of numpy and torch as numbers, everything else as text."""
    return float(value) if isinstance(value, SupportsFloat) else str(value)
