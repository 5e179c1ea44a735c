"""A disk that is full: training goes on, the checkpoint before stays, and the end says that the last one is not there.

The run folder lies on a small file system of its own, which only root can make; elsewhere the slow test is skipped.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import Gate, Processes

import paceline
from paceline.checkpoint.read import newest, verify
from paceline.errors import ConnectionLost, TrainingFailed
from paceline.worker.checkpoints.saver import Saver

SIZE_MB = 24
STOP = 20
LARGE = Path(__file__).parent / "programs" / "large.py"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60) if os.geteuid() == 0 else None
    if made is None or made.returncode:
        why = made.stderr.strip() if made else "not root"
        pytest.skip(f"SKIPPED, so a full disk is NOT tested here: no small file system can be made ({why})")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=60)


def saved(folder: Path) -> Path:
    """The checkpoint that the saver's thread is about to finish."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = newest(folder) if folder.exists() else None
        if found is not None:
            return found
        time.sleep(0.02)
    raise AssertionError("no checkpoint was written")


def fill(folder: Path) -> None:
    """Leave no byte."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


@pytest.mark.slow
def test_training_goes_on_and_the_final_model_is_put_where_there_is_room(
    small_disk: Path, processes: Processes, train: Path, gate: Gate
) -> None:
    run_dir = small_disk / "run"
    processes.leave_unverified("a ledger that ends gives blocks back, so that the last checkpoint might fit")
    run = processes.paceline(
        "run", "--workers", "2", "--mode", "sync", "--save-every", "15", "--run-dir", run_dir, train,
        "--epochs", "30", "--batches", "20", "--gate", f"0:{STOP}:{gate.path}", PACELINE_LEDGER="0",
    )  # fmt: skip
    arrival = gate.arrival()
    kept = saved(run_dir / "checkpoints")  # the next one is due after the gate
    fill(small_disk)
    arrival.release()
    run.ends_with(0)
    for file in ("checkpoints", "logs/worker-0.log", "telemetry/worker-0.jsonl"):
        said = "the newest model lies elsewhere"
        told = [line for line in run.text.splitlines() if "cannot be written (No space left" in line and file in line]
        assert len([line for line in told if said not in line]) == 1, (file, run.text)  # when it happens, and once
    [model] = processes.folder.glob("paceline-run-*/step-00000600")
    assert verify(model) == []
    assert f"Model: {model}, because the run folder took no more" in run.text
    assert f"To train further (more epochs or steps): paceline run --resume {model} --ps" in run.text
    assert newest(run_dir / "checkpoints") == kept and verify(kept) == []
    assert list((run_dir / "checkpoints").iterdir()) == [kept]  # nothing half done is left


def test_a_disk_that_is_full_before_the_run_begins_is_said_in_a_sentence(
    small_disk: Path, processes: Processes, train: Path
) -> None:
    (small_disk / "run").mkdir()
    fill(small_disk)
    told = processes.paceline("run", "--run-dir", small_disk / "run" / "r", train).ends_with(2)
    why = "cannot be written: No space left on device; make room there, or choose another --run-dir."
    assert told.lines == [f"paceline: The run folder {(small_disk / 'run' / 'r').relative_to(processes.folder)} {why}"]
    (small_disk / "filler").unlink()
    processes.paceline("run", "--dry-run", "--run-dir", small_disk / "run" / "r", train).ends_with(0)  # it holds no run


def test_a_run_folder_that_is_removed_in_the_middle_costs_no_training(
    processes: Processes, train: Path, gate: Gate, tmp_path: Path
) -> None:
    """Nor that a worker is killed then: it is started again. What comes later lies in a new folder of that name."""
    run = processes.paceline(
        "run", "--workers", "2", "--run-dir", "run", train,
        "--gate", f"0:5:{gate.path}", "--gate", f"1:5:{gate.path}", PACELINE_LEDGER="0",
    )  # fmt: skip
    arrivals = gate.arrivals(2)
    (tmp_path / "run").rename(tmp_path / "gone")  # at once: files that come again are not in the way
    shutil.rmtree(tmp_path / "gone")
    os.kill(arrivals["worker:1"].pid, signal.SIGKILL)
    run.wait_for("starting it again")
    gate.open()
    for arrival in arrivals.values():
        arrival.release()
    run.ends_with(0)
    for file in ("run/logs/ps-0.log", "run/telemetry/ps-0.jsonl"):
        told = re.findall(rf"(?m)^paceline: .*{file}.* cannot be written \(it was removed\)", run.text)
        assert len(told) == 1, run.text
    assert "Training done; global step" in run.text
    model = newest(tmp_path / "run" / "checkpoints")
    assert model is not None and verify(model) == [] and f"Model: {model.relative_to(tmp_path)}\n" in run.text
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ok"]


@pytest.mark.slow
def test_old_checkpoints_give_way_to_new_ones(small_disk: Path, processes: Processes) -> None:
    """4 of 5 MB fit into 24, and 4 are to be kept."""
    run_dir = small_disk / "run"
    run = processes.paceline(
        "run", "--ps", "2", "--workers", "2", "--mode", "sync", "--save-every", "10", "--keep", "4",
        "--run-dir", run_dir, LARGE, "65", PACELINE_LEDGER="0",
    ).ends_with(0)  # fmt: skip
    processes.leave_unverified("ledgers would need the room")
    kept = sorted((run_dir / "checkpoints").iterdir())
    assert kept[-1].name == "step-00000065" and 2 <= len(kept) <= 4, run.text
    assert all(verify(each) == [] for each in kept)
    assert "Model: small/run/checkpoints/step-00000065\n" in run.text
    assert "gives way to the checkpoint of step" in run.text


@pytest.mark.slow
def test_a_checkpoint_that_no_place_takes_is_said_at_once_and_at_the_end(processes: Processes) -> None:
    """Without root: the system lets this process write no file of that size. Also through the agent of a host."""
    for name, hosts in (("here", ()), ("agent", ("--hosts", "localhost:1", "--no-show-logs"))):
        run = processes.paceline(
            "run", "--workers", "1", "--save-every", "10", "--run-dir", name, *hosts, LARGE, "45", "--limit-mb", "2",
            TMPDIR=str(processes.folder),
        ).ends_with(4)  # fmt: skip
        told = [line for line in run.text.splitlines() if "cannot be written (File too large)" in line]
        assert len(told) == 1 and f"{name}/checkpoints" in told[0] and "training goes on" in told[0], run.text
        assert run.text.index(told[0]) < run.text.index("Training done, but the final model could not be saved")
        assert "could not be saved: The checkpoint of step 45 could not be written" in run.text
        assert "Model: none was saved" in run.text
    assert [path.name for path in processes.folder.glob("paceline-*")] == []


def one_step(ctx: paceline.Context) -> None:
    model = torch.nn.Linear(4, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


class Failing:
    """Saver.save_now, of which the first `count` fail."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int) -> None:
        self.left = count
        plain = Saver.save_now

        def save_now(saver: Saver, *args: object) -> Path:
            self.left -= 1
            if self.left >= 0:
                raise ConnectionLost("a ps went away while it was to be saved")
            return plain(saver, *args)  # type: ignore[arg-type]

        patch.setattr(Saver, "save_now", save_now)


def test_the_last_worker_saves_what_the_chief_could_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Failing(monkeypatch, 1)
    told = paceline.launch(one_step, workers=1, run_dir=str(tmp_path / "run"))
    assert told["ok"] and failing.left < 0
    assert newest(tmp_path / "run" / "checkpoints") is not None


def test_a_final_model_that_nobody_could_save_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Failing(monkeypatch, 100)
    with pytest.raises(TrainingFailed, match="the final model, of global step 2, could not be saved"):
        paceline.launch(one_step, workers=1, run_dir=str(tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["global_step"] == 2
