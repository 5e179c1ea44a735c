"""Workers come and go: one joins a run that trains, a run with too few of them pauses, a lost one's place is taken."""

import json
import re
from pathlib import Path

import pytest
import torch
from processes import Arrival, Gate, Process, Processes

import paceline
from paceline.launchers.ports import Reserved
from paceline.worker.control import shown_by

pytestmark = pytest.mark.timeout(180)


def begin(processes: Processes, *words: object) -> Process:
    """A run with two workers and room for two more, in rounds."""
    return processes.paceline("run", "--workers=2:4", "--mode=sync", "--run-dir=made", "--max-restarts=0", *words)


def join(processes: Processes, *words: object) -> Process:
    return processes.paceline("serve", "--join", "made", *words, name="joined")


def summary_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "made" / "summary.json").read_text())


def rows(summary: dict[str, object]) -> dict[str, dict[str, object]]:
    workers = summary["workers"]
    assert isinstance(workers, list)
    return {row["task"]: row for row in workers}


def gates(gate: Gate, *places: str) -> list[str]:
    return [word for place in places for word in ("--gate", f"{place}:{gate.path}")]


@pytest.mark.slow
def test_a_third_worker_joins_and_the_run_waits_for_it(
    processes: Processes, gate: Gate, train: Path, tmp_path: Path
) -> None:
    """The two of the launcher stand at their fifth step while the third comes; at its 100th they have long closed."""
    stops = gates(gate, "0:5", "1:5", "2:100")
    launcher = begin(processes, train, "--epochs-of=2:4", *stops)
    held: dict[str, Arrival] = gate.arrivals(2)
    assert sorted(held) == ["worker:0", "worker:1"]
    third = join(processes)
    third.wait_for("^Found by: run folder$")
    third.wait_for("^Training begins @ ")
    assert shown_by(tmp_path / "made").live == ["worker:0", "worker:1", "worker:2"]
    for arrival in held.values():
        arrival.release()
    late = gate.arrival()
    assert late.text.startswith("worker:2 step 100 ")
    launcher.wait_for(r"worker:0 .*ended \| worker:1 .*ended \| worker:2 step ")
    assert shown_by(tmp_path / "made").live == ["worker:2"]
    late.release()
    third.ends_with(0)
    launcher.ends_with(0)
    check_the_end_of_three(launcher, tmp_path)


def check_the_end_of_three(launcher: Process, folder: Path) -> None:
    told = summary_of(folder)
    by_task = rows(told)
    assert (told["ok"], told["lost"]) == (True, [])
    assert sorted(by_task) == ["worker:0", "worker:1", "worker:2"], "nobody is missed who never came"
    assert not any(row["lost"] for row in by_task.values())
    third = by_task["worker:2"]["steps"]
    assert isinstance(third, int) and third > 100
    assert told["global_step"] == 5 + third, "every round from the sixth on had the third worker in it"
    assert "worker:3" not in launcher.text.replace("Cluster: ", "")
    assert "did not end" not in launcher.text
    assert "2 of 4 workers are started here; one more: paceline serve --join made" in launcher.lines
    saved = folder / "made" / "checkpoints" / f"step-{told['global_step']:08d}" / "MANIFEST.json"
    assert saved.is_file(), "the last one to close saves"


@pytest.mark.slow
def test_below_min_workers_it_pauses_until_another_joins(
    processes: Processes, train: Path, gate: Gate, tmp_path: Path
) -> None:
    launcher = begin(processes, train, "--kill-at=1:5", *gates(gate, "2:1"))
    launcher.wait_for(r"ps:0: Paused: 1 more worker needed \(--min-workers 2\)")
    paused = shown_by(tmp_path / "made")
    assert (paused.live, paused.lacks) == (["worker:0"], 1)
    step = paused.global_step
    assert step in (5, 6), "the lost one's fifth gradient had left it; at most one round was closed without it"
    third = join(processes)
    arrival = gate.arrival()
    assert arrival.text.startswith("worker:2 step 1 ")
    assert shown_by(tmp_path / "made").lacks == 0
    launcher.wait_for("ps:0: Going on: 2 workers are in again")
    arrival.release()
    third.ends_with(0)
    launcher.ends_with(1)
    told = summary_of(tmp_path)
    assert told["lost"] == ["worker:1"] and told["error"] == "worker:1 was killed by SIGKILL"
    by_task = rows(told)
    assert sorted(by_task) == ["worker:0", "worker:1", "worker:2"]
    assert not by_task["worker:0"]["lost"] and not by_task["worker:2"]["lost"]


@pytest.mark.slow
def test_a_lost_one_s_place_is_taken_where_there_is_no_other(
    processes: Processes, train: Path, gate: Gate, tmp_path: Path
) -> None:
    """A plain run has room for as many as it started; when one is lost, another may come in its place."""
    flags = ("--workers=2", "--mode=async", "--run-dir=made", "--max-restarts=0")
    launcher = processes.paceline("run", *flags, train, "--kill-at=1:5", *gates(gate, "0:10"))
    held = gate.arrival()
    launcher.wait_for("^worker:1 was killed by SIGKILL")
    second = join(processes, "--task_index=1", train)
    second.ends_with(0)
    full = join(processes, "--task_index=1", train).ends_with(2)
    assert len(full.lines) == 1
    assert re.search(r"worker:1 of this run is there, or has done its share", full.lines[0])
    held.release()
    launcher.ends_with(1)
    told = rows(summary_of(tmp_path))
    assert (told["worker:0"]["steps"], told["worker:1"]["steps"]) == (40, 5 + 40), "the lost one's counted, too"
    assert summary_of(tmp_path)["global_step"] == 85


@pytest.mark.slow
def test_by_hand_the_first_are_enough(processes: Processes, ports: Reserved, train: Path, tmp_path: Path) -> None:
    hosts = [f"--ps_hosts={ports.addresses(1)[0]}", f"--worker_hosts={','.join(ports.addresses(3))}"]
    flags = ["--workers=1:3", "--run_dir=made", *hosts]
    ps = processes.paceline("serve", "--job_name=ps", *flags, name="ps")
    processes.paceline("serve", "--job_name=worker", "--task_index=0", *flags, train, name="chief").ends_with(0)
    ps.ends_with(0)
    told = summary_of(tmp_path)
    assert (told["ok"], told["lost"], list(rows(told))) == (True, [], ["worker:0"])


def test_threads_start_the_first_and_wait_for_nobody_else() -> None:
    def train(ctx: paceline.Context) -> None:
        model = torch.nn.Linear(2, 1)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    told = paceline.launch(train, workers=3, mode="sync", started_workers=2)
    assert [(row["task"], row["steps"]) for row in told["workers"]] == [("worker:0", 3), ("worker:1", 3)]
    assert (told["ok"], told["global_step"]) == (True, 3)


@pytest.mark.slow
def test_no_room_and_no_run(processes: Processes, train: Path, gate: Gate, tmp_path: Path) -> None:
    launcher = processes.paceline("run", "--workers=1", "--run-dir=made", train, *gates(gate, "0:5"))
    held = gate.arrival()
    full = join(processes).ends_with(2)
    assert full.lines == [
        "paceline: All 1 workers of this run are there, or have done their share; to leave room for more, "
        "start a run with --workers 1:2."
    ]
    held.release()
    launcher.ends_with(0)
    before = sorted(tmp_path.rglob("*"))
    over = join(processes).ends_with(2)
    assert len(over.lines) == 1 and "has ended" in over.lines[0]
    assert sorted(tmp_path.rglob("*")) == before, "nothing was made"
