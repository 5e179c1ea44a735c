"""Devices on a machine without a GPU: who asked for one is told once and trains on the CPU, or is refused."""

import json
from pathlib import Path

import pytest
from processes import Gate, Processes

pytestmark = pytest.mark.timeout(120)

SHARE = Path(__file__).parents[1] / "gpu" / "programs" / "share.py"
NO_GPU = "the CPU is used instead (--no-soft-placement refuses)"


def test_without_soft_placement_nothing_starts(processes: Processes, tmp_path: Path) -> None:
    flags = ["--run-dir", "r", "--worker-device", "/gpu:99", "--no-soft-placement"]
    refused = processes.paceline("run", *flags, SHARE).ends_with(2)
    assert len(refused.lines) == 1 and "worker:0 is to compute on /gpu:99" in refused.text
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_soft_placement_is_said_once(processes: Processes, tmp_path: Path) -> None:
    flags = ["--run-dir", "r", "--worker-device", "/gpu:99", "--log-device-placement", "--save-every", "none"]
    run = processes.paceline("run", *flags, SHARE).ends_with(0)
    assert "worker:0 on /cpu:0 (there is no /gpu:99)" in run.text
    log = (tmp_path / "r" / "logs" / "worker-1.log").read_text()
    assert log.count(NO_GPU) == 1 and "There is no /gpu:99 here" in log
    assert "Device mapping:" in log and "Worker 1 computes on /cpu:0" in log
    told = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert [row["device"] for row in told["workers"]] == ["/cpu:0"] * 2


@pytest.mark.slow
def test_the_users_cards_are_the_workers_and_not_the_ps(
    processes: Processes, gate: Gate, train: Path, tmp_path: Path
) -> None:
    """Tasks by exec, because a forked process does not show its environment."""
    cards = {"CUDA_VISIBLE_DEVICES": "98,99", "PACELINE_NURSERY": "0"}
    run = processes.paceline("run", "--run-dir", "r", train, "--gate", f"0:1:{gate.path}", **cards)
    chief = gate.arrival()
    assert processes.task("ps", 0).environ()["CUDA_VISIBLE_DEVICES"] == ""
    assert processes.task("worker", 1).environ()["CUDA_VISIBLE_DEVICES"] == "98,99"
    chief.release()
    run.ends_with(0)
    log = (tmp_path / "r" / "logs" / "worker-0.log").read_text()
    assert log.count(f"CUDA_VISIBLE_DEVICES=98,99 names no GPU that torch can use here: {NO_GPU}") == 1


@pytest.mark.slow
def test_what_the_script_sets_before_init_counts(processes: Processes, tmp_path: Path) -> None:
    run = processes.paceline("run", "--run-dir", "r", "--save-every", "none", SHARE, "--visible", "97")
    run.ends_with(0)
    for index in (0, 1):
        assert "CUDA_VISIBLE_DEVICES=97 names no GPU" in (tmp_path / "r" / "logs" / f"worker-{index}.log").read_text()
