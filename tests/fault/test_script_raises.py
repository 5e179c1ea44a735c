"""A script that raises: its traceback is shown once and first, the others go on, and nothing hangs."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from processes import Gate, Process, Processes

from paceline.launchers.notice import RELEASE

pytestmark = pytest.mark.timeout(180)


def summary_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "made" / "summary.json").read_text()))


def check_told_once_and_first(launcher: Process, task: str, error: str) -> None:
    """At once: how it ended, where its log is, and the error. In the last block, before anything else: why."""
    lines = [line for line in launcher.lines if not re.match(r"\[ *\d+ s\]", line)]
    start = next(at for at, line in enumerate(lines) if line.startswith("OMP_NUM_THREADS="))
    said = f"{task} failed with exit code 1; its log: made/logs/{task.replace(':', '-')}.log"
    assert lines[start + 1 : start + 3] == [said, f"  {error}"], launcher.text
    last = lines.index(f"Root cause: {said}")
    assert lines[last + 1] == "  Traceback (most recent call last):"
    assert launcher.text.count(error) == 2 and launcher.text.count("Traceback") == 1, launcher.text
    shown = launcher.text[: launcher.text.rindex(error)]
    assert "train.py" in shown and "runpy" not in shown and "entry.py" not in shown, "only the script's own frames"


# In async the fifth push of the worker that fails was sent but never acknowledged, so it may count or not.
@pytest.mark.parametrize(("mode", "counts"), [("sync", {40}), pytest.param("async", {44, 45}, marks=pytest.mark.slow)])
def test_a_worker_raises_and_the_rest_goes_on(
    mode: str, counts: set[int], processes: Processes, train: Path, tmp_path: Path
) -> None:
    launcher = processes.paceline(
        "run", f"--mode={mode}", "--max-restarts=0", "--run-dir=made", train, "--raise-at=1:5"
    ).ends_with(1)
    check_told_once_and_first(launcher, "worker:1", "RuntimeError: worker 1 was told to fail at step 5")
    summary = summary_of(tmp_path)
    assert summary["ok"] is False and summary["lost"] == ["worker:1"]
    assert summary["error"] == "worker:1 failed with exit code 1"
    assert summary["workers"][0]["steps"] == 40 and summary["workers"][0]["metrics"]["own_step"] == 40
    assert summary["global_step"] in counts, "five rounds with both, the rest with worker 0 alone"
    assert (tmp_path / "made" / "checkpoints" / f"step-{summary['global_step']:08d}" / "MANIFEST.json").is_file()


@pytest.mark.parametrize("restarts", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_ps_that_is_told_that_nobody_comes_back_ends_by_itself(
    restarts: int, processes: Processes, gate: Gate, train: Path, tmp_path: Path
) -> None:
    """The launcher tells it when the last worker has ended: it may come before the ps has seen that itself."""
    launcher = processes.paceline(
        "run", f"--max-restarts={restarts}", "--workers=1", "--run-dir=made", train, f"--gate=0:5:{gate.path}"
    )
    arrival = gate.arrival()
    processes.task("ps", 0).send_signal(RELEASE)
    arrival.release()
    launcher.ends_with(0)
    assert summary_of(tmp_path)["global_step"] == 40
    assert "ps:0 served 40 updates" in (tmp_path / "made" / "logs" / "ps-0.log").read_text()


@pytest.mark.slow
def test_the_chief_raises_before_prepare_and_the_others_end_with_the_reason(
    processes: Processes, train: Path, tmp_path: Path
) -> None:
    began_s = time.monotonic()
    launcher = processes.paceline(
        "run", "--mode=sync", "--max-restarts=0", "--run-dir=made", train, "--raise-at=0:0"
    ).ends_with(1)
    assert time.monotonic() - began_s < 50, "not the 300 s of --wait-s"
    check_told_once_and_first(launcher, "worker:0", "RuntimeError: worker 0 was told to fail at step 0")
    log = (tmp_path / "made" / "logs" / "worker-1.log").read_text()
    assert "the chief ended before it had initialised the model" in log
    assert "the chief ended before it had initialised the model" in launcher.text
    summary = summary_of(tmp_path)
    assert summary["ok"] is False and summary["lost"][0] == "worker:0" and summary["global_step"] == 0


@pytest.mark.slow
def test_another_worker_raises_before_prepare_and_the_rest_trains(
    processes: Processes, train: Path, tmp_path: Path
) -> None:
    launcher = processes.paceline(
        "run", "--mode=sync", "--max-restarts=0", "--run-dir=made", train, "--raise-at=1:0"
    ).ends_with(1)
    check_told_once_and_first(launcher, "worker:1", "RuntimeError: worker 1 was told to fail at step 0")
    summary = summary_of(tmp_path)
    assert summary["lost"] == ["worker:1"] and summary["global_step"] == 40


@pytest.mark.slow
def test_every_worker_raises_for_the_same_reason_and_it_is_told_once(
    processes: Processes, train: Path, tmp_path: Path
) -> None:
    script = tmp_path / "typo.py"
    script.write_text("import paceline\nctx = paceline.init()\nraise ValueError('a typo')\n")
    launcher = processes.paceline("run", "--max-restarts=0", "--run-dir=made", script).ends_with(1)
    assert launcher.text.count("Traceback") == 1 and "for the same reason: ValueError: a typo" in launcher.text
    assert sorted(summary_of(tmp_path)["lost"]) == ["worker:0", "worker:1"]
