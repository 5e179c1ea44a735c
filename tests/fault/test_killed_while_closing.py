"""A worker that is killed after it has closed: its share is done, so nobody trains it again, and nobody waits."""

import json
from pathlib import Path

import pytest
from processes import Processes
from safetensors.numpy import load_file

PROGRAM = Path(__file__).parents[1] / "integration" / "programs" / "dies_closing.py"
NIGHTLY = pytest.mark.nightly("an end that is wrong for one mode, place and number of ps together")


@pytest.mark.parametrize(
    ("mode", "updates", "where", "num_ps"),
    [
        pytest.param(mode, updates, where, num_ps, marks=pytest.mark.slow if is_pair else NIGHTLY)
        for at, (mode, updates) in enumerate([("async", 40), ("sync", 20)])
        for turn, where in enumerate(["answered", "saved"])
        for num_ps in (1, 2)
        for is_pair in [(at + turn + num_ps) % 2 == 1]  # every pair of two choices
    ],
)
def test_the_last_to_close_is_killed(
    processes: Processes, tmp_path: Path, where: str, num_ps: int, mode: str, updates: int
) -> None:
    flags = [f"--ps={num_ps}", f"--mode={mode}", "--run-dir=made", "--lease-s=3"]
    script = [PROGRAM, "--steps=20", "--dies", where]
    processes.paceline("run", *flags, *script).ends_with(0)
    told = json.loads((tmp_path / "made" / "summary.json").read_text())
    assert (tmp_path / "has_died").exists() and told["restarts"] == 1 and told["lost"] == []
    assert [worker["steps"] for worker in told["workers"]] == [20, 20]
    newest = max((tmp_path / "made" / "checkpoints").glob("step-*"))
    assert load_file(newest / "model.safetensors")["weight"][0] == -updates == -told["global_step"]
    logs = "".join(path.read_text() for path in (tmp_path / "made" / "logs").glob("worker-*"))
    assert "has closed already; its share of this run is done" in logs
