"""WHO is let in? Both sides prove that they hold the secret before anything else is read."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from lane_pairs import Running, connected, lanes

from paceline.errors import AuthenticationError, ConnectionLost
from paceline.transport import security
from paceline.transport.base import Stream
from paceline.transport.channel import Channel, accept
from paceline.transport.security import MAGIC, NONCE_BYTES, Role, as_client, as_server
from paceline.wire.frames import Kind

SECRET = b"s" * 32
TLS_HELLO = bytes.fromhex("16030100f8010000f40303") + bytes(range(240))
STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost:2222\r\nUser-Agent: curl/8\r\n\r\n",
    "tls": TLS_HELLO,
    "random": bytes((i * 151 + 7) % 256 for i in range(500)),
    "almost": b"paceline/2\n" + bytes(NONCE_BYTES),
}


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Stream]]:
    """A stranger's raw socket and the server's end."""
    raw, ours = socket.socketpair()
    raw.settimeout(10)
    stream = Stream(ours)
    yield raw, stream
    raw.close()
    stream.close()


@pytest.mark.parametrize("lane", lanes())
def test_two_that_share_a_secret_talk(lane: str) -> None:
    with connected(lane) as (client, server):
        serving = Running(lambda: accept(server, SECRET))
        here = Channel(client, as_client(client, SECRET, "there"))
        there = serving.result()
        here.send(Kind.BEAT, push_id=4)
        there.send(Kind.ANSWER, push_id=5)
        assert (there.recv().push_id, here.recv().push_id) == (4, 5)


@pytest.mark.parametrize("lane", lanes())
def test_another_secret_is_refused_by_both(lane: str) -> None:
    with connected(lane) as (client, server):
        serving = Running(lambda: accept(server, SECRET))
        with pytest.raises(AuthenticationError, match="another secret") as refused:
            as_client(client, b"t" * 32, "host:2222")
        client.close()
        with pytest.raises(AuthenticationError):
            serving.result()
    assert "host:2222" in str(refused.value)
    assert SECRET.decode() not in str(refused.value) and "tttt" not in str(refused.value)


@pytest.mark.parametrize("hello", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_refused_and_hears_nothing(ends: tuple[socket.socket, Stream], hello: bytes) -> None:
    raw, server = ends
    raw.sendall(hello)
    with pytest.raises(AuthenticationError, match="stranger"):
        as_server(server, SECRET)
    server.close()
    with suppress(ConnectionResetError):  # what it had sent was never read
        assert raw.recv(1) == b""


@pytest.mark.parametrize(
    "sent",
    [b"", MAGIC[:1], MAGIC + bytes(NONCE_BYTES), MAGIC + bytes(NONCE_BYTES) + b"p"],
    ids=["nothing", "a byte", "hello", "part of a proof"],
)
def test_one_that_falls_silent_is_given_up(
    ends: tuple[socket.socket, Stream], sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "HANDSHAKE_S", 0.05)
    raw, server = ends
    raw.sendall(sent)
    with pytest.raises(AuthenticationError, match="gave up"):
        Running(lambda: as_server(server, SECRET)).result()


def test_a_wrong_proof_is_refused(ends: tuple[socket.socket, Stream]) -> None:
    raw, server = ends
    raw.sendall(MAGIC + bytes(NONCE_BYTES) + os.urandom(32))
    with pytest.raises(AuthenticationError, match="another secret"):
        as_server(server, SECRET)


def test_a_proof_of_the_other_direction_is_refused(ends: tuple[socket.socket, Stream]) -> None:
    """Whoever sends the server's own proof back has proved nothing."""
    raw, server = ends
    serving = Running(lambda: as_server(server, SECRET))
    raw.sendall(MAGIC + bytes(NONCE_BYTES))
    answer = b""
    while len(answer) < NONCE_BYTES + 32:
        answer += raw.recv(200)
    raw.sendall(answer[NONCE_BYTES:])
    with pytest.raises(AuthenticationError, match="another secret"):
        serving.result()


def test_a_proof_heard_before_does_not_open_the_door_again() -> None:
    heard = []
    for attempt in range(2):
        raw, ours = socket.socketpair()
        server = Stream(ours)
        serving = Running(lambda server=server: as_server(server, SECRET))
        if attempt == 0:
            recording = Recording(raw)
            as_client(recording, SECRET, "there")
            serving.result()
            heard = recording.sent
        else:
            raw.sendall(b"".join(heard))
            with pytest.raises(AuthenticationError, match="another secret"):
                serving.result()
        raw.close()
        server.close()


class Recording(Stream):
    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.sent: list[bytes] = []

    def send(self, buffers: object, size_bytes: int = -1) -> None:
        self.sent += [bytes(b) for b in buffers]  # type: ignore[attr-defined]
        super().send(buffers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100), os.urandom(100)], ids=["HTTP", "noise"]
)
def test_a_client_does_not_believe_a_stranger(ends: tuple[socket.socket, Stream], answer: bytes) -> None:
    raw, client = ends
    raw.sendall(answer)
    with pytest.raises(AuthenticationError):
        as_client(client, SECRET, "there")


def test_a_client_gives_up_a_server_that_says_nothing(
    ends: tuple[socket.socket, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "HANDSHAKE_S", 0.05)
    with pytest.raises(ConnectionLost, match="no paceline task"):
        Running(lambda: as_client(ends[1], SECRET, "there")).result()


def test_I8_a_stranger_is_read_no_further_than_its_first_words(ends: tuple[socket.socket, Stream]) -> None:
    raw, server = ends
    raw.sendall(b"x" * 5000)
    with pytest.raises(AuthenticationError):
        as_server(server, SECRET)
    rest = bytearray(10_000)
    server.set_timeout(0.01)
    assert server._sock.recv_into(rest) == 5000 - len(MAGIC) - NONCE_BYTES


def test_every_connection_has_keys_of_its_own() -> None:
    keys = []
    for _ in range(2):
        with connected("inproc") as (client, server):
            serving = Running(lambda server=server: as_server(server, SECRET))
            up, down = as_client(client, SECRET, "there")
            assert serving.result() == (Role.WORKER, (down, up))
            keys += [up, down]
    assert len(set(keys)) == 4
    assert SECRET not in keys


@pytest.mark.parametrize("role", Role)
def test_the_server_knows_as_what_a_client_comes(role: Role) -> None:
    with connected("inproc") as (client, server):
        serving = Running(lambda: accept(server, SECRET))
        here = Channel(client, as_client(client, SECRET, "there", role), role)
        there = serving.result()
        assert there.role is role
        here.send(Kind.BEAT, push_id=4)
        assert there.recv().push_id == 4


def test_I8_a_byte_now_and_then_does_not_hold_a_place_longer(
    ends: tuple[socket.socket, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is for the whole handshake, not for each read of it."""
    monkeypatch.setattr(security, "HANDSHAKE_S", 0.3)
    raw, server = ends
    serving = Running(lambda: as_server(server, SECRET))
    done = threading.Event()
    left = list(MAGIC + bytes(NONCE_BYTES) + bytes(31))

    def drip() -> None:
        while left and not done.wait(0.02):
            raw.sendall(bytes([left.pop(0)]))

    dripping = Running(drip)
    with pytest.raises(AuthenticationError, match="gave up"):
        serving.result()
    done.set()
    dripping.result()
    assert 0 < len(left) < len(MAGIC) + NONCE_BYTES + 31, "it gave up in the middle, though bytes still came"
