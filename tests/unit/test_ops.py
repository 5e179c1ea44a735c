"""HOW are ops called on other tasks? Two servers in this process, real connections, everything that may go wrong."""

import json
import socket
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from op_servers import Serving, asks, double, fails, meet, returns_a_set, serving, where

import paceline
from paceline.cluster.secret import new_keys
from paceline.cluster.spec import Task
from paceline.errors import AuthenticationError, ConnectionLost, RemoteOpError, UsageError, WaitTimeout
from paceline.ingraph import neighbours
from paceline.ingraph.remote import Remote
from paceline.ingraph.server import Server
from paceline.transport import port_reservation
from paceline.transport.base import split
from paceline.transport.channel import connect
from paceline.transport.security import Role
from paceline.wire import ops
from paceline.wire.frames import Kind

__all__ = ["serving"]
TASK_0, TASK_1 = "/job:worker/task:0", "/job:worker/task:1"


def secret_of(serving: Serving) -> bytes:
    return serving.client.assignment.secret


# --- calling --------------------------------------------------------------------------------------------------------


def test_outside_a_scope_an_op_is_the_plain_function() -> None:
    assert double(2) == 4 and double.__name__ == "double"


def test_in_a_scope_it_runs_on_that_task(serving: Serving) -> None:
    serving.start(0, 1)
    with paceline.device(TASK_1):
        assert where() == "/job:worker/replica:0/task:1"
    with paceline.device("/job:worker"):
        assert where() == "/job:worker/replica:0/task:0"


def test_values_go_there_and_come_back(serving: Serving) -> None:
    serving.start(1)
    tensor = torch.randn(100, 100).to(torch.bfloat16)
    with paceline.device(TASK_1):
        assert torch.equal(double(tensor), tensor + tensor)
        assert np.array_equal(double(np.arange(5)), np.arange(5) * 2)
        assert double([1, {"a": ("b",)}]) == [1, {"a": ("b",)}, 1, {"a": ("b",)}]
        assert double(b"x") == b"xx"


def test_large_values_too(serving: Serving) -> None:
    serving.start(0)
    tensor = torch.arange(5_000_000, dtype=torch.float32)
    with paceline.device(TASK_0):
        assert torch.equal(double(tensor), tensor * 2)


def test_the_task_of_the_server_itself_needs_no_connection(serving: Serving) -> None:
    serving.start(1)
    thing = object()
    with neighbours.serving(serving.servers[1].neighbours), paceline.device(TASK_1):
        assert same(thing) is thing, "not even something that could not travel"


@paceline.op
def same(x: object) -> object:
    return x


def test_an_op_may_call_an_op_elsewhere(serving: Serving) -> None:
    serving.start(0, 1)
    with paceline.device(TASK_0):
        assert asks(TASK_1) == "/job:worker/replica:0/task:1"


def test_calls_of_two_threads_run_at_the_same_time(serving: Serving) -> None:
    serving.start(1)
    came: list[object] = []

    def call(x: int) -> None:
        with neighbours.serving(serving.client), paceline.device(TASK_1):
            came.append(meet(x))

    thread = threading.Thread(target=call, args=(1,))
    thread.start()
    call(2)
    thread.join(60)
    assert sorted(came) == [1, 2]  # type: ignore[type-var]


def test_connections_are_used_again(serving: Serving) -> None:
    serving.start(0)
    remote = neighbours.current().remote(Task("worker", 0))
    for _ in range(5):
        remote.call("alive")
    assert len(remote._idle) == 1


def test_a_task_that_was_started_again_is_found_again(serving: Serving) -> None:
    serving.start(0)
    with paceline.device(TASK_0):
        where()
    serving.servers[0].stop()
    serving.start(0)
    with paceline.device(TASK_0):
        assert where().endswith("task:0")


def test_any_start_order(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("Still waiting"):
            serving.start(1)

    monkeypatch.setattr(neighbours, "say", say)
    with paceline.device(TASK_1):
        assert where().endswith("task:1")
    assert said[0] == "Still waiting for response from worker: /job:worker/replica:0/task:1 (0 s)"


def test_placements_are_logged_once_when_asked_for(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    serving.start(0, 1)
    monkeypatch.setattr(serving.client, "is_logged", True)
    for device in (TASK_0, TASK_1, TASK_1):
        with paceline.device(device):
            where()
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("where")]
    assert said == [f"where: (where): /job:worker/replica:0/task:{index}/device:CPU:0" for index in (0, 1)]


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_what_an_op_raises_comes_back_with_its_task_and_traceback(serving: Serving) -> None:
    serving.start(1)
    with pytest.raises(RemoteOpError) as caught, paceline.device(TASK_1):
        fails("no such digit")
    told = str(caught.value)
    assert "op_servers:fails failed on /job:worker/replica:0/task:1: ValueError: no such digit" in told
    assert (
        "Traceback (most recent call last)" in told and "op_servers.py" in told and "raise ValueError(message)" in told
    )
    assert caught.value.task == "/job:worker/replica:0/task:1" and "ingraph" not in caught.value.remote_traceback
    with paceline.device(TASK_1):
        assert where().endswith("task:1"), "the task goes on"


def test_an_error_two_tasks_away_names_the_task_that_it_happened_on(serving: Serving) -> None:
    serving.start(0, 1)
    with pytest.raises(RemoteOpError, match="failed on /job:worker/replica:0/task:1"), paceline.device(TASK_0):
        asks_for_failure(TASK_1)


@paceline.op
def asks_for_failure(device: str) -> None:
    with paceline.device(device):
        fails("far away")


def test_an_op_that_is_not_registered_there(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    serving.start(0)
    remote = neighbours.current().remote(Task("worker", 0))
    with pytest.raises(UsageError) as caught:
        remote.call("work:square", (1,))
    told = str(caught.value)
    assert told.startswith("Op 'work:square' is not registered on /job:worker/replica:0/task:0: that task must import")
    assert "\n" not in told


@pytest.mark.parametrize("device", [TASK_0, "/cpu:0"])
@pytest.mark.parametrize("is_endless", [False, True], ids=["deep", "in itself"])
def test_what_is_nested_too_deep_is_one_sentence(serving: Serving, device: str, is_endless: bool) -> None:
    serving.start(0)
    nested: list[object] = []
    if is_endless:
        nested.append(nested)
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(UsageError, match="nested more than 100 deep, or in itself"), paceline.device(device):
        length(nested)
    assert length(nested) == 1, "here it is nobody's business"


@paceline.op
def length(x: list[object]) -> int:
    return len(x)


@pytest.mark.parametrize("name", ["os:system", "builtins:eval", "posix:abort", "subprocess:run"])
def test_nothing_is_imported_because_a_call_names_it(serving: Serving, name: str) -> None:
    serving.start(0)
    remote = neighbours.current().remote(Task("worker", 0))
    with pytest.raises(UsageError, match="is not registered"):
        remote.call(name, ("true",))


def test_what_cannot_travel_is_refused_on_either_way(serving: Serving) -> None:
    serving.start(0)
    with pytest.raises(UsageError, match="a set cannot travel there"), paceline.device(TASK_0):
        double({1})
    told = r"What op_servers:returns_a_set returned on .*task:0: .*a set cannot travel"
    with pytest.raises(UsageError, match=told), paceline.device(TASK_0):
        returns_a_set()


@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("/job:workr/task:1", "no job 'workr'; did you mean 'worker'"),
        ("/job:worker/task:2", "no task worker:2; job 'worker' has 2 tasks, indices 0 to 1"),
        ("/task:1", "names no job; name one of this cluster's: worker"),
    ],
)
def test_an_unknown_job_or_task_is_one_sentence(serving: Serving, device: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence), paceline.device(device):
        where()


def test_without_a_cluster_a_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_latest", [])
    monkeypatch.setattr("sys.argv", ["script.py"])
    with pytest.raises(UsageError, match="this process knows none"), paceline.device(TASK_1):
        where()


def test_an_unreachable_task_is_named_when_the_patience_ends(serving: Serving) -> None:
    remote = Remote("/job:worker/replica:0/task:1", serving.cluster.task_address("worker", 1), b"1" * 32, wait_s=0.3)
    with pytest.raises(WaitTimeout, match=r"gave up after [\d.]+ s: /job:worker/replica:0/task:1 at .* did not answer"):
        remote.call("alive")


def test_a_task_that_ends_while_it_works_is_named(serving: Serving) -> None:
    serving.start(1)
    error: list[BaseException] = []

    def call() -> None:
        try:
            with neighbours.serving(serving.client), paceline.device(TASK_1):
                hangs()
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=call)
    thread.start()
    assert began.wait(10)
    serving.servers[1]._acceptor.shut()
    thread.join(10)
    goes_on.set()
    assert isinstance(error[0], ConnectionLost)
    assert "/job:worker/replica:0/task:1" in str(error[0]) and "went away while it ran test_ops:hangs" in str(error[0])


began, goes_on = threading.Event(), threading.Event()


@paceline.op
def hangs() -> None:
    began.set()
    goes_on.wait(20)


# --- who may call ---------------------------------------------------------------------------------------------------


def test_a_client_with_another_secret_is_refused(serving: Serving) -> None:
    serving.start(0)
    remote = Remote("/job:worker/replica:0/task:0", serving.cluster.task_address("worker", 0), b"x" * 32, wait_s=5)
    with pytest.raises(AuthenticationError, match="another secret"):
        remote.call("alive")


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.CLIENT])
def test_other_roles_call_nothing(serving: Serving, role: Role) -> None:
    serving.start(0)
    channel = connect(serving.cluster.task_address("worker", 0), "tcp", secret_of(serving), role=role)
    channel.stream.set_timeout(10)
    with pytest.raises(ConnectionLost):
        channel.send(Kind.COLD, tail=ops.encode(ops.Call("alive", 0)))
        channel.recv()
    channel.close()


def test_strangers_are_shown_the_door(serving: Serving) -> None:
    serving.start(0)
    with socket.create_connection(split(serving.cluster.task_address("worker", 0)), timeout=10) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 100)
        assert raw.recv(1) == b""


@pytest.mark.parametrize(
    "tail", [b"", b"nonsense", msgspec.msgpack.encode({"type": "Evil"}), ops.encode(ops.Returned(0))]
)
def test_a_message_that_does_not_parse_ends_the_connection_only(serving: Serving, tail: bytes) -> None:
    serving.start(0)
    address = serving.cluster.task_address("worker", 0)
    channel = connect(address, "tcp", secret_of(serving), role=Role.CLIENT)
    channel.stream.set_timeout(10)
    channel.send(Kind.COLD, tail=tail)
    with pytest.raises(ConnectionLost):
        channel.recv()
    channel.close()
    with paceline.device(TASK_0):
        assert where().endswith("task:0")


def test_a_description_longer_than_its_call_ends_the_connection(serving: Serving) -> None:
    serving.start(0)
    channel = connect(serving.cluster.task_address("worker", 0), "tcp", secret_of(serving), role=Role.CLIENT)
    channel.stream.set_timeout(10)
    channel.send(Kind.COLD, tail=ops.encode(ops.Call("alive", 1 << 40)), bulk=[b"123"])
    with pytest.raises(ConnectionLost):
        channel.recv()
    channel.close()


def test_with_tls_too(serving: Serving, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    new_keys(tmp_path / "keys")
    flags = [f"--secret-file={tmp_path / 'keys' / 'secret'}", "--tls", "--lane=tcp", "--wait-s=5"]
    monkeypatch.setattr("sys.argv", ["script.py", *flags])
    serving.servers[0] = Server(serving.cluster, "worker", 0)
    tensor = torch.randn(300_000)
    with paceline.connect(serving.cluster), paceline.device(TASK_0):
        assert torch.equal(double(tensor), tensor * 2)
    with pytest.raises((AuthenticationError, ConnectionLost, WaitTimeout)):  # without it, and with another secret
        Remote("/task:0", serving.cluster.task_address("worker", 0), secret_of(serving), 0.0, "tcp").call("alive")


# --- servers --------------------------------------------------------------------------------------------------------


def test_a_local_server_says_the_documents_lines(serving: Serving, capfd: pytest.CaptureFixture[str]) -> None:
    with Server.create_local_server() as server:
        address = server.target.removeprefix("paceline://")
    assert capfd.readouterr().out.splitlines() == [
        f"Cluster: job local -> {{0 -> {address}}}",
        f"Started server with target: paceline://{address}",
    ]


def test_join_returns_when_the_server_is_stopped(serving: Serving) -> None:
    server = Server.create_local_server()
    thread = threading.Thread(target=server.join)
    thread.start()
    server.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_the_chief_lets_the_others_return_from_join(serving: Serving) -> None:
    serving.start(0, 1)
    thread = threading.Thread(target=serving.servers[1].join)
    thread.start()
    serving.servers[0].stop_others()
    thread.join(10)
    assert not thread.is_alive()


def test_a_port_in_use_is_one_sentence(serving: Serving) -> None:
    serving.start(0)
    with pytest.raises(UsageError, match=r"Port \d+ of worker:0 .* is in use"):
        Server(serving.cluster, "worker", 0)


def test_a_pod_listens_before_its_own_name_is_known(serving: Serving, capfd: pytest.CaptureFixture[str]) -> None:
    port = split(serving.cluster.task_address("worker", 0))[1]
    with Server({"local": [f"paceline-ps-0-0.invalid:{port}"]}, "local", 0):
        Remote("/job:local", f"127.0.0.1:{port}", secret_of(serving), wait_s=0.0, lane="tcp").call("alive")
    assert f"is no address of this host: listening at 0.0.0.0:{port}" in capfd.readouterr().out


def test_behind_nat_it_listens_at_every_interface(serving: Serving, capfd: pytest.CaptureFixture[str]) -> None:
    port = split(serving.cluster.task_address("worker", 0))[1]
    with Server({"local": [f"192.0.2.1:{port}"]}, "local", 0):  # an address that no host has
        Remote("/job:local", f"127.0.0.1:{port}", secret_of(serving), wait_s=0.0, lane="tcp").call("alive")
    assert f"192.0.2.1:{port} is no address of this host: listening at 0.0.0.0:{port}" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"job_name": "workr", "task_index": 0}, "did you mean 'worker'"),
        ({"job_name": "worker"}, "Job 'worker' has 2 tasks; say which one"),
        ({"job_name": "worker", "task_index": 7}, "no task worker:7"),
    ],
)
def test_a_server_that_is_nobody_is_refused(serving: Serving, options: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Server(serving.cluster, **options)  # type: ignore[arg-type]


def test_a_server_outside_any_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script.py"])
    with pytest.raises(UsageError, match="No cluster was found for this server"):
        Server()


def test_a_server_without_arguments_is_found_where_init_finds_it(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"cluster": serving.cluster.as_dict(), "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    serving.servers[1] = Server()
    with neighbours.serving(serving.client), paceline.device(TASK_1):
        assert where().endswith("task:1"), "though no job ps is there"


def test_a_held_port_is_let_go_for_the_server(serving: Serving) -> None:
    port_reservation.reserve(serving.cluster.task_address("worker", 0))
    serving.start(0)
    with paceline.device(TASK_0):
        assert where().endswith("task:0")
