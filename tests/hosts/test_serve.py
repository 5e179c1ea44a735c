"""`paceline serve` over hosts: any order, document 000's rows, TLS, machines of different speed; and it truly crosses
the cable."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from placed import PS_PORT, Placed, end
from processes import Processes
from running_hosts import RunningHost

from paceline.lab.matrices import seeds
from paceline.lab.measuring.hosts import lacking
from paceline.lab.measuring.whole_runs import command_of, read
from paceline.telemetry.paths import RunPaths

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(180)]
Hosts = Callable[[int], list[RunningHost]]
SHORT_EPOCHS = 2
SHAKE_HANDS = """
import socket, ssl, sys
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 20) as link, context.wrap_socket(link) as inside:
    print(inside.version())
"""


def test_any_order_and_any_form_of_flag(hosts: Hosts, train: Path, tmp_path: Path) -> None:
    first, second = hosts(2)
    cluster = Placed(tmp_path, [first], [first, second])
    dashes = ("--worker-hosts", cluster.worker_hosts, "--task-index", "1", "--ps-hosts", cluster.ps_hosts)
    one = cluster.start("worker", 1, train, place=(*dashes, "--job-name", "worker"))
    one.wait_for(r"^Still waiting for response from worker: /job:ps/replica:0/task:0 \(0 s\)$")
    quoted = (f'--worker_hosts="{cluster.worker_hosts}"', "--job_name='worker'", f"--ps_hosts='{cluster.ps_hosts}'")
    chief = cluster.start("worker", 0, train, place=(*quoted, "--task_index=0"))
    ps = cluster.start("ps", 0)
    end({"worker:0": chief, "worker:1": one, "ps:0": ps})
    assert ps.lines[-1] == "ps:0 served 80 updates"
    assert f"Started server with target: paceline://{first.at(2222)}" in ps.lines
    assert cluster.lanes() == {("worker:0", "ps:0"): "shm", ("worker:1", "ps:0"): "tcp"}


@pytest.mark.parametrize(
    "number", ["7", pytest.param("8", marks=pytest.mark.nightly("a third worker that takes the wrong lane"))]
)
def test_rows_of_document_000(number: str, processes: Processes, tmp_path: Path) -> None:
    """Two hosts, 1 ps and 2 or 3 workers, async; as the lab runs them, for two epochs."""
    if why := lacking():
        pytest.skip(f"NOT TESTED: {why}")
    (cell,) = (c for table in seeds.matrix(True).tables for c in table.cells if c.labels[0] == number)
    paths = RunPaths(tmp_path / "run")
    command = [str(SHORT_EPOCHS) if word == str(seeds.EPOCHS) else word for word in command_of(cell, paths)]
    assert command.count(str(SHORT_EPOCHS)) == 1
    processes.start(*command, within_s=150.0).ends_with(0)
    done = read(paths)
    assert done.global_step == SHORT_EPOCHS * seeds.SHORT_BATCHES * cell.num_workers
    beside = [task for task in cell.hosts[0] if task.startswith("worker")]
    lanes = {pair.worker: pair.lane for pair in done.pairs}
    assert set(lanes.values()) == {"shm", "tcp"}, "somebody must cross the cable"
    assert [task for task, lane in sorted(lanes.items()) if lane == "shm"] == beside


@pytest.mark.nightly("TLS that fails between machines; between processes it is in CI")
def test_with_tls(hosts: Hosts, train: Path, tmp_path: Path) -> None:
    """The ps begins to speak TLS with whoever asks, and whoever does not is refused; then all train."""
    first, second = hosts(2)
    first.paceline("keys", "new", tmp_path / "keys").ends_with(0)
    flags = ("--secret-file", tmp_path / "keys" / "secret", "--mode=sync")
    cluster = Placed(tmp_path, [first], [first, second], flags)
    tasks = {"ps:0": cluster.start("ps", 0, flags=["--tls"])}
    tasks["ps:0"].wait_for("Started server")
    asked = second.start(sys.executable, "-c", SHAKE_HANDS, first.address, PS_PORT).ends_with(0)
    assert asked.lines[-1].startswith("TLSv1.")
    plain = cluster.start("worker", 1, train, flags=["--wait-s=2"]).ends_with(3)
    assert "--tls" in plain.text and "Traceback" not in plain.text
    for index in range(2):
        tasks[f"worker:{index}"] = cluster.start("worker", index, train, "--epochs", "1", flags=["--tls"])
    end(tasks)
    assert cluster.lanes()["worker:1", "ps:0"] == "tcp" and cluster.summary()["global_step"] == 20


@pytest.mark.parametrize(
    "mode",
    [pytest.param("async", marks=pytest.mark.nightly("in async, a step of a slow machine that is lost")), "sync"],
)
def test_machines_of_different_speed(mode: str, hosts: Hosts, train: Path, tmp_path: Path) -> None:
    """One of three workers is ten times slower: async takes what it gives, two of three go on without it."""
    first, second, third = hosts(3)
    flags = ["--slow=worker:2=10x", "--lease-s=2", f"--mode={mode}"]
    flags += ["--replicas-to-aggregate=2"] if mode == "sync" else []
    cluster = Placed(tmp_path, [first], [first, second, third], flags)
    end(cluster.start_all(train, "--epochs", "1", "--batches", "40", "--epochs-of", "2:1"))
    assert set(cluster.lanes().values()) == {"shm", "tcp"}
    workers = cluster.summary()["workers"]
    assert isinstance(workers, list)
    if mode == "async":
        assert cluster.summary()["global_step"] == 120 and all(each["discarded"] == 0 for each in workers)
    else:
        assert workers[2]["discarded"] > 0, "whoever is slow comes too late, and nobody waits for it"


def test_a_python_that_is_ours(hosts: Hosts) -> None:
    """What ssh finds on a host is this very paceline."""
    first, second = hosts(2)
    said = first.ssh_to(second, "python -c 'import sys; print(sys.executable)'").ends_with(0)
    assert Path(said.lines[-1]).parent == Path(sys.executable).parent
