"""A worker that is started again goes on where its predecessor was: each batch is pushed once, with its own options."""

import json
import signal
import sys
from pathlib import Path

import pytest

from paceline.checkpoint.read import load_newest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from process_fixtures import PROGRAMS, started_processes
from processes import Gate

PROGRAM = Path(__file__).with_name("programs") / "goes_on.py"
FLAGS = ["--ps", "1", "--workers", "2", "--mode", "async", "--lease-s", "3", "--save-every", "none"]


def pushed(folder: Path, *words: str, says: tuple[str, ...] = ()) -> list[str]:
    """What worker 1 pushed in all its lives, in order; the launcher `says` so many sentences once."""
    folder.mkdir()
    with started_processes(folder) as processes:
        run = processes.paceline("run", "--run-dir", "run", *FLAGS, PROGRAM, "--out", folder, *words).ends_with(0)
    assert [sentence for sentence in says if run.text.count(sentence) != 1] == []
    return (folder / "1.txt").read_text().splitlines()


NIGHTLY = pytest.mark.nightly("a worker that goes on elsewhere without a loader, or with one ps")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_worker_started_again_goes_on_at_its_batch(tmp_path: Path) -> None:
    """Killed in the middle of its second epoch, with a gradient that was never sent."""
    whole = pushed(tmp_path / "whole")
    parts = pushed(tmp_path / "parts", "--kill-at", "17")
    assert (tmp_path / "parts" / "killed").exists()
    assert len(whole) == 36
    assert parts == whole


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("data", ["loader", pytest.param("none", marks=NIGHTLY)])
def test_a_plain_range_ends_with_the_others_after_a_restart(data: str, tmp_path: Path) -> None:
    """The worker goes on where it was, its loop does not: without a word it would do 17 steps twice."""
    words = ["--plain", *(["--no-loader"] if data == "none" else [])]
    whole = pushed(tmp_path / "whole", *words)
    ends = "3 passes over the data" if data == "loader" else "36 steps"
    says = (
        "worker:1: this worker was started again and goes on where it was, but its loop counts from 0 again",
        f"worker:1: this worker ends here: as the others, it has made {ends}, with those before its restart",
    )
    parts = pushed(tmp_path / "parts", "--kill-at", "17", *words, says=says)
    assert (tmp_path / "parts" / "killed").exists()
    batches = [[line.partition(": ")[2].partition(" 0")[0] for line in lines] for lines in (whole, parts)]
    assert len(batches[0]) == 36
    assert batches[0] == batches[1] if data == "loader" else len(parts) == 36
    told = json.loads((tmp_path / "parts" / "run" / "summary.json").read_text())
    assert (told["ok"], told["global_step"]) == (True, 72)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("ps", [pytest.param("1", marks=NIGHTLY), "2"])
def test_ctrl_c_saves_first_and_resume_goes_on_there(ps: str, tmp_path: Path) -> None:
    """Interrupted in the middle of an epoch of 20 batches, with nothing saved before."""
    with started_processes(tmp_path) as processes:
        gate = Gate(tmp_path)
        run = ["run", "--run-dir", "run", "--ps", ps, "--workers", "2", "--mode", "sync"]
        first = processes.paceline(*run, PROGRAMS / "train.py", "--gate", f"0:27:{gate.path}")
        standing = gate.arrival()  # nobody makes updates: the chief saves what there is
        first.signal(signal.SIGINT)
        first.ends_with(130)
        standing.release()
        gate.close()
        saved = load_newest(tmp_path / "run" / "checkpoints")
        assert saved is not None and saved.state.global_step in (26, 27)
        assert "Interrupted: saving before the end" in (tmp_path / "run" / "logs" / "worker-0.log").read_text()
        processes.paceline(*run, "--resume", "auto", PROGRAMS / "train.py").ends_with(0)
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert told["ok"]
    # The other worker may have been a second behind when its last heartbeat told where it was.
    assert 40 <= told["global_step"] <= 40 + 27
