"""Trap 11: the hot path. Fixed 64-byte frames with a keyed MAC; no message is encoded for a usual step."""

import threading
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import paceline
from paceline.errors import ProtocolError
from paceline.server import service
from paceline.transport import channel
from paceline.transport.channel import Codec
from paceline.wire import messages
from paceline.wire.frames import FRAME_BYTES, Kind
from paceline.worker.step import training_step

LOCK = threading.Lock()


def test_a_frame_has_one_size_whatever_it_says() -> None:
    codec = Codec(b"1" * 32, b"2" * 32)
    frames = [bytes(codec.pack(Kind.PUSH, 0, 0, 1, 0, b"", n, n, n)) for n in (0, 1, 1 << 20, (1 << 63) - 1)]
    assert {len(f) for f in frames} == {FRAME_BYTES}
    said = [msgspec.msgpack.encode({"push_id": n, "version": n}) for n in (0, 1 << 20, (1 << 63) - 1)]
    assert len({len(s) for s in said}) > 1, "a message must be measured before it can be read"


@pytest.mark.parametrize("byte", [0, 3, 20, 40, 50, 63])
def test_a_changed_or_repeated_frame_is_refused(byte: int) -> None:
    ours, theirs = Codec(b"1" * 32, b"2" * 32), Codec(b"2" * 32, b"1" * 32)
    good = bytes(ours.pack(Kind.PUSH, 0, 1, 1, 0, b"", 7, 3, 100))
    bad = bytearray(good)
    bad[byte] ^= 1
    with pytest.raises(ProtocolError, match="MAC"):
        theirs.unpack(bad)
    fresh = Codec(b"2" * 32, b"1" * 32)
    assert fresh.unpack(bytearray(good)).push_id == 7
    with pytest.raises(ProtocolError, match="replayed"):
        fresh.unpack(bytearray(good))


@pytest.mark.parametrize(("mode", "ps", "lane"), [("async", 1, "shm"), ("async", 2, "tcp"), ("sync", 1, "inproc")])
def test_a_usual_step_encodes_and_decodes_no_message(
    mode: str, ps: int, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: between two steps in the middle of a training nothing goes through msgspec."""
    counted: list[Any] = []

    seen: dict[int, int] = {}
    workers = 2
    gate = threading.Barrier(workers, timeout=60)

    def work(ctx: paceline.Context) -> None:
        with LOCK:
            model = nn.Linear(8, 8)
        model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()

        for _ in range(5):
            step()
        ctx._session.training_step.settle()
        gate.wait()
        before = len(counted)
        for _ in range(20):
            step()
        ctx._session.training_step.settle()
        gate.wait()
        seen[ctx.worker_index] = len(counted) - before
        gate.wait()

    for module in (service, channel, training_step):
        for name in ("encode", "decode"):
            if hasattr(module, name):
                inner = getattr(messages, name)
                monkeypatch.setattr(module, name, lambda value, inner=inner: counted.append(1) or inner(value))
    paceline.launch(work, ps=ps, workers=workers, mode=mode, lane=lane)
    assert len(counted) > 10, "joining and closing do encode messages: the counter works"
    assert seen == {0: 0, 1: 0}
