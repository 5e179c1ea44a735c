"""What a forked child has of its parent: copies, and nothing that it could end. Real forks, of this very process."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from op_servers import Serving, double, serving

import paceline
from paceline import forks
from paceline.errors import UsageError
from paceline.ingraph.graph import Graph
from paceline.ingraph.session import Session
from paceline.ingraph.towers import towers
from paceline.params.arena import Arena, has_shared_memory
from paceline.telemetry import ledger as led
from paceline.telemetry import summaries
from paceline.telemetry.background import Background
from paceline.telemetry.summaries import EventWriter
from paceline.transport import port_reservation
from paceline.transport.tcp import TcpStream
from paceline.worker.context import Context

__all__ = ["serving"]
CHILD_S = 30


def be_a_child() -> None:
    """End this child if it waits for ever; what pytest does with its own alarm is its parent's."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(CHILD_S)


def in_child(body: Callable[[], bool]) -> int:
    """0: the child's body said yes. A child that waits for ever is ended by its alarm."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            be_a_child()
            code = 0 if body() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def held_by_another_thread(lock: "threading.Lock | threading.Condition") -> Iterator[None]:
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_end.wait(CHILD_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(CHILD_S)
    yield
    may_end.set()
    thread.join(CHILD_S)


def is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except UsageError as error:
        return "in a forked child" in str(error)
    return False


def test_an_owner_is_in_one_process_only() -> None:
    owner = forks.Owner()

    def of_the_child() -> bool:
        own = forks.Owner()
        return own.is_here and not owner.is_here and in_child(lambda: not own.is_here and not owner.is_here) == 0

    assert owner.is_here and in_child(of_the_child) == 0
    assert str(os.getpid()) in str(owner.refusal("ctx.pull()"))


def test_private_memory_is_copied_for_a_child() -> None:
    numbers = np.frombuffer(Arena.private(1 << 16).memory, "<u4")
    numbers[:] = 7
    (seen, see), (may_look, look) = os.pipe(), os.pipe()

    def writes_and_looks() -> bool:
        numbers[:100] = 9
        os.write(see, b".")
        os.read(may_look, 1)
        return bool((numbers[:100] == 9).all() and (numbers[100:] == 7).all())

    pid = os.fork()
    if pid == 0:
        be_a_child()
        os._exit(0 if writes_and_looks() else 1)
    os.read(seen, 1)
    assert (numbers == 7).all(), "the child has written into its parent's memory"
    numbers[:] = 8
    os.write(look, b".")
    assert os.waitpid(pid, 0)[1] == 0, "the parent has written into its child's memory"
    for each in (seen, see, may_look, look):
        os.close(each)


@pytest.mark.skipif(not has_shared_memory(), reason="no memory can be handed over here")
def test_a_child_reaches_no_shared_memory() -> None:
    arena = Arena.shared(1 << 16)
    assert arena.fd is not None
    again = Arena.opened(arena.fd, 1 << 16, is_writable=False)
    arena.memory[:] = b"\x07" * (1 << 16)

    def writes() -> bool:
        is_cleared = not any(arena.memory) and not any(again.memory)
        arena.memory[:] = b"\x09" * (1 << 16)
        return is_cleared and not any(again.memory)

    assert in_child(writes) == 0
    assert set(arena.memory) == {7} and set(again.memory) == {7}
    arena.close()


def test_the_ledger_is_not_the_childs(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.ledger"
    ledger = led.Ledger(path)
    ledger.write(led.Kind.START)

    def writes_and_closes() -> bool:
        for _ in range(led.GROW_RECORDS + 1):
            ledger.write(led.Kind.PULL)
        ledger.close()
        return True

    assert in_child(writes_and_closes) == 0
    ledger.write(led.Kind.PUSH)  # into a file that was cut it would be a SIGBUS
    ledger.close()
    assert [record.kind for record in led.read(path)] == [led.Kind.START, led.Kind.PUSH]


class Kept:
    """What was written, and how often it ended."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.ends = 0

    def write(self, item: int) -> None:
        self.seen.append(item)

    def flush(self) -> None:
        pass

    def finish(self, dropped: int) -> None:
        self.ends += 1


def test_records_of_a_child_go_nowhere_and_are_not_waited_for() -> None:
    kept = Kept()
    buffer: Background[int] = Background("test-fork", kept)

    def puts_and_closes() -> bool:
        buffer.put(1)
        return buffer.close(timeout_s=10) and not kept.seen and not kept.ends

    with held_by_another_thread(buffer._wake):
        assert in_child(puts_and_closes) == 0
    assert buffer.close(timeout_s=10)
    assert (kept.seen, kept.ends) == ([], 1)


def test_a_child_can_neither_use_nor_end_a_connection() -> None:
    ours, theirs = socket.create_server(("127.0.0.1", 0)), socket.socket()
    theirs.connect(ours.getsockname())
    accepted, stream = ours.accept()[0], TcpStream(theirs)

    def tries() -> bool:
        are_refused = [is_refused(lambda: stream.send([b"no"])), is_refused(lambda: stream.recv_some(memoryview(b"")))]
        stream.kernel_bytes()
        stream.shutdown()
        stream.close()
        return all(are_refused)

    assert in_child(tries) == 0
    stream.send([b"yes"])
    assert accepted.recv(10) == b"yes"
    for each in (accepted, ours, stream):
        each.close()


def test_a_child_that_lives_on_keeps_no_address() -> None:
    address = f"127.0.0.1:{port_reservation.free_port('127.0.0.1')}"
    port_reservation.reserve(address)
    (is_there, tell), (go, let_go) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        be_a_child()
        os.write(tell, b".")
        os.read(go, 1)
        os._exit(0)
    os.read(is_there, 1)
    port_reservation.release(address)
    port_reservation.reserve(address)  # fails while somebody listens there
    port_reservation.release(address)
    os.write(let_go, b".")
    os.waitpid(pid, 0)
    for each in (is_there, tell, go, let_go):
        os.close(each)


def test_a_child_does_not_write_what_its_parent_has_in_a_buffer(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    assert writer._background is not None
    file = writer._background._writer
    assert isinstance(file, summaries._EventFile)
    file.write((0.0, 1, {"loss": 1.0}))

    def ends() -> bool:
        file.finish(0)  # as at the end of the interpreter: what is in the buffer is written
        return True

    (path,) = (tmp_path / "tensorboard").iterdir()
    assert in_child(ends) == 0 and path.stat().st_size == 0
    file.flush()
    once = path.stat().st_size
    writer.close()
    assert once == path.stat().st_size > 0


def test_a_child_can_neither_use_nor_end_sessions_servers_and_ops(serving: Serving) -> None:
    serving.start(0, 1)
    graph = Graph()
    x = graph.placeholder("x")
    with Session(serving.target(0), graph=graph) as session, paceline.device("/job:worker/task:0"):
        assert session.run(x + 1, {x: 1}) == 2 and double(4) == 8
        remote = session._master._remote

        def tries() -> bool:
            server = serving.servers[0]
            are_refused = [is_refused(lambda: session.run(x + 1, {x: 1})), is_refused(lambda: double(4))]
            are_refused.append(is_refused(server.join))
            session.close()
            serving.client.close()
            server.stop()
            return all(are_refused)

        with held_by_another_thread(remote._lock):
            assert in_child(tries) == 0
        assert session.run(x + 1, {x: 1}) == 2 and double(4) == 8, "what the child closed was its own"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_towers_of_the_parent_are_refused_in_a_child(mode: str) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.ones(4, 3),)] * 2

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).mean()

    with towers(model, optimizer, ["/cpu:0", "/cpu:0"], mode=mode) as both:
        assert list(both.train(loss, batches))

        def tries() -> bool:
            with both:
                return is_refused(lambda: list(both.train(loss, batches)))

        assert in_child(tries) == 0
        assert list(both.train(loss, batches))


@pytest.mark.parametrize("lane", ["inproc", "shm", "tcp"])
def test_a_worker_that_is_a_thread_has_children_too(lane: str, tmp_path: Path) -> None:
    codes = []

    def train(ctx: Context) -> None:
        model = torch.nn.Linear(3, 1)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(6):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).mean().backward()
            optimizer.step()
            if step >= 3:
                pid = os.fork()
                if pid == 0:
                    be_a_child()
                    if not (is_refused(optimizer.step) and is_refused(ctx.pull) and is_refused(paceline.init)):
                        os._exit(9)
                    if step == 4:
                        raise KeyError("a child fails")
                    if step == 5:
                        sys.exit(7)
                    return
                codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    told = paceline.launch(train, ps=1, workers=1, lane=lane, run_dir=str(tmp_path))
    assert told["ok"] and told["global_step"] == 6 and codes == [0, 1, 7]
