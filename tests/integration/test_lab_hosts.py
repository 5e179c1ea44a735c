"""DO a cell's hosts work as processes? A cluster over two network namespaces, watched; and forked null workers."""

import signal
import sys
from pathlib import Path

import msgspec
import pytest
from process_fixtures import PROGRAMS
from processes import AUDIT, Gate, Processes

from paceline.cluster.spec import Task
from paceline.lab.measuring.hosts import hosts, lacking
from paceline.lab.measuring.processes import output_of
from paceline.lab.measuring.whole_runs import read
from paceline.lab.scripts.crossed import GLOO, OURS, RAW, RAW_AGAIN, Crossed
from paceline.lab.scripts.curves import TOLD
from paceline.lab.scripts.pushes import Pushes
from paceline.lab.scripts.watched import Watched, net_of
from paceline.telemetry.paths import RunPaths

MODEL_BYTES = 4 * (2 * 784 * 200 + 200 + 784)


@pytest.mark.hosts
def test_two_hosts_reach_each_other_and_nothing_of_them_is_left() -> None:
    if why := lacking():
        pytest.skip(f"NOT TESTED: {why}")
    with hosts(2) as (first, second):
        paths = [Path(f"/proc/{host.pid}/net/dev") for host in (first, second)]
        assert output_of([*first.enter, "ip", "route", "get", second.address]) is not None
        before = net_of(paths[1].read_text())
        send = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x' * 1000, ('10.77.0.2', 9))"
        assert output_of([*first.enter, sys.executable, "-c", send]) is not None
        after = net_of(paths[1].read_text())
        assert after.since(before).outer_received_bytes >= 1000 and after.loopback_bytes == 0
    assert not Path(f"/proc/{first.pid}").exists() and not Path(f"/proc/{second.pid}").exists()


@pytest.mark.nightly("a lab that does not see what tasks on other hosts use")
@pytest.mark.hosts
def test_a_cluster_over_two_hosts_is_watched(processes: Processes, tmp_path: Path) -> None:
    if why := lacking():
        pytest.skip(f"NOT TESTED: {why}")
    program = ("-m", "paceline.launchers.demos.autoencoder", "--images", "1280", "--epochs", "1")
    hosts_flag = ("--hosts", "ps:0,worker:0/worker:1", "--settings", '{"save_every":"none"}')
    run = processes.start(
        sys.executable, "-m", "paceline.lab.scripts.hosts_script", "--run-dir", tmp_path, *hosts_flag, *program
    )
    run.ends_with(0)
    done = read(RunPaths(tmp_path))
    assert [worker.steps for worker in done.workers] == [5, 5] and done.global_step == 10
    seen = msgspec.json.decode((tmp_path / TOLD).read_bytes(), type=Watched)
    assert seen.is_alone and seen.num_hosts == 2
    assert seen.outer_bytes > 5 * 2 * MODEL_BYTES  # worker 1's gradients and parameters
    assert seen.loopback_bytes < MODEL_BYTES  # worker 0 shares memory with the ps
    assert seen.cores("worker:1") > 0


LINKS = "paceline.lab.scripts.links_script"


@pytest.mark.hosts
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("flags", "systems"),
    [
        (("--connections", "2"), {OURS, RAW, RAW_AGAIN, GLOO}),
        (("--tls",), {OURS, RAW, RAW_AGAIN}),
        (("--limit-mbit", "100"), {OURS, RAW}),
    ],
    ids=["two connections", "tls", "limited"],
)
def test_the_lane_is_measured_beside_others(
    processes: Processes, tmp_path: Path, flags: tuple[str, ...], systems: set[str]
) -> None:
    if why := lacking():
        pytest.skip(f"NOT TESTED: {why}")
    amounts = ("--bytes", "1000000", "--lives", "1", "--reps", "2", "--seconds", "0.02", "--told", tmp_path / TOLD)
    run = processes.start(sys.executable, "-m", LINKS, *amounts, *flags, within_s=200.0)
    run.ends_with(0)
    seen = msgspec.json.decode((tmp_path / TOLD).read_bytes(), type=Crossed)
    assert {system: len(us) for system, us in seen.us.items()} == dict.fromkeys(systems, 2)
    assert seen.share is not None and seen.share > 0
    assert all(0.5 < share < 1.2 for shares in seen.used.values() for share in shares)
    assert set(seen.used) == (systems if "--limit-mbit" in flags else set())


@pytest.mark.slow
def test_ctrl_c_ends_a_cell_with_hosts_at_once_and_its_ps_in_order(
    processes: Processes, gate: Gate, tmp_path: Path
) -> None:
    """Its worker stands still: whoever waited for that one would be killed by the lab, and the ps with it."""
    program = ("-m", "train", f"--gate=0:5:{gate.path}")
    hosts_flag = ("--run-dir", tmp_path / "run", "--hosts", "ps:0,worker:0")
    run = processes.start(
        sys.executable,
        "-m",
        "paceline.lab.scripts.hosts_script",
        *hosts_flag,
        *program,
        PYTHONPATH=f"{AUDIT}:{PROGRAMS}",
    )
    standing = gate.arrival()
    run.signal(signal.SIGINT)
    assert run.end() != 0
    standing.release()  # not before: it is still there when everything ends
    assert "ps:0 served 5 updates" in RunPaths(tmp_path / "run").logs(Task("ps", 0)).read_text()


@pytest.mark.slow
def test_null_workers_push_and_all_end(processes: Processes, tmp_path: Path) -> None:
    counts = ("--bytes", "100000", "--workers", "3", "--ps", "2", "--lane", "tcp", "--seconds", "0.05")
    run = processes.start(sys.executable, "-m", "paceline.lab.scripts.scale_script", *counts, "--told", tmp_path / TOLD)
    run.ends_with(0)
    found = msgspec.json.decode((tmp_path / TOLD).read_bytes(), type=Pushes)
    assert len(found.workers) == 3 and all(each.count > 0 for each in found.workers)
    assert found.wait_us > 0 and found.per_s > 0
