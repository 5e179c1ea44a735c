"""HOW much may one connection cost? I8: limits before the secret is proved, after it, and on those who do not read."""

import os
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest
from lane_pairs import Running, connected, free_address

from paceline.errors import AuthenticationError, ConnectionLost, ProtocolError, Refused
from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec
from paceline.params.layout import Layout, TensorSpec
from paceline.server.control import roles
from paceline.server.control.config import PsConfig
from paceline.server.service import Service
from paceline.transport import LANES, base, security
from paceline.transport.acceptor import MAX_HALF_OPEN, OWN_HALF_OPEN
from paceline.transport.base import Stream, split
from paceline.transport.channel import SMALL_TAIL_BYTES, Channel, accept, connect
from paceline.transport.security import MAGIC, NONCE_BYTES, Role, as_client
from paceline.wire import messages as m
from paceline.wire.frames import FRAME_BYTES, HEADER_BYTES, MAX_TAIL_BYTES, Kind

SECRET = b"s" * 32
MIB = 1 << 20
LAYOUT = Layout((TensorSpec("w", (1000, 1000), (1000, 1), "float32", 0),))
SGD = m.OptimizerSpec("SGD", [{"lr": 0.1}])


@contextmanager
def serving(*lanes: str) -> Iterator[tuple[str, Service]]:
    """A ps of its own, without a run around it."""
    made = Service(PsConfig(0, 1, 2, "r", make_mode(ModeSpec(), 2), "bytes", 60.0), SECRET, lambda task, report: None)
    address = free_address()
    made.listen(address, lanes or ("tcp",))
    running = Running(lambda: made.run(lambda core: None))
    try:
        yield address, made
    finally:
        made.stop()
        running.result()


def join(worker: int = 0, layout: Layout = LAYOUT, optimizer: m.OptimizerSpec = SGD) -> m.Join:
    return m.Join("worker", worker, 1, "r", worker == 0, "async", "bytes", 1, layout, optimizer)


def is_closed(raw: socket.socket) -> bool:
    """Whether the other side has ended the connection, waited for until the socket's own deadline."""
    with suppress(ConnectionResetError):
        return raw.recv(1) == b""
    return True


# --- before the secret is proved --------------------------------------------------------------------------------------


def test_I8_at_most_64_are_half_open_and_the_rest_is_turned_away_at_once() -> None:
    with serving() as (address, _), ExitStack() as stack:
        raws = [
            stack.enter_context(socket.create_connection(split(address), timeout=10)) for _ in range(MAX_HALF_OPEN + 20)
        ]
        assert MAX_HALF_OPEN == 64
        room = MAX_HALF_OPEN - OWN_HALF_OPEN
        assert all(is_closed(raw) for raw in raws[room:])
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("connection") <= room
        raws[0].close()  # a place gets free when one of them leaves, and a task of ours tries again
        deadline = time.monotonic() + 5
        while True:
            try:
                connect(address, "tcp", SECRET).close()
                return
            except ConnectionLost:
                assert time.monotonic() < deadline


@pytest.mark.skipif("shm" not in LANES, reason="needs shared memory")
def test_strangers_on_tcp_take_no_place_of_tasks_on_this_host() -> None:
    with serving("shm", "tcp") as (address, _), ExitStack() as stack:
        for _ in range(MAX_HALF_OPEN + 20):
            stack.enter_context(socket.create_connection(split(address), timeout=10))
        connect(address, "auto", SECRET).close()


def test_I8_silent_connections_are_ended_after_the_handshakes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "HANDSHAKE_S", 0.2)
    with serving() as (address, _), socket.create_connection(split(address), timeout=10) as raw:
        assert is_closed(raw)


def test_without_room_for_a_thread_one_is_turned_away_and_the_door_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    start, failed = threading.Thread.start, []

    def start_or_not(thread: threading.Thread) -> None:
        if thread.name == "connection" and not failed:
            failed.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with serving() as (address, _):
        monkeypatch.setattr(threading.Thread, "start", start_or_not)
        with socket.create_connection(split(address), timeout=10) as raw:
            assert is_closed(raw)
        connect(address, "tcp", SECRET).close()
        assert failed == ["connection"]


def test_a_flood_costs_no_memory() -> None:
    """64 MB of noise behind the first bytes: none of it is kept."""
    with serving() as (address, _):
        tracemalloc.start()
        for _ in range(4):
            with socket.create_connection(split(address), timeout=10) as raw, suppress(OSError):
                for _ in range(16):
                    raw.sendall(os.urandom(MIB))
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < 4 * MIB  # our own random bytes are in there too


# --- after it ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[Stream, Channel]]:
    """A client's stream that has proved the secret and may now say anything, and the server's channel."""
    with connected("tcp") as (client, server):
        accepting = Running(lambda: accept(server, SECRET))
        as_client(client, SECRET, "there", Role.READER)
        yield client, accepting.result()


def header(tail_bytes: int = 0, bulk_bytes: int = 0) -> bytes:
    packed = struct.pack("<BBHH2xIIQQQQ", Kind.COLD, 0, 0, 0, 0, tail_bytes, 0, 0, bulk_bytes, 0)
    assert len(packed) == HEADER_BYTES
    return packed + bytes(FRAME_BYTES - HEADER_BYTES)


@pytest.mark.parametrize(
    "frame",
    [header(bulk_bytes=1 << 63), header(tail_bytes=(1 << 32) - 1), header(tail_bytes=SMALL_TAIL_BYTES + 1)],
    ids=["2^63 bytes of bulk", "4 GiB of tail", "more tail than a reader has to say"],
)
def test_a_frame_that_claims_much_is_refused_before_anything_is_allocated(
    pair: tuple[Stream, Channel], frame: bytes
) -> None:
    client, server = pair
    client.send([frame])
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        server.recv()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000


def test_a_tail_takes_memory_as_it_comes_not_as_it_is_claimed(pair: tuple[Stream, Channel]) -> None:
    client, server = pair
    server.tail_limit_bytes = MAX_TAIL_BYTES
    tracemalloc.start()
    client.send([header(tail_bytes=MAX_TAIL_BYTES), bytes(1000)])
    client.close()
    with pytest.raises(ConnectionLost):
        server.recv()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 500_000


def test_a_model_that_no_memory_holds_is_refused_and_the_ps_goes_on() -> None:
    far = 1 << 40
    wrong = [
        (TensorSpec("w", (far, far), (far, 1), "float32", 0),),
        (TensorSpec("w", (far,), (1,), "float32", 0),),
        (TensorSpec("w", (4,), (9,), "float32", 0),),
        (TensorSpec("w", (-4,), (1,), "float32", 0),),
        (TensorSpec("w", (4,), (1,), "float31", 0),),
        (TensorSpec("w", (4,), (1, 1), "float32", 0),),
        (TensorSpec("w", (4,), (1,), "float32", 0), TensorSpec("w", (4,), (1,), "float32", 0)),
    ]
    with serving() as (address, ps):
        for tensors in wrong:
            with closing(connect(address, "tcp", SECRET)) as channel:
                reply, _ = channel.ask(join(layout=Layout(tensors)))
                assert isinstance(reply, m.Failed) and "no ps can hold" in reply.reason, tensors
        with closing(connect(address, "tcp", SECRET)) as channel:
            reply, _ = channel.ask(join(optimizer=m.OptimizerSpec("Nope", [{"lr": 0.1}])))
            assert isinstance(reply, m.Failed)
        with closing(connect(address, "tcp", SECRET)) as channel:
            assert isinstance(channel.ask(join())[0], m.Joined)
        assert ps._failure is None


# --- those who do not read --------------------------------------------------------------------------------------------


def test_one_that_takes_nothing_is_dropped_and_the_others_are_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "SEND_S", 4.0)
    with serving() as (address, _), closing(connect(address, "tcp", SECRET)) as worker:
        assert isinstance(worker.ask(join())[0], m.Joined)
        worker.ask(m.Init(), bulk=[bytes(4 * MIB)[:4_000_000]])
        deaf = connect(address, "tcp", SECRET, role=Role.READER)
        deaf.stream._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        for _ in range(8):  # 32 MB, more than any socket holds
            deaf.say(m.Fetch("parameters"))
        began = time.monotonic()
        for _ in range(5):
            assert isinstance(worker.ask(m.AskStatus())[0], m.Status)
        assert time.monotonic() - began < 3, "not until the deaf one is given up"
        deadline = time.monotonic() + 40
        while [t.name for t in threading.enumerate()].count("connection") > 1:
            assert time.monotonic() < deadline, "the deaf one is still served"
            worker.ask(m.AskStatus())
        deaf.close()


def test_one_that_takes_too_little_is_dropped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "SLOWEST_BYTES_S", 1 << 40)
    with connected("tcp") as (client, server):
        server.set_send_timeout(0.2)
        done = threading.Event()

        def sip() -> None:
            view = memoryview(bytearray(1000))
            while not done.is_set():
                with suppress(ConnectionLost):
                    client.recv_some(view)
                done.wait(0.01)

        sipping = Running(sip)
        with pytest.raises(ConnectionLost, match="bytes a second"):
            server.send([bytes(64 * MIB)])
        done.set()
        server.close()
        sipping.result()


def test_one_that_falls_silent_in_the_middle_of_a_frame_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "REST_S", 0.2)
    with connected("tcp") as (client, server):
        client.set_timeout(0.05)
        server.send([bytes(10)])
        with pytest.raises(ConnectionLost, match="middle of a message"):
            Running(lambda: client.recv_into(memoryview(bytearray(64)))).result()


# --- roles ------------------------------------------------------------------------------------------------------------

READS = {m.AskStatus, m.Describe, m.Fetch}
MAY = {
    Role.READER: READS,
    Role.OPERATOR: {*READS, m.SwitchMode},
    Role.LAUNCHER: {m.AskStatus, m.Describe, m.Lost, m.SaveSoon},
    Role.CLIENT: set(),
}


@pytest.mark.parametrize("role", Role)
def test_every_request_is_allowed_or_refused_by_role(role: Role) -> None:
    requests = m.Request.__args__  # type: ignore[attr-defined]
    allowed = set()
    for kind in requests:
        with suppress(Refused):
            roles.check(role, kind)
            allowed.add(kind)
    assert allowed == MAY.get(role, set(requests) - {m.Lost, m.SaveSoon})


def test_a_reader_can_neither_join_nor_write_nor_end_anything() -> None:
    with serving() as (address, ps):
        for message in (join(), m.Init(), m.Close(), m.Lost(0), m.Assign("parameters"), m.SwitchMode(ModeSpec())):
            with closing(connect(address, "tcp", SECRET, role=Role.READER)) as channel:
                reply, _ = channel.ask(message)
                assert isinstance(reply, m.Failed) and "a reader may not ask for" in reply.reason
        for kind in (Kind.PUSH, Kind.STAGE, Kind.PULL, Kind.BUCKET):
            with closing(connect(address, "tcp", SECRET, role=Role.READER)) as channel:
                channel.send(kind, worker=0, incarnation=1)
                with pytest.raises(ConnectionLost):
                    channel.recv()
        assert not ps.core.control.at and ps.core.shard is None and ps._failure is None


def test_a_worker_that_is_not_the_chief_can_neither_initialise_nor_assign() -> None:
    with serving() as (address, ps), closing(connect(address, "tcp", SECRET)) as other:
        assert isinstance(other.ask(join(worker=1))[0], m.Joined)
        values = bytes(4_000_000)
        for message in (m.Init(), m.Assign("parameters")):
            reply, _ = other.ask(message, bulk=[values])
            assert isinstance(reply, m.Failed) and "chief" in reply.reason
        assert not ps.core.control.is_initialised


def test_only_the_first_words_count_as_a_proof_of_the_role() -> None:
    """Whoever proves to be a worker of another run, or repeats what it heard, is nobody."""
    with serving() as (address, _), socket.create_connection(split(address), timeout=10) as raw:
        raw.sendall(MAGIC + bytes(NONCE_BYTES) + b"worker" + bytes(26))
        answer = raw.recv(64, socket.MSG_WAITALL)
        assert len(answer) == 64 and is_closed(raw)
    with pytest.raises(AuthenticationError), serving() as (address, _):
        connect(address, "tcp", b"t" * 32)


@pytest.mark.parametrize(
    "tail",
    [
        m.PushTail([]),
        m.PushTail([{"lr": 0.1}, {"lr": 0.1}]),
        m.PushTail([{"lr": None}]),
        m.PushTail([{"lr": [0.1]}]),
        m.PushTail([{"lr": 1e300}]),
        m.Done(),
    ],
    ids=["no groups", "more groups", "no number", "a list", "too large", "another message"],
)
def test_a_push_that_no_optimizer_can_use_ends_its_connection_and_not_the_ps(tail: m.Message) -> None:
    with serving() as (address, ps):
        with closing(connect(address, "tcp", SECRET)) as channel:
            assert isinstance(channel.ask(join())[0], m.Joined)
            channel.ask(m.Init(), bulk=[bytes(4_000_000)])
            with pytest.raises(ConnectionLost):
                channel.send(Kind.PUSH, incarnation=1, push_id=1, tail=m.encode(tail), bulk=[bytes(4_000_000)])
                channel.recv()
        assert ps._failure is None and ps.core.control.state.version == 0
