"""A script that forks: its children are none of the run's business, however they end and whatever they ask for."""

import json
from pathlib import Path

import pytest
from processes import Processes

pytestmark = pytest.mark.timeout(180)

PROGRAM = Path(__file__).with_name("programs") / "forks.py"
ENDS = {
    "grandchild": 0, "raise": 1, "interrupt": 130, "with": 5, "_exit": 6, "sys.exit": 7, "return": 0, "own training": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [["--lane=shm"], pytest.param(["--lane=tcp", "--mode=sync", "--ps=2"], marks=pytest.mark.slow)],
    ids=["shm", "tcp"],
)
def test_children_neither_end_nor_disturb_the_worker(flags: list[str], processes: Processes, tmp_path: Path) -> None:
    seen_at = tmp_path / "seen.json"
    processes.paceline("run", "--ledger", "--max-restarts=0", "--run-dir=made", *flags, PROGRAM, seen_at).ends_with(0)
    seen = json.loads(seen_at.read_text())
    for name, code in ENDS.items():
        assert seen.pop(name) == [code, ""], name
    for number in range(10):
        assert seen.pop(f"thread {number}") == [0, ""], "refused at once, wherever the other thread was"
    assert len(seen) == 14
    for name, (code, text) in seen.items():
        assert code == 0 and " in a forked child: only its parent (pid " in text and "(forks.py, line " in text, name
    summary = json.loads((tmp_path / "made" / "summary.json").read_text())
    assert summary["ok"] and summary["lost"] == [] and summary["restarts"] == 0
    records = [
        json.loads(line)
        for line in (tmp_path / "made" / "telemetry" / "worker-0.jsonl").read_text().split("\n")
        if line
    ]
    kinds = [record["kind"] for record in records]
    assert [kinds.count(each) for each in ("start", "report", "close")] == [1, 1, 1], "children write no records"


SPAWNS = """
import multiprocessing
import torch
import paceline

ctx = paceline.init()

if __name__ == "__main__":
    model = torch.nn.Linear(4, 4)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
    assert child.exitcode == 2, child.exitcode
    optimizer.step()
"""


@pytest.mark.slow
def test_a_spawned_child_that_is_a_worker_by_mistake_is_told_so(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS)
    processes.paceline("run", "--workers=1", "--max-restarts=0", "--run-dir=made", "spawns.py").ends_with(0)
    log = (tmp_path / "made" / "logs" / "worker-0.log").read_text()
    assert "paceline.init() (spawns.py, line 6) in a process that the script has started, while worker:0" in log
    assert 'under `if __name__ == "__main__":`' in log
