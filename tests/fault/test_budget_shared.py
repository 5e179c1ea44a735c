"""`ctx.steps(total)`: the cluster applies exactly that many, at any speeds, on two ps, and without a lost worker."""

import json
from pathlib import Path
from typing import Any

import pytest
from processes import Processes
from safetensors.numpy import load_file

COUNT = Path(__file__).parents[1] / "integration" / "programs" / "count.py"
TOTAL = 200
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def summary_of(tmp_path: Path) -> dict[str, Any]:
    """With both halves of the weight looked at: every update is in both."""
    told: dict[str, Any] = json.loads((tmp_path / "made" / "summary.json").read_text())
    newest = max((tmp_path / "made" / "checkpoints").glob("step-*"))
    assert set(load_file(newest / "model.safetensors")["weight"]) == {-float(TOTAL)}
    return told


@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_counts_sum_to_the_total_at_unequal_speeds(mode: str, processes: Processes, tmp_path: Path) -> None:
    flags = ["--ps=2", f"--mode={mode}", "--slow=worker:1=4.2x", "--run-dir=made", "--ledger"]
    processes.paceline("run", *flags, COUNT, f"--total={TOTAL}").ends_with(0)
    told = summary_of(tmp_path)
    counts = [worker["steps"] for worker in told["workers"]]
    assert told["global_step"] == sum(counts) == TOTAL
    for index, count in enumerate(counts):
        log = (tmp_path / "made" / "logs" / f"worker-{index}.log").read_text()
        assert f": Worker {index}: training step {count} done (global step: " in log, "each says its count"
    processes.paceline("verify", "made").ends_with(0)


def test_the_ticket_of_a_lost_worker_returns(processes: Processes, tmp_path: Path) -> None:
    """It dies with a ticket in its hand, right before its push, and nobody starts it again."""
    flags = ["--ps=2", "--mode=bounded", "--max-restarts=0", "--chaos=kill=worker:1@20", "--run-dir=made"]
    processes.paceline("run", *flags, COUNT, f"--total={TOTAL}").ends_with(1)
    told = summary_of(tmp_path)
    assert told["lost"] == ["worker:1"] and told["global_step"] == TOTAL
    first, second = (worker["steps"] for worker in told["workers"])
    assert second == 19 and first + second == TOTAL
    processes.paceline("verify", "made").ends_with(0)
