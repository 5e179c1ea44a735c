"""The supervisor's side of a ps's memory: what was kept is given to the next start, whatever the last one died of."""

import mmap
import os
import socket
import sys
from collections.abc import Iterator

import msgspec
import pytest

from paceline.launchers.keeper import Keeper

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfds are Linux's")


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper("ps:0")
    yield made
    made.close()
    assert made.names == []


def memory(text: bytes) -> int:
    descriptor = os.memfd_create("piece")
    os.write(descriptor, text)
    return descriptor


def say_keep(side: socket.socket, name: str, text: bytes) -> None:
    descriptor = memory(text)
    said = {"op": "keep", "name": name, "size_bytes": len(text)}
    socket.send_fds(side, [msgspec.msgpack.encode(said)], [descriptor])
    os.close(descriptor)


def given(side: socket.socket) -> dict[str, bytes]:
    side.send(msgspec.msgpack.encode({"op": "give"}))
    found = {}
    while True:
        message, descriptors, _, _ = socket.recv_fds(side, 4096, 1)
        said = msgspec.msgpack.decode(message)
        if said == {"end": True}:
            return found
        with mmap.mmap(descriptors[0], said["size_bytes"]) as mapped:
            found[said["name"]] = mapped[:]
        os.close(descriptors[0])


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_was_kept_is_given_to_the_next_start(keeper: Keeper) -> None:
    with keeper.connect() as side:
        assert given(side) == {}
        for name, text in {"a": b"old", "b": b"two", "c": b"gone"}.items():
            say_keep(side, name, text)
        say_keep(side, "a", b"newer")
        side.send(msgspec.msgpack.encode({"op": "free", "name": "c"}))
    with keeper.connect() as side:
        assert given(side) == {"b": b"two", "a": b"newer"}
    with keeper.connect() as side:
        assert given(side) == {"b": b"two", "a": b"newer"}, "and to the one after it"


def test_the_last_word_of_a_dead_ps_counts(keeper: Keeper) -> None:
    with keeper.connect() as side:
        for number in range(50):
            say_keep(side, f"piece-{number % 7}", str(number).encode())
    with keeper.connect() as side:
        assert given(side) == {f"piece-{number % 7}": str(number).encode() for number in range(43, 50)}


def test_a_write_after_the_hand_over_is_seen_by_the_next_start(keeper: Keeper) -> None:
    descriptor = memory(b"1234")
    with keeper.connect() as side, mmap.mmap(descriptor, 4) as mapped:
        socket.send_fds(side, [msgspec.msgpack.encode({"op": "keep", "name": "a", "size_bytes": 4})], [descriptor])
        mapped[:] = b"5678"
    os.close(descriptor)
    with keeper.connect() as side:
        assert given(side) == {"a": b"5678"}


def test_forgotten_memory_is_not_given_and_no_descriptor_stays() -> None:
    before = num_descriptors()
    keeper = Keeper("ps:1")
    with keeper.connect() as side:
        for name in ("a", "a", "b"):
            say_keep(side, name, b"text")
    keeper.forget()
    with keeper.connect() as side:
        assert given(side) == {}
        say_keep(side, "c", b"text")
    keeper.close()
    assert num_descriptors() == before


@pytest.mark.parametrize("text", [b"\xc1", b"\x81\xa2op\xa3eat", b"x" * 4096])
def test_what_is_not_understood_ends_the_pair_and_keeps_the_memory(keeper: Keeper, text: bytes) -> None:
    with keeper.connect() as side:
        say_keep(side, "a", b"text")
        side.send(text)
        assert side.recv(100) == b""
    with keeper.connect() as side:
        assert given(side) == {"a": b"text"}
