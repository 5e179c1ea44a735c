"""DOES the lab go on after Ctrl+C, and does its example run? From the command to the files, as processes."""

import csv
import json
import signal
from pathlib import Path

import pytest
from processes import Gate, Processes

from paceline.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TRAINING

LONG_S = 220.0
SCRIPT = """
import os, pathlib, socket, sys, paceline, torch
here, part = pathlib.Path(__file__).parent, sys.argv[2]
with open(here / "ran.txt", "a") as file: file.write(part)
if part == "2" and (here / "ran.txt").read_text() == "12":
    gate = socket.socket(socket.AF_UNIX)
    gate.connect(os.path.relpath(here / "gate"))
    gate.sendall(f"worker:0 pid {os.getpid()}\\n".encode())
    gate.recv(1)
if part == "3": raise ValueError("it burns")
ctx, model = paceline.init(), torch.nn.Linear(2, 1)
model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_the_same_command_goes_on_after_ctrl_c(processes: Processes, gate: Gate, tmp_path: Path) -> None:
    """Three runs of one step: the second is interrupted once, the third always fails."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "mine.toml").write_text(
        'script = "train.py"\n[axes]\nworkers = 1\nmax_restarts = 0\n[axes.args]\npart = [1, 2, 3]\n'
    )
    command = ("paceline", "lab", "run", "mine.toml", "--out", "out")
    lab = processes.start(*command, within_s=LONG_S)
    standing = gate.arrival()
    lab.signal(signal.SIGINT)
    lab.ends_with(EXIT_INTERRUPTED)
    standing.release()
    assert "The same command goes on" in lab.text
    done = processes.start(*command, within_s=LONG_S).ends_with(EXIT_TRAINING)
    assert "Measured already, and skipped: 1 of 3 runs." in done.text
    assert "failed: 1 of 1 runs: worker:0 failed with exit code 1 (ValueError: it burns)" in done.text
    assert 'if part == "3": raise ValueError' in done.text, "the traceback's last lines"
    assert (tmp_path / "ran.txt").read_text() == "1223"
    (folder,) = (tmp_path / "out").iterdir()
    assert {"results.jsonl", "results.csv"} <= {path.name for path in folder.iterdir()}
    assert json.loads((folder / "results.jsonl").read_text().splitlines()[-1])["kind"] == "end"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_example_runs(processes: Processes, tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "lab.toml"
    asked = ("--quick", "--reps", "1", "--set", "workers=1", "--set", "mode=async", "--out", tmp_path / "out")
    done = processes.start("paceline", "lab", "run", example, *asked, within_s=LONG_S).ends_with(EXIT_OK)
    assert "A/A: 1 ps + 1 worker, async" in done.text and "failed" not in done.text
    (path,) = (tmp_path / "out").glob("spirals-*/results.csv")
    beside, again = sorted(
        (row for row in csv.DictReader(path.read_text().splitlines()) if row["kind"] == "cell"),
        key=lambda row: row["title"].startswith("A/A"),
    )
    assert float(beside["first_epoch_s"]) > 0 and float(beside["epoch_s"]) > 0 and again["mode"] == "async"
