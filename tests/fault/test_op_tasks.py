"""WHAT does a client see when a task that runs ops is killed, stopped, or was never there? A named error, in time."""

import signal
import threading
import time
from pathlib import Path

import pytest
from processes import Process, Processes

import paceline
from paceline.cluster.spec import Task
from paceline.errors import ConnectionLost, RemoteOpError, WaitTimeout
from paceline.ingraph import neighbours, remote
from paceline.ingraph.graph import Graph
from paceline.launchers.ports import Reserved
from paceline.transport import security

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

PROGRAM = Path(__file__).with_name("programs") / "op_task.py"
TASK_0, TASK_1 = "/job:worker/replica:0/task:0", "/job:worker/replica:0/task:1"
WAIT_S = 3.0


class Tasks:
    """Two worker tasks as processes; this process is their client."""

    def __init__(self, processes: Processes, addresses: list[str]) -> None:
        self.cluster = paceline.ClusterSpec({"worker": addresses})
        self._processes = processes
        self._started: list[Process] = []

    def start(self, index: int) -> Process:
        addresses = self.cluster.job_tasks("worker")
        process = self._processes.start(
            "python", PROGRAM, "worker", index, *addresses, f"--wait-s={WAIT_S}", name=f"worker:{index}"
        )
        process.wait_for("Started server with target")
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in self._started:
            if process.popen.poll() is None:
                process.signal(signal.SIGTERM)
                process.end()


def there(index: int = 1) -> remote.Remote:
    return neighbours.current().remote(Task("worker", index))


@pytest.fixture
def tasks(processes: Processes, ports: Reserved, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("XDG_CONFIG_HOME", processes.environ()["XDG_CONFIG_HOME"])
    monkeypatch.setattr("sys.argv", ["client.py", f"--wait-s={WAIT_S}"])
    made = Tasks(processes, ports.addresses(2))
    with paceline.connect(made.cluster):
        yield made
    made.end()


def in_thread(call: object) -> tuple[threading.Thread, list[BaseException]]:
    """A call whose error is looked at later."""
    errors: list[BaseException] = []
    around = neighbours.current()

    def run() -> None:
        try:
            with neighbours.serving(around):
                call()  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def work_for(seconds: float) -> object:
    return there().call("op_task:work_for", (seconds,))


def test_a_task_killed_while_it_works_is_named_at_once(tasks: Tasks) -> None:
    process = tasks.start(1)
    thread, errors = in_thread(lambda: work_for(60))
    process.wait_for("at work")
    process.signal(signal.SIGKILL)
    began = time.monotonic()
    thread.join(30)
    assert isinstance(errors[0], ConnectionLost) and time.monotonic() - began < WAIT_S
    assert TASK_1 in str(errors[0]) and "went away while it ran op_task:work_for" in str(errors[0])


def test_a_stopped_task_is_given_up_and_named(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PROBE_S", 0.2)
    monkeypatch.setattr(security, "HANDSHAKE_S", 0.5)
    process = tasks.start(1)
    thread, errors = in_thread(lambda: work_for(60))
    process.wait_for("at work")
    process.signal(signal.SIGSTOP)
    began = time.monotonic()
    thread.join(60)
    took_s = time.monotonic() - began
    assert isinstance(errors[0], WaitTimeout), errors
    assert f"{TASK_1} at " in str(errors[0]) and "says nothing: it is stopped, or lost" in str(errors[0])
    assert WAIT_S <= took_s < WAIT_S + 20
    process.signal(signal.SIGKILL)


def test_an_op_longer_than_the_patience_is_waited_for(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PROBE_S", 0.2)
    tasks.start(1)
    assert work_for(WAIT_S + 2) == "done", "its task says that it lives"


def test_a_task_killed_in_a_step_ends_the_step_for_all(tasks: Tasks) -> None:
    first, second = tasks.start(0), tasks.start(1)
    graph = Graph()
    with graph:
        with paceline.device("/job:worker/task:1"):
            lost = graph.add("work", "op_task:work_for", (60.0,), {})
        with paceline.device("/job:worker/task:0"):
            last = graph.add("last", "paceline.ingraph.kernels:identity", (lost,), {})
    with paceline.Session(f"paceline://{tasks.cluster.task_address('worker', 0)}", graph) as session:
        thread, errors = in_thread(lambda: session.run(last))
        second.wait_for("at work")
        second.signal(signal.SIGKILL)
        thread.join(10)
        assert isinstance(errors[0], ConnectionLost) and TASK_1 in str(errors[0])
        with paceline.device("/job:worker/task:0"):
            fine = graph.add("pid", "op_task:pid", (), {})
        assert session.run(fine) == first.pid, "the master goes on, and so does the session"


def test_a_killed_master_is_named(tasks: Tasks) -> None:
    first, second = tasks.start(0), tasks.start(1)
    graph = Graph()
    with graph, paceline.device("/job:worker/task:1"):
        work = graph.add("work", "op_task:work_for", (2.0,), {})
    session = paceline.Session(f"paceline://{tasks.cluster.task_address('worker', 0)}", graph)
    thread, errors = in_thread(lambda: session.run(work))
    second.wait_for("at work")
    first.signal(signal.SIGKILL)
    thread.join(10)
    assert isinstance(errors[0], ConnectionLost) and TASK_0 in str(errors[0])
    session.close()


def test_ops_of_another_process_and_their_errors(tasks: Tasks) -> None:
    process = tasks.start(1)
    assert there().call("op_task:pid") == process.pid
    with pytest.raises(RemoteOpError) as caught:
        there().call("op_task:fails")
    assert f"op_task:fails failed on {TASK_1}: LookupError: nothing there" in str(caught.value)
    assert 'raise LookupError("nothing there")' in str(caught.value)


def test_sigterm_ends_a_task_that_joins(tasks: Tasks) -> None:
    process = tasks.start(1)
    assert there().call("op_task:joins")
    process.signal(signal.SIGTERM)
    process.ends_with(0)


def test_ctrl_c_ends_it_too_with_its_own_code(tasks: Tasks) -> None:
    process = tasks.start(1)
    assert there().call("op_task:joins")
    process.signal(signal.SIGINT)
    process.ends_with(130)
    assert process.lines[-1] == "Interrupted."
