"""ARE bytes counted as they travel? A known number of pushes of a known size, and what the kernel says of it."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lane_pairs import Running, connected, lanes
from torch import nn

import paceline
from paceline.transport.channel import Channel, Counts
from paceline.wire.frames import FRAME_BYTES, Kind

STEPS = 7
SIZE_BYTES = 4 * 64 * 64
KEYS = (b"u" * 32, b"d" * 32)
FOR_A_FRAME = 2 * FRAME_BYTES  # itself, and a tail that says which tensors had a gradient


def trained(found: dict[str, Any]) -> Any:
    """A worker that trains a model of SIZE_BYTES, and leaves what was counted in STEPS steps."""

    def work(ctx: Any) -> None:
        model = nn.Linear(64, 64, bias=False)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        link = ctx._session.training_step.client.links[0]

        def steps(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                model(torch.ones(2, 64)).sum().backward()
                optimizer.step()
            _ = ctx.global_step  # takes the last answer

        steps(3)
        before, found["frames"] = link.counts(), link.channel.bytes_out
        steps(STEPS)
        found["counts"] = (before, link.counts())
        found["frames"] = link.channel.bytes_out - found["frames"]

    return work


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("lane", lanes())
def test_pushes_and_pulls_are_counted_to_the_byte(lane: str, wire: str, tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    told = paceline.launch(trained(found), ps=1, workers=1, lane=lane, wire=wire, run_dir=str(tmp_path))
    before, after = found["counts"]
    pushed = STEPS * SIZE_BYTES // (1 if wire == "float32" else 2)
    assert after.sent - before.sent == pushed
    assert after.received - before.received == STEPS * SIZE_BYTES
    (pair,) = told["pairs"]
    assert (pair["worker"], pair["ps"], pair["lane"]) == ("worker:0", "ps:0", lane)
    assert pair["pushed_bytes"] >= after.sent and pair["pulled_bytes"] >= after.received
    assert "pairs" not in told["workers"][0] and told["tasks"] == [], "threads have no numbers of their own"
    if lane != "tcp":
        assert after.tcp_sent is None and pair["tcp_sent_bytes"] is None
    elif sys.platform == "linux":
        by_kernel = after.tcp_sent - before.tcp_sent, after.tcp_received - before.tcp_received
        assert by_kernel[0] == found["frames"], "every byte that was counted was sent, and none that was not"
        assert pushed <= by_kernel[0] <= pushed + STEPS * FOR_A_FRAME
        assert STEPS * SIZE_BYTES <= by_kernel[1] <= STEPS * (SIZE_BYTES + FOR_A_FRAME)
        assert pair["tcp_sent_bytes"] >= pair["pushed_bytes"]


@pytest.mark.parametrize("size_bytes", [1000, 3 << 20])
def test_both_ends_and_the_kernel_agree(size_bytes: int) -> None:
    with connected("tcp") as streams:
        client, server = (Channel(stream, keys) for stream, keys in zip(streams, (KEYS, KEYS[::-1]), strict=True))
        data, into = bytes(size_bytes), memoryview(bytearray(size_bytes))
        sending = Running(lambda: client.send(Kind.PUSH, bulk=[data]))
        server.recv_bulk(server.recv(), into)
        sending.result()
        server.send(Kind.ANSWER)
        client.recv()
        assert (client.payload_out, client.payload_in) == (server.payload_in, server.payload_out) == (size_bytes, 0)
        here, there = client.counts(), server.counts()
        client.close()
        client.close()
        assert client.counts() == here, "what the kernel said before it was closed"
    if sys.platform == "linux":
        assert here.tcp_sent == there.tcp_received and here.tcp_received == there.tcp_sent == FRAME_BYTES
        assert here.tcp_sent is not None and 0 <= here.tcp_sent - client.bytes_out <= 8, "the digest of a large payload"


def test_a_connection_nobody_knows_of_makes_the_sum_unknown() -> None:
    known = Counts(5, 6, 70, 80)
    assert known + Counts(1, 1, 10, 10) == Counts(6, 7, 80, 90)
    assert known + Counts(1, 1, None, None) == Counts(6, 7, None, None)
