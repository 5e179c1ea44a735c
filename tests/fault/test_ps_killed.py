"""kill -9 of a ps: everything ends with exit code 3, and says who was lost."""

import json
import time
from pathlib import Path

import pytest
from processes import Gate, Processes

from paceline.launchers.ports import Reserved

pytestmark = pytest.mark.timeout(180)

ENDS_WITHIN_S = 30.0


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_run_ends_with_exit_code_3(
    killed: int, processes: Processes, gate: Gate, train: Path, tmp_path: Path
) -> None:
    gates = [f"--gate={i}:5:{gate.path}" for i in (0, 1)]
    num_ps = killed + 1
    launcher = processes.paceline("run", f"--ps={num_ps}", "--mode=sync", "--run-dir=made", train, *gates)
    waiting = gate.arrivals(2)
    processes.task("ps", killed).kill()
    killed_s = time.monotonic()
    for arrival in waiting.values():
        arrival.release()
    launcher.ends_with(3)
    assert time.monotonic() - killed_s < ENDS_WITHIN_S
    name = f"ps:{killed}"
    assert f"{name} was killed by SIGKILL; its log: made/logs/ps-{killed}.log" in launcher.lines
    assert f"{name} was lost: ending all tasks." in launcher.lines
    summary = json.loads((tmp_path / "made" / "summary.json").read_text())
    assert summary["ok"] is False and name in summary["lost"] and f"{name} was killed by SIGKILL" in summary["error"]
    assert not processes.survivors()


@pytest.mark.slow
@pytest.mark.parametrize("lane", ["shm", "tcp"])
def test_by_hand_each_worker_ends_with_exit_code_3(
    lane: str, processes: Processes, ports: Reserved, gate: Gate, train: Path
) -> None:
    flags = [f"--ps_hosts={ports.addresses(1)[0]}", f"--worker_hosts={ports.addresses(1)[0]}", f"--lane={lane}"]
    ps = processes.paceline("serve", "--job_name=ps", *flags, name="ps")
    worker = processes.paceline("serve", "--job_name=worker", *flags, train, f"--gate=0:5:{gate.path}", name="worker")
    arrival = gate.arrival()
    ps.popen.kill()
    ps.ends_with(-9)
    arrival.release()
    worker.ends_with(3)
    assert "ps:0 at 127.0.0.1" in worker.text and "Traceback" not in worker.text
