"""CAN a worker read half an update? Trap 4 on real memory: another process updates while Link.read copies."""

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.params.arena import Arena
from paceline.params.layout import Layout, TensorSpec, align
from paceline.params.placement import place
from paceline.server.numbers.shard import Shard
from paceline.wire.frames import Frame, Kind
from paceline.wire.messages import Join, Joined, OptimizerSpec, encode
from paceline.worker.requests import link as link_module
from paceline.worker.requests.link import SEGMENT_HEAD_BYTES, Link

SIZE_BYTES = align(318_000)  # the MNIST model of the recipe
READS = 400

UPDATES = """
import mmap, sys
import numpy as np

fd, size = int(sys.argv[1]), int(sys.argv[2])
memory = memoryview(mmap.mmap(fd, size))
sequence = memory[:8].cast("Q")
numbers = np.frombuffer(memory[int(sys.argv[3]):], dtype=np.uint64)
other = np.zeros(numbers.size // 2, dtype=np.uint64)
print("ready", flush=True)
version = 0
while True:
    version += 1
    sequence[0] += 1
    numbers.fill(version)  # every number is the version: a mixture is torn
    sequence[0] += 1
    other.fill(version)  # something else than updating, as a ps does between two
"""


JOIN = Join(
    job="worker",
    worker=0,
    incarnation=1,
    run_id="r",
    is_chief=True,
    mode="async",
    placement="bytes",
    num_ps=1,
    layout=Layout(()),
    optimizer=OptimizerSpec("SGD", []),
)


def answer(push_id: int, version: int) -> Frame:
    return Frame(Kind.ANSWER, 0, 0, 0, 0, 0, push_id, version, 0)


class FromSegment:
    """What Link needs of a channel: the segment of parameters, a slot, and a ps that copies when it is asked."""

    shares_memory = True
    lane = "inproc"

    def __init__(self, parameters: Arena) -> None:
        self.stream = self
        self.slot = Arena.shared(SEGMENT_HEAD_BYTES + SIZE_BYTES)
        self.into_slot = 0
        self.on_its_way: list[Frame] = []
        self._parameters = parameters

    def say(self, request: object, bulk: object = ()) -> None:
        pass

    def recv_cold(self) -> SimpleNamespace:
        joined = Joined(True, 0, 0, [SEGMENT_HEAD_BYTES + SIZE_BYTES] * 2)
        return SimpleNamespace(tail=encode(joined), bulk_bytes=0)

    def recv_arenas(self, sizes: object, writable: object) -> list[Arena]:
        return [self._parameters, self.slot]

    def send(self, *args: object, **kwargs: object) -> None:
        """PULL with INTO_SLOT. No lock is here to be had, so a copy is made until one was not disturbed."""
        self.into_slot += 1
        memory = self._parameters.memory
        sequence = memory[:8].cast("Q")
        while True:
            before = sequence[0]
            self.slot.memory[SEGMENT_HEAD_BYTES:] = memory[SEGMENT_HEAD_BYTES:]
            if before % 2 == 0 and sequence[0] == before:
                self.on_its_way.append(answer(int(kwargs["push_id"]), before // 2))  # type: ignore[call-overload]
                return

    def recv(self) -> Frame:
        return self.on_its_way.pop(0)


@pytest.fixture
def parameters() -> Iterator[Arena]:
    """A segment that another process updates as fast as it can."""
    arena = Arena.shared(SEGMENT_HEAD_BYTES + SIZE_BYTES)
    assert arena.fd is not None
    command = [sys.executable, "-c", UPDATES, str(arena.fd), str(arena.size_bytes), str(SEGMENT_HEAD_BYTES)]
    with subprocess.Popen(command, pass_fds=[arena.fd], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield arena
        finally:
            process.kill()


def joined(parameters: Arena) -> tuple[Link, np.ndarray]:
    into = memoryview(bytearray(SIZE_BYTES))
    link = Link(FromSegment(parameters), 0, into, 0, 1)  # type: ignore[arg-type]
    link.join(JOIN)
    return link, np.frombuffer(into, dtype=np.uint64)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no shm lane")
def test_no_read_is_torn(parameters: Arena) -> None:
    link, numbers = joined(parameters)
    versions: list[int] = []
    while len(versions) < READS or len(set(versions)) < 20:  # the other process may have to wait for a core
        link.read(push_id=len(versions))
        assert numbers.min() == numbers.max() == link.version
        versions.append(link.version)
    assert versions == sorted(versions)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no shm lane")
def test_without_the_second_look_reads_are_torn(parameters: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same reader, with a sequence number that never seems to change."""
    link, numbers = joined(parameters)
    monkeypatch.setattr(link, "_sequence", np.zeros(1, dtype=np.uint64))
    torn = 0
    while torn < 3:  # or the test's time is up: then it does not disturb enough
        link.read(push_id=1)
        torn += bool(numbers.min() != numbers.max())


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no shm lane")
def test_a_read_that_is_always_disturbed_asks_the_ps(parameters: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "TORN_TRIES", 0)
    link, numbers = joined(parameters)
    for number in range(20):
        link.read(push_id=number)
        assert numbers.min() == numbers.max() == link.version
    assert link.channel.into_slot == 20  # type: ignore[attr-defined]


def test_the_answer_to_the_push_is_not_taken_for_a_copy_in_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that was sent to wake a worker that was awake already; then its read is disturbed too often."""
    monkeypatch.setattr(link_module, "TORN_TRIES", 0)
    parameters = Arena.shared(SEGMENT_HEAD_BYTES + SIZE_BYTES)
    link, numbers = joined(parameters)
    channel = link.channel
    channel.on_its_way.append(answer(push_id=7, version=0))  # type: ignore[attr-defined]
    parameters.memory[:8].cast("Q")[0] = 2 * 5
    link.read(push_id=7)
    assert link.version == 5
    assert channel.on_its_way == []  # type: ignore[attr-defined]
    assert numbers.max() == 0


def test_values_from_outside_are_seen_by_a_reader_in_the_middle() -> None:
    """An assignment makes no version, but the sequence number must not come back to what it was."""
    numel = SIZE_BYTES // 4
    layout = Layout((TensorSpec("w", (numel,), (1,), "float32", 0),))
    shard = Shard(layout, place(layout, 1, "bytes"), 0, OptimizerSpec("SGD", [{"lr": 0.1}]))
    link, numbers = joined(shard.arena)
    sequence = shard.arena.memory[:8].cast("Q")
    for count in range(1, 4):
        before = sequence[0]
        shard.assign(memoryview(bytes([count]) * shard.size_bytes))
        assert sequence[0] != before
        link.read(push_id=1)
        assert link.version == 0
        assert numbers.max() == int.from_bytes(bytes([count]) * 8, "little")
    slot = shard.new_slot()
    shard.apply([(slot, False, True)])
    link.read(push_id=1)
    assert link.version == 1
