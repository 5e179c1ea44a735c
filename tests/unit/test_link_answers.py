"""An answer that comes in a moment is looked for before the worker sleeps; a later one wakes it by a frame."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from paceline.server.service import ring
from paceline.transport.base import Buffer, Stream
from paceline.transport.channel import Channel
from paceline.wire.frames import SEGMENT_HEAD_BYTES, Frame, Kind, Outcome
from paceline.worker.requests import link as module
from paceline.worker.requests.link import Link

ANSWER = Frame(Kind.ANSWER, Outcome.APPLIED, 0, 0, 0, 0, 7, 3, 0)


class Waiting:
    """A link that waits for push 7; `after` how many looks the ps answers, None: by a frame alone."""

    def __init__(self, patch: pytest.MonkeyPatch, lane: str, after: int | None) -> None:
        self.header = memoryview(bytearray(SEGMENT_HEAD_BYTES))
        self.cells, self.looks, self.frames = self.header.cast("Q"), 0, 0
        self._after, self._now_s = after, 0.0
        channel = SimpleNamespace(lane=lane, shares_memory=True, recv=self._recv)
        self.link = Link(channel, 0, memoryview(bytearray(8)), 1, 1)  # type: ignore[arg-type]
        self.link._bell = self.cells
        patch.setattr(module.os, "sched_yield", self._look)
        patch.setattr(module, "perf_counter", self._passing)
        if after == 0:
            ring(self.cells, 7, 3, Outcome.APPLIED, 0)

    def _look(self) -> None:
        self.looks += 1
        if self.looks == self._after:
            assert not ring(self.cells, 7, 3, Outcome.APPLIED, 0), "nobody sleeps yet"

    def _passing(self) -> float:
        self._now_s += module.LOOK_S / 10
        return self._now_s

    def _recv(self) -> Frame:
        self.frames += 1
        assert ring(self.cells, 7, 3, Outcome.APPLIED, 0), "it sleeps, and the ps knows"
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


class Tape(Stream):
    """Plays what was sent to it."""

    def __init__(self) -> None:
        self.data = bytearray()

    def send(self, buffers: Sequence[Buffer], size_bytes: int = -1) -> None:
        for buffer in buffers:
            self.data += buffer

    def recv_some(self, view: memoryview) -> int:
        size = min(len(view), len(self.data))
        view[:size] = self.data[:size]
        del self.data[:size]
        return size


def test_the_parameters_of_a_push_that_was_given_up_are_thrown_away() -> None:
    """Its answer may still be on the connection, on tcp with parameters behind it."""
    tape = Tape()
    ps = Channel(tape, (b"d" * 32, b"u" * 32))
    for push_id, value in ((6, b"a"), (6, b"b"), (7, b"c")):
        ps.send(Kind.ANSWER, outcome=Outcome.APPLIED, push_id=push_id, version=push_id, bulk=(value * 8,))
    into = memoryview(bytearray(8))
    link = Link(Channel(tape, (b"u" * 32, b"d" * 32)), 0, into, 1, 1)
    assert link.frame(7) == (Outcome.APPLIED, 0, 7, b"")
    assert (bytes(into), link.version) == (b"c" * 8, 7)
