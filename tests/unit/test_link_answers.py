"""An answer that comes in a moment is looked for before the worker sleeps; a later one wakes it by a frame."""

from types import SimpleNamespace

import pytest

from paceline.wire.frames import SEGMENT_HEAD_BYTES, Bell, Frame, Kind, Outcome
from paceline.worker import link as module
from paceline.worker.link import Link

ANSWER = Frame(Kind.ANSWER, Outcome.APPLIED, 0, 0, 0, 0, 7, 3, 0)


class Waiting:
    """A link that waits for push 7; `after` how many looks the ps answers, None: by a frame alone."""

    def __init__(self, patch: pytest.MonkeyPatch, lane: str, after: int | None) -> None:
        self.header = memoryview(bytearray(SEGMENT_HEAD_BYTES))
        self.ps, self.looks, self.frames = Bell(self.header), 0, 0
        self._after, self._now_s = after, 0.0
        channel = SimpleNamespace(lane=lane, shares_memory=True, recv=self._recv)
        self.link = Link(channel, 0, memoryview(bytearray(8)), 1, 1)  # type: ignore[arg-type]
        self.link._bell = self.ps.cells
        patch.setattr(module.os, "sched_yield", self._look)
        patch.setattr(module, "perf_counter", self._passing)
        if after == 0:
            self.ps.ring(7, 3, Outcome.APPLIED, 0)

    def _look(self) -> None:
        self.looks += 1
        if self.looks == self._after:
            assert not self.ps.ring(7, 3, Outcome.APPLIED, 0), "nobody sleeps yet"

    def _passing(self) -> float:
        self._now_s += module.LOOK_S / 10
        return self._now_s

    def _recv(self) -> Frame:
        self.frames += 1
        assert self.ps.ring(7, 3, Outcome.APPLIED, 0), "it sleeps, and the ps knows"
        return ANSWER


@pytest.mark.parametrize(("after", "looks"), [(0, 0), (3, 3)])
def test_an_answer_that_comes_at_once_costs_no_frame(after: int, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch, "shm", after)
    assert waiting.link.answer(7) == (Outcome.APPLIED, 0, 3, b"")
    assert (waiting.looks, waiting.frames) == (looks, 0)


def test_after_a_moment_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch, "shm", None)
    assert waiting.link.answer(7) == (Outcome.APPLIED, 0, 3, b"")
    assert 5 < waiting.looks < 15 and waiting.frames == 1


def test_a_ps_in_the_same_process_is_not_kept_from_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch, "inproc", None)
    assert waiting.link.answer(7) == (Outcome.APPLIED, 0, 3, b"")
    assert (waiting.looks, waiting.frames) == (0, 1)


def test_looking_is_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch, "shm", 3)
    waiting.link.answer(7)
    assert waiting.link.clock.wait_s == pytest.approx(4 * module.LOOK_S / 10, rel=0.5)
