"""WHEN is large bulk read from a tcp stream? Where more read than there are cores, when it is all there, or after a
moment; never later than it came."""

import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from paceline.errors import ConnectionLost, WaitTimeout
from paceline.transport import tcp
from paceline.transport.tcp import GATHER_BYTES, TcpStream

SIZE = 2 * GATHER_BYTES
DATA = bytes(range(256)) * (SIZE // 256)


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """More read at the same time than there are cores, unless a test says otherwise."""
    monkeypatch.setattr(tcp.os, "sched_getaffinity", lambda pid: set())


@pytest.fixture
def pair() -> Iterator[tuple[TcpStream, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near = TcpStream(listener.accept()[0])
    with far:
        yield near, far
        near.close()


def lowest(stream: TcpStream) -> int:
    return stream._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


def test_all_of_it_comes_and_a_byte_after_it_is_heard_at_once(pair: tuple[TcpStream, socket.socket]) -> None:
    """Who asks the kernel to wait for much must take that back: a frame of 64 bytes would never wake anybody."""
    near, far = pair
    near.set_timeout(10)
    sending = threading.Thread(target=far.sendall, args=(DATA,))
    sending.start()
    into = bytearray(SIZE)
    near.recv_into(memoryview(into))
    sending.join(60)
    assert into == DATA
    assert lowest(near) == 1
    far.sendall(b"x")
    near.recv_into(memoryview(into)[:1])
    assert into[:1] == b"x"


def test_what_comes_slowly_comes_whole(pair: tuple[TcpStream, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than is gathered, and then, only after nobody waited for all of it any more, the rest."""
    near, far = pair
    near.set_timeout(10)
    first, rest = DATA[: GATHER_BYTES // 2], DATA[GATHER_BYTES // 2 :]
    gather = near._gather

    def gathered(size_bytes: int) -> None:
        gather(size_bytes)
        threading.Thread(target=far.sendall, args=(rest,)).start()
        monkeypatch.setattr(near, "_gather", gather)

    monkeypatch.setattr(near, "_gather", gathered)
    monkeypatch.setattr(tcp, "GATHER_MS", 20)
    far.sendall(first)
    into = bytearray(SIZE)
    near.recv_into(memoryview(into))
    assert into == DATA


def test_nothing_at_all_is_a_timeout(pair: tuple[TcpStream, socket.socket]) -> None:
    near, _ = pair
    near.set_timeout(0.05)
    with pytest.raises(WaitTimeout):
        near.recv_some(memoryview(bytearray(SIZE)))
    assert lowest(near) == 1


@pytest.mark.parametrize("sent", [0, 1000, SIZE - 1])
def test_an_end_in_the_middle_is_heard(pair: tuple[TcpStream, socket.socket], sent: int) -> None:
    near, far = pair
    threading.Thread(target=lambda: (far.sendall(DATA[:sent]), far.shutdown(socket.SHUT_WR))).start()
    with pytest.raises(ConnectionLost, match="closed the connection"):
        near.recv_into(memoryview(bytearray(SIZE)))


def test_who_waits_for_much_is_woken_when_its_own_side_closes(pair: tuple[TcpStream, socket.socket]) -> None:
    near, far = pair
    far.sendall(DATA[:1000])
    heard: list[str] = []

    def read() -> None:
        try:
            near.recv_into(memoryview(bytearray(SIZE)))
        except ConnectionLost as error:
            heard.append(str(error))

    reading = threading.Thread(target=read)
    reading.start()
    near.close()
    reading.join(10)
    assert not reading.is_alive()
    assert len(heard) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is gathered")
def test_small_bulk_is_not_gathered(pair: tuple[TcpStream, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = pair
    asked: list[int] = []
    monkeypatch.setattr(near, "_gather", asked.append)
    sending = threading.Thread(target=far.sendall, args=(DATA,))  # it may be more than sockets hold
    sending.start()
    near.recv_into(memoryview(bytearray(GATHER_BYTES - 1)))
    assert asked == []
    near.recv_into(memoryview(bytearray(GATHER_BYTES)))
    sending.join(60)
    assert asked[0] == GATHER_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is gathered")
@pytest.mark.parametrize(("others", "is_gathered"), [(1, False), (2, True)])
def test_who_has_a_core_to_itself_reads_at_once(
    pair: tuple[TcpStream, socket.socket], monkeypatch: pytest.MonkeyPatch, others: int, is_gathered: bool
) -> None:
    near, far = pair
    asked: list[int] = []
    monkeypatch.setattr(near, "_gather", asked.append)
    monkeypatch.setattr(tcp.os, "sched_getaffinity", lambda pid: {0, 1})
    sending = threading.Thread(target=far.sendall, args=(DATA,))
    sending.start()
    for _ in range(others):
        tcp._reading.__enter__()
    try:
        near.recv_into(memoryview(bytearray(SIZE)))
    finally:
        for _ in range(others):
            tcp._reading.__exit__()
        sending.join(60)
    assert bool(asked) == is_gathered
