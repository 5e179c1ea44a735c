"""kill -9 of a ps: it comes back where it was and the workers go on; without restarts the run ends and says why."""

import json
import time
from pathlib import Path

import pytest
from processes import Gate, Processes

from paceline.launchers.ports import Reserved

pytestmark = pytest.mark.timeout(180)

ENDS_WITHIN_S = 30.0
NIGHTLY = pytest.mark.nightly("a ps whose return depends on mode and lane together, or on its number")


@pytest.mark.parametrize(
    ("mode", "lane", "killed"),
    [
        ("sync", "auto", 0),
        pytest.param("sync", "tcp", 1, marks=NIGHTLY),
        pytest.param("async", "auto", 0, marks=NIGHTLY),
        pytest.param("async", "tcp", 1, marks=pytest.mark.slow),
        pytest.param("bounded", "auto", 1, marks=pytest.mark.slow),
        pytest.param("local", "auto", 0, marks=pytest.mark.slow),
    ],
)
def test_it_comes_back_and_no_update_is_lost(
    mode: str, lane: str, killed: int, processes: Processes, gate: Gate, train: Path, tmp_path: Path
) -> None:
    flags = [f"--ps={killed + 1}", f"--mode={mode}", f"--lane={lane}", "--ledger", "--run-dir=made"]
    gates = [f"--gate={i}:5:{gate.path}" for i in (0, 1)]
    launcher = processes.paceline("run", *flags, train, *gates)
    waiting = gate.arrivals(2)
    before = processes.task("ps", killed)
    before.kill()
    for arrival in waiting.values():
        arrival.release()
    launcher.ends_with(0)
    name = f"ps:{killed}"
    log = f"made/logs/ps-{killed}.log"
    assert f"{name} was killed by SIGKILL; its log: {log}; starting it again (1 of 3)" in launcher.lines
    assert f"Started again: {name} 1x" in launcher.lines
    summary = json.loads((tmp_path / "made" / "summary.json").read_text())
    assert summary["ok"] is True and summary["lost"] == []
    assert (summary["restarts"], summary["restarts_by_task"]) == (1, {name: 1})
    assert [row["steps"] for row in summary["workers"]] == [40, 40]
    expected = {"sync": 40, "async": 80, "bounded": 80, "local": 4}[mode]
    assert summary["global_step"] == expected
    assert [row["updates"] for row in summary["ps"]] == [expected] * (killed + 1)


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=NIGHTLY)])
def test_without_restarts_the_run_ends_with_exit_code_3(
    killed: int, processes: Processes, gate: Gate, train: Path, tmp_path: Path
) -> None:
    gates = [f"--gate={i}:5:{gate.path}" for i in (0, 1)]
    flags = [f"--ps={killed + 1}", "--mode=sync", "--max-restarts=0", "--run-dir=made"]
    launcher = processes.paceline("run", *flags, train, *gates)
    waiting = gate.arrivals(2)
    processes.task("ps", killed).kill()
    killed_s = time.monotonic()
    for arrival in waiting.values():
        arrival.release()
    launcher.ends_with(3)
    assert time.monotonic() - killed_s < ENDS_WITHIN_S
    name = f"ps:{killed}"
    said = f"{name} was killed by SIGKILL; its log: made/logs/ps-{killed}.log"
    assert said in launcher.lines and f"Root cause: {said}" in launcher.lines
    assert f"{name} was lost: ending all tasks." in launcher.lines
    summary = json.loads((tmp_path / "made" / "summary.json").read_text())
    assert summary["ok"] is False and name in summary["lost"] and f"{name} was killed by SIGKILL" in summary["error"]
    assert not processes.survivors()


@pytest.mark.parametrize("lane", [pytest.param("shm", marks=NIGHTLY), pytest.param("tcp", marks=pytest.mark.slow)])
def test_by_hand_each_worker_ends_with_exit_code_3(
    lane: str, processes: Processes, ports: Reserved, gate: Gate, train: Path
) -> None:
    """Nobody starts it again, so the worker waits as long as it was told to, and no longer."""
    flags = [f"--ps_hosts={ports.addresses(1)[0]}", f"--worker_hosts={ports.addresses(1)[0]}", f"--lane={lane}"]
    ps = processes.paceline("serve", "--job_name=ps", *flags, name="ps")
    script = [train, f"--gate=0:5:{gate.path}"]
    worker = processes.paceline("serve", "--job_name=worker", "--wait-s=3", *flags, *script, name="worker")
    arrival = gate.arrival()
    ps.popen.kill()
    ps.ends_with(-9)
    arrival.release()
    worker.ends_with(3)
    assert "/job:ps/replica:0/task:0 at 127.0.0.1" in worker.text and "Traceback" not in worker.text
