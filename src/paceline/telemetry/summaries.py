"""HOW does TensorBoard see the run? Writes what the chief logs as event files under `<run_dir>/tensorboard`.

Called by the chief's `ctx.log`, with the global step; the extra `tb` (tensorboardX) brings the file format. Made when
the framework of the worker is loaded, for tensorboardX imports torch where it can.
Must never stop or slow training: without the extra nothing is written; a full disk loses points, not steps.
"""

import importlib
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline import forks
from paceline.telemetry.background import Background

FORMAT = "brain.Event:2"  # the first record of every event file


class EventWriter:
    """Scalars by name and step; `available` is False where tensorboardX is not installed."""

    def __init__(self, run_dir: Path | str) -> None:
        self._background: Background[_Point] | None = None
        try:
            with _out_of_sight("torch"):
                boardx = importlib.import_module("tensorboardX")
                events = importlib.import_module("tensorboardX.proto.event_pb2")
        except Exception:
            return  # not installed, or broken by another package: an extra must not end a training run
        folder = Path(run_dir, "tensorboard").absolute()
        self._background = Background("paceline-tensorboard", _EventFile(folder, boardx.RecordWriter, events.Event))

    @property
    def available(self) -> bool:
        """Whether points are written at all; the caller says so once if not."""
        return self._background is not None

    @property
    def dropped(self) -> int:
        """How many calls of `scalars` were lost so far."""
        return self._background.dropped if self._background else 0

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """One point for each name at this global step."""
        if self._background is not None and values:
            self._background.put((time.time(), step, dict(values)))

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left; safe to call twice."""
        if self._background is not None:
            self._background.close(timeout_s)


@contextmanager
def _out_of_sight(name: str) -> Iterator[None]:
    """A package that would import another one only to know its type does without: a TensorFlow worker has no torch.
    Who has imported it already, as a torch worker has by now, sees no difference."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # so an import says that there is none
    try:
        yield
    finally:
        sys.modules.pop(name, None)


_Point = tuple[float, int, dict[str, float]]


class _EventFile:
    """One event file, opened at the first point (not tensorboardX's SummaryWriter: its queue blocks)."""

    def __init__(self, folder: Path, record_writer: Any, event: Any) -> None:
        self._folder = folder
        self._record_writer = record_writer
        self._event = event
        self._file: Any = None
        forks.hold(self)

    def write(self, point: _Point) -> None:
        if self._file is None:
            self._file = self._open()
        t, step, values = point
        event = self._event(wall_time=t, step=step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=float(value))
        self._file.write(event.SerializeToString())

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def finish(self, dropped: int) -> None:
        if self._file is not None:
            self._file.close()

    def close_in_child(self) -> None:
        """Leave to the parent what lies in the file's buffer, which would also be written when the child ends."""
        with suppress(AttributeError, OSError, ValueError), open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), self._file._writer.fileno(), inheritable=False)

    def _open(self) -> Any:
        self._folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # The process id keeps a chief restarted within the same second from writing over its own past.
        name = f"events.out.tfevents.{now:.0f}.{platform.node()}.{os.getpid()}"
        file = self._record_writer(str(self._folder / name))
        file.write(self._event(wall_time=now, file_version=FORMAT).SerializeToString())
        return file
