"""--chaos on real runs: each fault fires where it says, is counted, and leaves every acknowledged update in place.

The model's one weight counts the updates, so "nothing lost, nothing twice" is an equality.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import Processes
from safetensors.numpy import load_file

from paceline.cluster import chaos
from paceline.cluster.spec import Task

COUNT = Path(__file__).parents[1] / "integration" / "programs" / "count.py"
FAST = ("--lease-s=2", "--run-dir=made")  # shorter than a stop or a cut; long enough for a busy machine
pytestmark = pytest.mark.timeout(180)


def summary_of(tmp_path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((tmp_path / "made" / "summary.json").read_text())
    return told


def weight_of(tmp_path: Path) -> float:
    """The last checkpoint's one weight."""
    newest = max((tmp_path / "made" / "checkpoints").glob("step-*"))
    weight = load_file(newest / "model.safetensors")["weight"]
    assert weight.dtype == np.float32
    return float(weight[0])


def verified(processes: Processes) -> None:
    said = processes.paceline("verify", "made").ends_with(0)
    assert re.search(r"0 violations in [1-9]\d* records", said.text)


FAULTS = {  # and how many restarts they make
    "kill=ps:0@60": 1,
    "kill=ps:0@20,kill=ps:0@40,kill=ps:0@90": 3,
    "kill=worker:1@20": 1,
    "kill=worker:0@20,kill=ps:0@70": 2,
    "stop=worker:1@20:3s": 0,
    "cut=worker:1@20:3s": 0,
    "flip=worker:1@20,flip=worker:0@30": 0,
    "nan=worker:1@20": 0,
    "limit=worker:1:1mbit,delay=worker:0:5ms": 0,
}
# Modes where nobody runs away with the steps of the others. Each fault meets both modes and both lanes.
NIGHTLY = pytest.mark.nightly("a fault that costs or doubles an update in the other mode, on the other lane")
EACH_WAY = [
    pytest.param(
        *(faults, restarts, mode, ("auto", "tcp")[(at + turn) % 2]),
        marks=NIGHTLY if (at // 2 + turn) % 2 else pytest.mark.slow,
    )
    for at, (faults, restarts) in enumerate(FAULTS.items())
    for turn, mode in enumerate(("bounded", "sync"))
]


@pytest.mark.parametrize(("faults", "restarts", "mode", "lane"), EACH_WAY)
def test_exactly_as_many_updates_as_were_asked_for(
    faults: str, restarts: int, mode: str, lane: str, processes: Processes, tmp_path: Path
) -> None:
    flags = [f"--mode={mode}", f"--lane={lane}", f"--chaos={faults}", *FAST]
    launcher = processes.paceline("run", *flags, COUNT, "--total=120").ends_with(0)
    told = summary_of(tmp_path)
    assert (told["global_step"], weight_of(tmp_path)) == (120, -120.0)
    assert told["restarts"] == restarts and told["lost"] == []
    counts = {each["fault"]: each["times"] for each in told["chaos"]}
    assert list(counts) == faults.split(",") and all(counts.values()), "every fault fired"
    assert any(line.startswith("Faults injected (--chaos): ") for line in launcher.lines)
    verified(processes)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "updates"), [("async", 120), ("sync", 60), ("local", 12)])
def test_every_answer_is_swallowed_for_50_steps(mode: str, updates: int, processes: Processes, tmp_path: Path) -> None:
    faults = "swallow-acks=worker:0:50,swallow-acks=worker:1:50"
    flags = [f"--mode={mode}", f"--chaos={faults}", "--run-dir=made"]
    flags += ["--min-workers=2"] if mode == "sync" else []  # no round closes while one of them connects again
    flags += ["--local-steps=10", "--outer=async", "--outer-lr=1"] if mode == "local" else []
    processes.paceline("run", *flags, COUNT, "--steps=60").ends_with(0)
    swallowed = 6 if mode == "local" else 50
    assert [each["times"] for each in summary_of(tmp_path)["chaos"]] == [swallowed] * 2
    assert summary_of(tmp_path)["global_step"] == updates
    assert weight_of(tmp_path) == -updates * (10.0 if mode == "local" else 1.0)
    verified(processes)


@pytest.mark.nightly("a kill by the clock that hits another task than its seed says")
def test_a_kill_by_the_clock_hits_whom_the_seed_says(processes: Processes, tmp_path: Path) -> None:
    fault = "kill=worker:?@every:6s"
    flags = [f"--chaos={fault},delay=worker:0:100ms,delay=worker:1:100ms", "--chaos-seed=4", *FAST]
    processes.paceline("run", *flags, COUNT, "--total=240").ends_with(0)
    told = summary_of(tmp_path)
    assert weight_of(tmp_path) == -240.0
    hits = {each["task"]: each["times"] for each in told["chaos"] if each["fault"] == fault}
    [parsed] = chaos.parse(fault)
    tasks = [Task("ps", 0), Task("worker", 0), Task("worker", 1)]
    wanted = [str(chaos.victim(parsed, nth, tasks, 4)) for nth in range(1, sum(hits.values()) + 1)]
    assert hits == {task: wanted.count(task) for task in set(wanted)} and sum(hits.values()) >= 1
    assert told["restarts"] == sum(hits.values())
    verified(processes)


@pytest.mark.slow
def test_a_fault_that_never_came_is_said_to_have_never_come(processes: Processes, tmp_path: Path) -> None:
    launcher = processes.paceline("run", "--chaos=nan=worker:1@5000", *FAST, COUNT, "--total=20").ends_with(0)
    assert "Faults injected (--chaos): nan=worker:1@5000 never" in launcher.lines
    assert summary_of(tmp_path)["chaos"] == [{"fault": "nan=worker:1@5000", "task": None, "times": 0, "steps": []}]


@pytest.mark.slow
def test_a_nan_is_discarded_and_counted(processes: Processes, tmp_path: Path) -> None:
    processes.paceline("run", "--chaos=nan=worker:1@5", *FAST, COUNT, "--steps=30").ends_with(0)
    told = summary_of(tmp_path)
    assert told["workers"][1]["not_finite"] == 1 and told["workers"][0]["not_finite"] == 0
    assert weight_of(tmp_path) == -59.0
    verified(processes)


def test_a_bad_fault_is_refused_before_anything_is_made(processes: Processes, tmp_path: Path) -> None:
    said = processes.paceline("run", "--chaos=kill=worker:7@5", *FAST, COUNT, "--total=20").ends_with(2)
    assert "this cluster has no worker:7; its tasks are ps:0, worker:0, worker:1" in said.text
    assert not (tmp_path / "made").exists()
