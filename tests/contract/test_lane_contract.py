"""WHAT must every lane do? One suite over all of them."""

import os
import random
import socket

import pytest
from lane_pairs import Running, connected, free_address, lanes, listening, received

from paceline.errors import ConnectionLost, WaitTimeout
from paceline.params.arena import Arena
from paceline.transport import LANES
from paceline.transport.base import IOV_LIMIT, SocketListener, Stream, bound
from paceline.transport.channel import Channel
from paceline.wire.frames import Kind

KEYS = (b"u" * 32, b"d" * 32)

every_lane = pytest.mark.parametrize("lane", lanes())
sharing_lanes = pytest.mark.parametrize("lane", ["shm", "inproc"])


@every_lane
def test_bytes_come_in_order_and_whole(lane: str) -> None:
    dice = random.Random(1)
    buffers = [dice.randbytes(dice.randrange(0, 300)) for _ in range(2 * IOV_LIMIT + 1)]
    with connected(lane) as (client, server):
        sending = Running(lambda: client.send([memoryview(b) for b in buffers]))
        assert received(server, sum(map(len, buffers))) == b"".join(buffers)
        sending.result()


@every_lane
def test_large_transfers_cross(lane: str) -> None:
    up, down = random.Random(2).randbytes(6 << 20), random.Random(3).randbytes(6 << 20)
    with connected(lane) as (client, server):
        calls = [
            Running(lambda: client.send([up])),
            Running(lambda: server.send([memoryview(down)[:100], memoryview(down)[100:]])),
            Running(lambda: received(server, len(up))),
            Running(lambda: received(client, len(down))),
        ]
        results = [call.result() for call in calls]
    assert results[2] == up
    assert results[3] == down


@every_lane
def test_many_small_frames(lane: str) -> None:
    dice = random.Random(4)
    tails = [dice.randbytes(dice.choice([0, 1, 63, 64, 65, 1000])) for _ in range(1500)]
    with connected(lane) as (client, server):
        here, there = Channel(client, KEYS), Channel(server, KEYS[::-1])

        def send() -> None:
            for number, tail in enumerate(tails):
                here.send(Kind.PULL, push_id=number, tail=tail)

        sending = Running(send)
        frames = [there.recv() for _ in tails]
        sending.result()
    assert [(f.push_id, f.tail) for f in frames] == list(enumerate(tails))
    assert here.bytes_out == there.bytes_in == 64 * len(tails) + sum(map(len, tails))


@every_lane
@pytest.mark.parametrize("who", ["the other side", "another thread of this side"])
def test_closing_wakes_a_blocked_reader(lane: str, who: str) -> None:
    with connected(lane) as (client, server):
        reading = Running(lambda: received(server, 10))
        if who == "the other side":
            client.close()
        else:
            server.shutdown()
        with pytest.raises(ConnectionLost):
            reading.result()


@every_lane
def test_sending_to_a_closed_end_raises(lane: str) -> None:
    with connected(lane) as (client, server):
        server.close()
        with pytest.raises(ConnectionLost):
            for _ in range(100):
                client.send([bytes(1 << 20)])


@every_lane
def test_closing_wakes_a_blocked_accept(lane: str) -> None:
    with listening(lane) as (_, listener):
        accepting = Running(listener.accept)
        listener.close()
        with pytest.raises(ConnectionLost):
            accepting.result()


@every_lane
def test_a_read_that_times_out_loses_nothing(lane: str) -> None:
    with connected(lane) as (client, server):
        server.set_timeout(0.01)
        with pytest.raises(WaitTimeout):
            received(server, 4)
        client.send([b"ab"])
        reading = Running(lambda: received(server, 4))
        client.send([b"cd"])
        assert reading.result() == b"abcd"
        server.set_timeout(0)
        reading = Running(lambda: received(server, 2))
        client.send([b"ef"])
        assert reading.result() == b"ef"


@every_lane
def test_an_address_where_nobody_listens(lane: str) -> None:
    with pytest.raises(ConnectionLost):
        LANES[lane].connect(free_address(), 1.0)


@every_lane
def test_an_address_is_free_again_after_closing(lane: str) -> None:
    with listening(lane) as (address, listener):
        listener.close()
        again = LANES[lane].listen(address)
        client = LANES[lane].connect(address, 1.0)
        again.accept().close()
        client.close()
        again.close()


@sharing_lanes
def test_arenas_are_handed_over(lane: str) -> None:
    ours = [Arena.shared(100), Arena.shared(5000), Arena.shared(0)]
    with connected(lane) as (client, server):
        assert client.shares_memory and server.shares_memory
        client.send([b"before"])
        client.send_arenas(ours)
        client.send([b"after"])
        assert received(server, 6) == b"before"
        theirs = server.recv_arenas([100, 5000, 0], [False, True, True])
        assert received(server, 5) == b"after"
    assert [a.size_bytes for a in theirs] == [100, 5000, 0]
    ours[0].memory[:2] = b"up"
    theirs[1].memory[4998:] = b"ok"
    assert bytes(theirs[0].memory[:3]) == b"up\0"
    assert bytes(ours[1].memory[4997:]) == b"\0ok"


@pytest.mark.parametrize("lane", [lane for lane in lanes() if lane.values[0] in ("tcp", "grpc")])
def test_what_travels_shares_no_memory(lane: str) -> None:
    with connected(lane) as (client, server):
        assert not client.shares_memory
        with pytest.raises(ConnectionLost, match="cannot share memory"):
            client.send_arenas([Arena.private(1)])
        with pytest.raises(ConnectionLost, match="cannot share memory"):
            server.recv_arenas([1], [True])


def test_shared_parameters_are_read_only_and_sealed() -> None:
    arena = Arena.shared(4096)
    with connected("shm") as (client, server):
        client.send_arenas([arena])
        (theirs,) = server.recv_arenas([4096], [False])
    with pytest.raises(TypeError):
        theirs.memory[0] = 1
    assert theirs.fd is not None
    for size in (100, 9000):
        with pytest.raises(OSError):
            os.ftruncate(theirs.fd, size)
    theirs.close()


def test_a_connection_that_ends_before_its_arenas() -> None:
    with connected("shm") as (client, server):
        client.close()
        with pytest.raises(ConnectionLost, match="memory"):
            server.recv_arenas([10], [True])


def test_a_listener_outlives_a_client_that_is_gone_when_it_is_accepted() -> None:
    """A system may refuse to set options of its socket: that ends this connection and no other."""
    seen: list[socket.socket] = []

    def stream(sock: socket.socket) -> Stream:
        seen.append(sock)
        if len(seen) == 1:
            raise OSError("Invalid argument")
        return Stream(sock)

    sock = bound("localhost:0")
    listener = SocketListener(sock, stream)
    clients = [socket.create_connection(sock.getsockname()) for _ in range(2)]
    accepted = listener.accept()
    assert [each.fileno() >= 0 for each in seen] == [False, True]
    accepted.close()
    listener.close()
    for client in clients:
        client.close()
