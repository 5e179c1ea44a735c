"""`paceline serve`: tasks started one by one, in any order, with TF1's flags in any form."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
from processes import Gate, Process, Processes, is_listening

from paceline.launchers.ports import Reserved
from paceline.launchers.serving import REJOIN_S

pytestmark = pytest.mark.timeout(180)


class ByHand:
    """One ps and two workers, to be started in any order."""

    def __init__(self, processes: Processes, ports: Reserved, train: Path) -> None:
        self.ps, (self.worker_0, self.worker_1) = ports.addresses(1)[0], ports.addresses(2)
        self.hosts = [f"--ps_hosts={self.ps}", f"--worker_hosts={self.worker_0},{self.worker_1}"]
        self._processes = processes
        self._train = train

    def start(self, job: str, index: int, *flags: object, script: tuple[object, ...] = ()) -> Process:
        words = flags or (f"--job_name={job}", f"--task_index={index}", *self.hosts)
        program = [] if job == "ps" else [self._train, *script]
        return self._processes.paceline("serve", *words, *program, name=f"{job}:{index}")


@pytest.fixture
def cluster(processes: Processes, ports: Reserved, train: Path) -> ByHand:
    return ByHand(processes, ports, train)


@pytest.mark.slow
def test_any_start_order_and_any_form_of_flag_and_the_same_ports_again(cluster: ByHand) -> None:
    chief_comes_last(cluster)
    ps_comes_last(cluster)


def chief_comes_last(cluster: ByHand) -> None:
    one = cluster.start("worker", 1)
    one.wait_for(r"^Still waiting for response from worker: /job:ps/replica:0/task:0 \(0 s\)$")
    ps = cluster.start("ps", 0)
    ps.wait_for(r"^Still waiting for response from worker: /job:worker/replica:0/task:0 \(0 s\)$")
    one.wait_for(r"^Still waiting for response from worker: /job:worker/replica:0/task:0 \(\d+ s\)$")
    chief = cluster.start("worker", 0)
    for each in (chief, one, ps):
        each.ends_with(0)
    check_first_lines(cluster, ps, "ps", 0, cluster.ps)
    check_first_lines(cluster, chief, "worker", 0, cluster.worker_0)
    check_first_lines(cluster, one, "worker", 1, cluster.worker_1)
    check_training_lines(chief, 0)
    check_training_lines(one, 1)
    assert ps.lines[-1] == "ps:0 served 80 updates"


def check_first_lines(cluster: ByHand, task: Process, job: str, index: int, address: str) -> None:
    assert task.lines[:6] == [
        f"job_name : {job}",
        f"task_index : {index}",
        f"Cluster: job ps -> {{0 -> {cluster.ps}}}",
        f"Cluster: job worker -> {{0 -> {cluster.worker_0}, 1 -> {cluster.worker_1}}}",
        "Found by: flags",
        f"Started server with target: paceline://{address}",
    ]


def check_training_lines(task: Process, worker: int) -> None:
    """The documents' lines, each once and in this order, and at least one step in between."""
    number = r"\d+\.\d{6}"
    wanted = [
        rf"Training begins @ {number}",
        rf"{number}: Worker {worker}: training step \d+ done \(global step: \d+\)",
        rf"Training ends @ {number}",
        rf"Training elapsed time: {number} s",
    ]
    found = [[at for at, line in enumerate(task.lines) if re.fullmatch(each, line)] for each in wanted]
    assert [len(found[0]), len(found[2]), len(found[3])] == [1, 1, 1], task.text
    assert found[1] and found[0][0] < found[1][0] and found[1][-1] < found[2][0] < found[3][0], task.text


def ps_comes_last(cluster: ByHand) -> None:
    """With spaces, dashes, quotes that the shell has left, and in another order; the ports were used a moment ago."""
    workers = f"{cluster.worker_0},{cluster.worker_1}"
    one = cluster.start(
        "worker", 1, "--worker-hosts", workers, "--task-index", "1", "--ps-hosts", cluster.ps, "--job-name", "worker",
        "--log-style", "tf",
    )  # fmt: skip
    quoted = (f'--worker_hosts="{workers}"', "--job_name='worker'", f'--ps_hosts="{cluster.ps}"', "--task_index=0")
    chief = cluster.start("worker", 0, *quoted, "--log_every", "1", "--log_style=tf")
    for worker in (one, chief):
        worker.wait_for(r"^CreateSession still waiting for response from worker: /job:ps/replica:0/task:0$")
    ps = cluster.start(
        "ps", 0, "--task_index=0", "--ps_hosts", cluster.ps, "--job-name=ps", "--worker_hosts", workers,
        "--log-style=tf",
    )  # fmt: skip
    for each in (chief, one, ps):
        each.ends_with(0)
    check_document_s_lines(cluster, ps, chief)
    steps = [re.search(r"Worker 0: traing step (\d+) dome \(global step:\d+\)$", line) for line in chief.lines]
    assert [int(found[1]) for found in steps if found] == list(range(1, 41)), "--log_every 1 prints every step"


def check_document_s_lines(cluster: ByHand, ps: Process, chief: Process) -> None:
    """With --log-style tf they are in the words of documents 002 and 004."""
    assert ps.lines[:6] == [
        "job_name : ps",
        "task_index : 0",
        f"Initialize GrpcChannelCache for job ps -> {{0 -> {cluster.ps}}}",
        f"Initialize GrpcChannelCache for job worker -> {{0 -> {cluster.worker_0}, 1 -> {cluster.worker_1}}}",
        "Found by: flags",
        f"Started server with target: grpc://{cluster.ps}",
    ]
    assert re.search(r"^Training elapsed time:\d+\.\d{6} s$", chief.text, re.M), chief.text
    for ours in ("Cluster: ", "Still waiting", "paceline://", "training step"):
        assert ours not in ps.text + chief.text


@pytest.mark.slow
def test_ctrl_c_in_the_middle_ends_every_task_with_130(cluster: ByHand, processes: Processes, gate: Gate) -> None:
    at_the_gate = ("--gate", f"0:5:{gate.path}", "--gate", f"1:5:{gate.path}")
    tasks = [cluster.start("ps", 0), *(cluster.start("worker", i, script=at_the_gate) for i in (0, 1))]
    gate.arrivals(2)
    for task in tasks:
        task.signal(signal.SIGINT)
    for task in tasks:
        task.ends_with(130)
        assert "Traceback" not in task.text
    assert not processes.survivors()
    assert not any(is_listening(address) for address in (cluster.ps, cluster.worker_0, cluster.worker_1))


@pytest.mark.slow
def test_ctrl_c_while_a_task_waits_for_the_others(cluster: ByHand, ports: Reserved, train: Path) -> None:
    ps = cluster.start("ps", 0)
    elsewhere = [f"--ps_hosts={ports.addresses(1)[0]}", f"--worker_hosts={ports.addresses(1)[0]}"]
    worker = cluster.start("worker", 0, "--job_name=worker", "--task_index=0", *elsewhere)
    for task in (ps, worker):
        task.wait_for("^Still waiting for response from worker")
        task.signal(signal.SIGINT)
    for task in (ps, worker):
        task.ends_with(130)
        assert "Traceback" not in task.text


@pytest.mark.slow
def test_ctrl_c_to_one_worker_lets_the_others_finish(cluster: ByHand, gate: Gate, tmp_path: Path) -> None:
    """By hand nobody restarts it: the ps must not wait for it to come back."""
    flags = ("--mode=sync", f"--run_dir={tmp_path / 'run'}", *cluster.hosts)
    ps = cluster.start("ps", 0, "--job_name=ps", "--task_index=0", *flags)
    at_the_gate = ("--gate", f"1:5:{gate.path}")
    chief, one = (
        cluster.start("worker", i, "--job_name=worker", f"--task_index={i}", *flags, script=at_the_gate) for i in (0, 1)
    )
    gate.arrival()
    one.signal(signal.SIGINT)
    one.ends_with(130)
    interrupted_s = time.monotonic()
    for task in (chief, ps):
        task.ends_with(0)
    assert time.monotonic() - interrupted_s < REJOIN_S / 2
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["lost"] == ["worker:1"] and summary["workers"][0]["steps"] == 40
    assert summary["global_step"] == 40


@pytest.mark.slow
def test_kv_and_ctl_during_the_training(processes: Processes, ports: Reserved, train: Path, gate: Gate) -> None:
    """By the run folder and by the address of any ps, which the tasks were started with; two ps, so that a variable is
    put together from both."""
    addresses = ports.addresses(4)
    ps, workers = addresses[:2], addresses[2:]
    flags = [f"--ps_hosts={','.join(ps)}", f"--worker_hosts={','.join(workers)}", "--run-dir", "run"]

    def start(job: str, index: int, *script: object) -> Process:
        name = [f"--job_name={job}", f"--task_index={index}"]
        return processes.paceline("serve", *name, *flags, *script, name=f"{job}:{index}")

    script = (train, "--gate", f"0:5:{gate.path}", "--gate", f"1:5:{gate.path}")
    tasks = [start("ps", i) for i in (0, 1)]
    for task in tasks:
        task.wait_for("^Started server")
    assert "has not begun: the ps hold nothing yet" in processes.paceline("kv", "ls", ps[0]).ends_with(1).text
    tasks += [start("worker", i, *script) for i in (0, 1)]
    arrivals = gate.arrivals(2)
    for where in ("run", ps[1], ",".join(ps)):
        shown = processes.paceline("ctl", "show", where).ends_with(0)
        assert "mode: async" in shown.lines and "live workers: worker:0, worker:1 (2 of 2)" in shown.lines
        names = processes.paceline("kv", "ls", where).ends_with(0)
        assert {"ps:0", "ps:1"} <= {ps for line in names.lines for ps in re.findall(r"ps:\d", line)}, names.text
    name = next(line.split()[0] for line in names.lines if "trained" in line and not line.startswith("name"))
    told = [processes.paceline("kv", "get", where, name).ends_with(0).lines for where in ("run", ps[1])]
    assert told[0] == told[1] and f"name: {name}" in told[0]

    other = processes.folder / "other"
    other.write_text("ab" * 32)
    other.chmod(0o600)
    for where, verb in (("run", ("kv", "ls")), (ps[0], ("ctl", "show"))):
        refused = processes.paceline(*verb, where, "--secret-file", other).ends_with(2)
        assert "has another secret" in refused.text and "--secret-file" in refused.text
        assert "Traceback" not in refused.text
    asked = processes.paceline("ctl", "mode", "sync", ps[1])
    asked.wait_for("^Still waiting for response from worker")  # they stand at the gate
    for arrival in arrivals.values():
        arrival.release()
    asked.ends_with(0)
    assert re.search(r"^mode async -> sync at global step \d+", asked.text, re.MULTILINE)
    for task in tasks:
        task.ends_with(0)

    ended = processes.paceline("ctl", "show", "run").ends_with(2)
    assert "has ended" in ended.text
    gone = processes.paceline("kv", "ls", ps[0]).ends_with(2)
    assert f"No ps answers at {ps[0]}" in gone.text and "--ps_hosts" in gone.text
    nothing = processes.paceline("ctl", "show", "nothing").ends_with(2)
    assert "HOST:PORT" in nothing.text
