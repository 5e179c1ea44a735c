"""DOES memory that a keeper holds stay small, and does nobody wait for the keeper while training goes on?"""

import os
import socket
from collections.abc import Iterator

import msgspec
import pytest

from paceline.launchers.keeper import Keeper
from paceline.params.arena import has_shared_memory
from paceline.server.journal import Twin
from paceline.server.memory import KeptMemory, Piece

pytestmark = pytest.mark.skipif(not has_shared_memory(), reason="memory that can be handed over is Linux's")


@pytest.fixture
def kept() -> Iterator[KeptMemory]:
    keeper = Keeper("ps:0")
    memory = KeptMemory(keeper.connect())
    yield memory
    memory._keeper.close()
    keeper.close()


def descriptors(kept: KeptMemory) -> int:
    """When the keeper has heard all that was said to it: it answers this question after that."""
    kept._take_all()
    return len(os.listdir("/proc/self/fd"))


def test_what_is_freed_or_replaced_leaves_no_descriptor(kept: KeptMemory) -> None:
    kept.put("counts", b"first")
    before = descriptors(kept)
    for number in range(20):
        kept.arena("sum.1.1", 64).close()
        kept.free("sum.1.1")
        kept.arena("undo.0", 64 + 64 * number)
        kept.put("counts", b"%d" % number)
    kept.free("undo.0")
    assert descriptors(kept) == before


def test_what_is_written_often_needs_no_keeper(kept: KeptMemory) -> None:
    """A launcher that is stopped stops nobody."""
    twin = Twin(kept, "counts")
    assert twin.read() is None
    twin.write(b"a" * 1000)
    kept._keeper.close()  # from here on every word to the keeper fails
    for number in range(5):
        twin.write(b"%d" % number * 100)
        assert twin.read() == b"%d" % number * 100
    twin.write(b"b" * 2000)
    assert twin.read() == b"b" * 2000


def test_the_next_life_finds_what_was_written_last() -> None:
    keeper = Keeper("ps:0")
    first = KeptMemory(keeper.connect())
    twin = Twin(first, "counts")
    twin.write(b"old")
    twin.write(b"new and longer")
    first._keeper.close()
    second = KeptMemory(keeper.connect())
    assert Twin(second, "counts").read() == b"new and longer"
    second._keeper.close()
    keeper.close()


def test_a_keeper_that_is_gone_ends_no_thread_with_a_traceback() -> None:
    """Its launcher was killed: the kernel ends this ps in a moment, and until then it serves."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.send(msgspec.msgpack.encode(Piece(end=True)))
    memory = KeptMemory(ours)
    memory.arena("undo.0", 64)
    theirs.close()
    memory.put("counts", b"1")
    memory.arena("undo.0", 128)
    memory.free("undo.0")
    ours.close()
