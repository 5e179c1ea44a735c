"""HOW much can a client cost a task that serves ops? Only what it sends, and only as long as it is there."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from op_servers import Serving, double, serving

import paceline
from paceline.errors import ConnectionLost, UsageError
from paceline.ingraph import values
from paceline.transport.channel import Channel, connect
from paceline.transport.security import Role
from paceline.wire import ops
from paceline.wire.frames import Kind

__all__ = ["serving"]
TASK_0, TASK_1 = "/job:worker/task:0", "/job:worker/task:1"
GIB = 1 << 30


def connected(serving: Serving, role: Role = Role.CLIENT) -> Channel:
    address, secret = serving.cluster.task_address("worker", 0), serving.client.assignment.secret
    channel = connect(address, "tcp", secret, role=role)
    channel.stream.set_timeout(10)
    return channel


def claim(channel: Channel, bulk_bytes: int) -> None:
    """The frame of a call with so many bytes, which do not follow."""
    tail = ops.encode(ops.Call("alive", 1))
    channel.stream.send([channel._codec.pack(Kind.COLD, 0, 0, 0, 0, 0, tail, 0, 0, bulk_bytes), tail])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def until(is_true: Callable[[], bool]) -> None:
    """Looks again and again, ten seconds long."""
    look = threading.Event()
    for _ in range(1000):
        if is_true():
            return
        look.wait(0.01)
    raise AssertionError("it did not become true")


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_claim_alone_takes_no_memory(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    serving.start(0)
    made: list[int] = []
    new_block = values.new_block

    def noted(size_bytes: int) -> memoryview:
        made.append(size_bytes)
        return new_block(size_bytes)

    monkeypatch.setattr(values, "new_block", noted)
    before = resident_bytes()
    channels = [connected(serving) for _ in range(4)]
    for channel in channels:
        claim(channel, GIB)
    until(lambda: made.count(GIB) == 4)
    assert resident_bytes() - before < 64 << 20
    for channel in channels:
        channel.close()


def test_a_claim_that_nobody_could_hold_ends_the_connection_and_is_said(
    serving: Serving, capfd: pytest.CaptureFixture[str]
) -> None:
    serving.start(0)
    for bulk_bytes in (1 << 62, (1 << 36) + 1):
        channel = connected(serving)
        claim(channel, bulk_bytes)
        with pytest.raises(ConnectionLost):
            channel.recv()
        channel.close()
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("Refused")]
    assert len(said) == 2 and f"a value of {1 << 62} bytes; {1 << 36} is the limit" in said[0]
    with paceline.device(TASK_0):
        assert double(2) == 4, "the task goes on"


def test_what_is_too_large_for_one_call_is_refused_before_it_is_sent(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving.start(0)
    monkeypatch.setattr(values, "MAX_BULK_BYTES", 3000)
    with pytest.raises(UsageError, match="cannot travel at once, 3000 can"), paceline.device(TASK_0):
        double(torch.zeros(1000))
    told = r"What op_servers:double returned on .*task:0: A value of \d+ bytes cannot travel at once"
    with pytest.raises(UsageError, match=told), paceline.device(TASK_0):
        double(b"x" * 2000)
