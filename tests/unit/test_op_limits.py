"""HOW much can a client cost a task that serves ops? Only what it sends, and only as long as it is there."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from op_servers import Serving, double, serving

import paceline
from paceline.cluster.discovery import discover_as
from paceline.cluster.spec import Task
from paceline.errors import ConnectionLost, PacelineError, Refused, StepAborted, UsageError, WaitTimeout
from paceline.ingraph import master, parts, together, values
from paceline.ingraph.graph import Graph
from paceline.ingraph.server import Server
from paceline.ingraph.session import Session
from paceline.launchers.ports import Reserved
from paceline.launchers.serving import make_service
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
    channel.stream.send([channel._codec.pack(Kind.COLD, 0, 0, 0, 0, tail, 0, 0, bulk_bytes), tail])


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


# --- who may end a task -----------------------------------------------------------------------------------------------


def test_a_client_cannot_stop_a_task(serving: Serving) -> None:
    serving.start(0, 1)
    with pytest.raises(Refused, match="only the chief, worker:0, may stop /job:worker/replica:0/task:1"):
        serving.client.remote(Task("worker", 1)).call("stop")
    assert not serving.servers[1]._over.is_set()


def test_a_task_that_is_not_the_chief_stops_nobody(serving: Serving) -> None:
    serving.start(0, 1)
    serving.servers[1].stop_others()
    assert not serving.servers[0]._over.is_set()


def test_a_worker_may_call_nothing_but_the_end(serving: Serving) -> None:
    serving.start(0)
    for op in ("alive", "open_session", "op_servers:double"):
        channel = connected(serving, Role.WORKER)
        channel.send(Kind.COLD, tail=ops.encode(ops.Call(op, 0)))
        with pytest.raises(ConnectionLost):
            channel.recv()
        channel.close()


# --- clients that are gone --------------------------------------------------------------------------------------------

began, goes_on = threading.Event(), threading.Event()


@paceline.op
def hangs() -> None:
    began.set()
    goes_on.wait(20)


def test_a_client_that_dies_in_a_step_leaves_neither_step_nor_session(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "LOOK_S", 0.05)
    monkeypatch.setattr(together, "LOOK_S", 0.05)
    monkeypatch.setattr(master, "KEEP_S", 0.05)
    serving.start(0, 1)
    began.clear()
    goes_on.clear()
    graph = Graph()
    with graph:
        with paceline.device(TASK_1):
            lost = hangs()
        with paceline.device(TASK_0):
            waits = double(lost)
    session = Session(serving.target(0), graph)
    thread = threading.Thread(target=run_quietly, args=(session, waits))
    thread.start()
    assert began.wait(10)
    at_master = serving.servers[0]
    until(lambda: bool(at_master._parts._steps))
    assert at_master._master._sessions
    for stream in list(at_master._acceptor._streams):
        stream.shutdown()  # all that a master sees of a client that was killed
    until(lambda: not at_master._parts._steps)
    until(lambda: not at_master._master._sessions)
    goes_on.set()
    thread.join(10)


def run_quietly(session: Session, fetch: object) -> None:
    with contextlib.suppress(PacelineError):
        session.run(fetch)


def test_a_session_outlives_a_connection_that_its_client_has_replaced(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master, "KEEP_S", 3600.0)
    serving.start(0, 1)
    graph = Graph()
    one = graph.constant(1)
    with Session(serving.target(0), graph) as session:
        assert session.run(one) == 1
        for stream in list(serving.servers[0]._acceptor._streams):
            stream.shutdown()
        until(lambda: not serving.servers[0]._acceptor._streams)
        assert session.run(one) == 1


# --- words about steps that are over ----------------------------------------------------------------------------------


def parts_of(serving: Serving) -> parts.Parts:
    serving.start(0)
    return serving.servers[0]._parts


HERE = "/job:worker/replica:0/task:0/device:CPU:0"


def test_late_words_about_a_step_that_is_over_are_not_kept(serving: Serving) -> None:
    here = parts_of(serving)
    here.run("step", [parts.Work(HERE, [], {}, {}, {}, [])])
    here.deliver("step", HERE, "x", torch.zeros(10))
    here.abort("step", "too late")
    assert not here._steps


def test_early_values_are_bounded_in_bytes_and_who_lost_one_hears_of_it(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MAX_EARLY_BYTES", 1000)
    here = parts_of(serving)
    here.deliver("first", HERE, "x", torch.zeros(100))
    here.deliver("second", HERE, "x", {"a": [np.zeros(100, np.float32), b"x" * 400]})
    here.deliver("third", HERE, "x", torch.zeros(1000))
    assert list(here._steps) == ["third"], "the newest is kept, however large"
    with pytest.raises(StepAborted, match="what had come for it was dropped"):
        here.run("first", [parts.Work(HERE, [], {"a": ["x"]}, {}, {}, [])])
    here.deliver("first", HERE, "y", 1)
    assert list(here._steps) == ["third"]


# --- deadlines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("far", [False, True])
def test_a_step_longer_than_the_timeout_that_was_asked_for_is_given_up(serving: Serving, far: bool) -> None:
    began.clear()
    goes_on.clear()
    graph = Graph()
    if far:
        serving.start(0, 1)
    with graph, paceline.device(TASK_1 if far else "/cpu:0"):
        stuck = hangs()
        fine = double(2)
    config = paceline.ConfigProto(operation_timeout_in_ms=200)
    with Session(serving.target(0) if far else "", graph, config) as session:
        who = "/job:worker/replica:0/task:1" if far else "/job:localhost/replica:0/task:0"
        told = rf"gave up after 0\.2 s \(operation_timeout_in_ms\): {who} has not ended its part"
        since_s = time.monotonic()
        with pytest.raises(WaitTimeout, match=told):
            session.run(stuck)
        assert time.monotonic() - since_s < 3
        goes_on.set()
        assert session.run(fine) == 4, "the session goes on"


# --- tasks that serve no ops ------------------------------------------------------------------------------------------


def test_a_ps_in_the_cluster_is_no_obstacle_and_runs_nothing(serving: Serving) -> None:
    with Reserved() as ports:
        addresses = ports.addresses(2)
        ports.before_start()
    cluster = paceline.ClusterSpec({"ps": addresses[:1], "worker": addresses[1:]})
    service = make_service(discover_as(cluster, "ps", 0), lambda *_: None)
    service.listen(addresses[0], ["tcp"])
    graph = Graph()
    with graph:
        fine = double(2)
        with paceline.device("/job:ps/task:0"):
            wrong = double(3)
    told = "ps:0 holds parameters and runs no ops; name one of: worker:0"
    try:
        with Server(cluster, "worker", 0) as server, Session(server.target, graph) as session:
            assert session.run(fine) == 4
            with pytest.raises(UsageError, match=f"Node 'double_1' is placed on '/job:ps/task:0': {told}"):
                session.run(wrong)
        with paceline.connect(cluster), pytest.raises(UsageError, match=told), paceline.device("/job:ps/task:0"):
            double(2)
    finally:
        service.stop()
        service._acceptor.shut()
        service._acceptor.wait(2.0)
