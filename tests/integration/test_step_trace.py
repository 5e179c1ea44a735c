"""Trace one step of one worker and one ps over shared memory: its Python calls, its files, and docs/step.md.

`python tests/integration/test_step_trace.py` prints the calls of both sides in order, with file and function.
"""

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import paceline
from paceline.launchers import serving
from paceline.launchers.threads import launch
from paceline.server.memory import Memory
from paceline.wire.frames import ANSWERED

SOURCE = Path(paceline.__file__).parent
PAGE = SOURCE.parent.parent / "docs" / "step.md"
FILES_LINE = "**Files that one step passes**"
STEPS = 30
SETTLE_S = 2e-3  # the ps has done what it does after its answer, and waits for the next push

MAX_WORKER_CALLS, MAX_PS_CALLS = 22, 19  # lower them with every call that goes; at last 50 together
MAX_FILES = 14  # and 12

Call = tuple[str, str]  # file below src/paceline, function


class Recorder:
    """A profile function for all threads; notes calls of ours between `begin` and `end`, by thread."""

    def __init__(self) -> None:
        self._calls: dict[int, list[Call]] | None = None
        self._is_answered: Callable[[], bool] = lambda: False
        self._worker = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        calls = self._calls
        if event != "call" or calls is None:
            return
        path = Path(frame.f_code.co_filename)
        if SOURCE not in path.parents:
            return
        ident = threading.get_ident()
        is_ps = threading.current_thread().name == "connection"
        if ident != self._worker and (not is_ps or self._is_answered()):
            return  # heartbeats and ticks; what a ps does after its answer
        calls.setdefault(ident, []).append((path.relative_to(SOURCE).as_posix(), frame.f_code.co_qualname))

    def begin(self, is_answered: Callable[[], bool]) -> None:
        """Trace from now on; `is_answered` tells whether the answer to the next push has been written."""
        self._worker, self._is_answered = threading.get_ident(), is_answered
        self._calls = {}

    def end(self) -> tuple[list[Call], list[Call]]:
        """Return the calls of the worker and those of the ps."""
        calls, self._calls = self._calls or {}, None
        worker = calls.pop(self._worker)
        return worker, max(calls.values(), key=len)


def traced() -> tuple[list[Call], list[Call]]:
    """The shortest of some steps: a worker that looks for its answer may look more than once."""
    recorder, found = Recorder(), []

    def train(ctx: Any) -> None:
        torch.set_num_threads(1)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ctx.prepare(model, optimizer)
        link = ctx._session.training_step.client.links[0]
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(2, 5)).square().mean().backward()
            time.sleep(SETTLE_S)
            push_id = ctx._session.training_step.client.push_id + 1
            recorder.begin(lambda push_id=push_id: link._bell[ANSWERED] == push_id)
            optimizer.step()
            found.append(recorder.end())

    threading.setprofile(recorder)
    try:
        with _kept_memory():
            launch(train, workers=1, lane="shm")
    finally:
        threading.setprofile(None)
    return min(found, key=lambda both: len(both[0]) + len(both[1]))


class _Kept(Memory):
    """A ps writes its journal, as it does under `paceline run`."""

    is_kept = True


@contextmanager
def _kept_memory() -> Iterator[None]:
    make = serving.make_service
    serving.make_service = lambda made, on_report, memory, owns: make(made, on_report, _Kept(), owns)
    try:
        yield
    finally:
        serving.make_service = make


def test_one_step() -> None:
    """It crosses few Python calls and few files, and the page about it names these files and no others."""
    worker, ps = traced()
    files = {file for file, _ in worker + ps}
    assert len(worker) <= MAX_WORKER_CALLS, text_of("worker", worker)
    assert len(ps) <= MAX_PS_CALLS, text_of("ps", ps)
    assert len(files) <= MAX_FILES, sorted(files)
    said = next(part for part in PAGE.read_text().split("\n\n") if part.startswith(FILES_LINE))
    assert set(re.findall(r"`([\w/]+\.py)`", said)) == files


def text_of(side: str, calls: list[Call]) -> str:
    lines = [f"  {file}:{function}" for file, function in calls]
    return "\n".join([f"{side}: {len(calls)} calls, {len({file for file, _ in calls})} files", *lines])


if __name__ == "__main__":
    of_worker, of_ps = traced()
    print(text_of("worker", of_worker))
    print(text_of("ps", of_ps))
    print(f"both: {len(of_worker) + len(of_ps)} calls, {len({file for file, _ in of_worker + of_ps})} files")
    sys.exit(0)
