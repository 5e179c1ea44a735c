"""kill -9 of a worker at a step of its own: the others finish, and the summary names the lost one."""

import json
from pathlib import Path

import pytest
from processes import Processes

from paceline.launchers.ports import Reserved

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(
    ("mode", "lane", "num_ps"),
    [
        pytest.param("async", "shm", 1, marks=pytest.mark.slow),
        ("sync", "tcp", 2),
        pytest.param("async", "tcp", 2, marks=pytest.mark.slow),
        pytest.param("sync", "shm", 1, marks=pytest.mark.slow),
        pytest.param("sync", "shm", 2, marks=pytest.mark.slow),
    ],
)
def test_the_others_finish_and_the_lost_one_is_named(
    mode: str, lane: str, num_ps: int, processes: Processes, train: Path, tmp_path: Path
) -> None:
    flags = [f"--mode={mode}", f"--lane={lane}", f"--ps={num_ps}", "--placement=round_robin", "--run-dir=made"]
    launcher = processes.paceline("run", *flags, train, "--kill-at=1:20").ends_with(1)
    assert "worker:1 was killed by SIGKILL; its log: made/logs/worker-1.log" in launcher.lines
    summary = json.loads((tmp_path / "made" / "summary.json").read_text())
    assert summary["lost"] == ["worker:1"] and summary["error"] == "worker:1 was killed by SIGKILL"
    assert summary["workers"][0]["steps"] == 40 and summary["workers"][0]["metrics"]["own_step"] == 40
    # Its twentieth push had left it, so it counts; the answer was never taken.
    assert summary["global_step"] == (60 if mode == "async" else 40)
    assert [row["updates"] for row in summary["ps"]] == [summary["global_step"]] * num_ps
    log = (tmp_path / "made" / "logs" / "worker-0.log").read_text()
    assert f"Worker 0 of 2: mode {mode}, lane {lane}, batch 4 a worker, 8 together" in log.splitlines()


@pytest.mark.slow
def test_the_chief_is_killed_and_another_worker_writes_the_last_checkpoint(
    processes: Processes, train: Path, tmp_path: Path
) -> None:
    processes.paceline("run", "--mode=sync", "--run-dir=made", train, "--kill-at=0:20").ends_with(1)
    summary = json.loads((tmp_path / "made" / "summary.json").read_text())
    assert summary["lost"] == ["worker:0"] and summary["workers"][1]["steps"] == 40
    assert (tmp_path / "made" / "checkpoints" / "step-00000040" / "MANIFEST.json").is_file()


@pytest.mark.slow
def test_by_hand_a_killed_worker_is_waited_for_and_then_given_up(
    processes: Processes, ports: Reserved, train: Path, tmp_path: Path
) -> None:
    workers = ",".join(ports.addresses(2))
    flags = [f"--ps_hosts={ports.addresses(1)[0]}", f"--worker_hosts={workers}", "--run_dir=made"]
    ps = processes.paceline("serve", "--job_name=ps", *flags, name="ps")
    tasks = [
        processes.paceline("serve", "--job_name=worker", f"--task_index={i}", *flags, train, "--kill-at=1:20")
        for i in (0, 1)
    ]
    tasks[1].ends_with(-9)
    tasks[0].ends_with(0)
    ps.ends_with(0)
    assert json.loads((tmp_path / "made" / "summary.json").read_text())["lost"] == ["worker:1"]
