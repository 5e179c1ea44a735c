"""The launcher is killed or interrupted: no process survives it."""

import json
import signal
from pathlib import Path

import pytest
from processes import Gate, Process, Processes

pytestmark = pytest.mark.timeout(180)


def started(processes: Processes, gate: Gate, train: Path) -> Process:
    """A run whose two workers stand at the gate."""
    gates = [f"--gate={i}:5:{gate.path}" for i in (0, 1)]
    launcher = processes.paceline("run", "--run-dir=made", train, *gates)
    gate.arrivals(2)
    return launcher


def test_kill_9_of_the_launcher_leaves_no_process(processes: Processes, gate: Gate, train: Path) -> None:
    launcher = started(processes, gate, train)
    assert len(processes.alive()) == 5, "the launcher, the nursery, a ps and two workers"
    launcher.popen.kill()
    launcher.ends_with(-9)
    assert not processes.survivors()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ctrl_c_ends_everything_with_130_and_sums_up(
    number: signal.Signals, processes: Processes, gate: Gate, train: Path, tmp_path: Path
) -> None:
    launcher = started(processes, gate, train)
    launcher.signal(number)
    launcher.ends_with(130)
    assert "Interrupted: ending all tasks." in launcher.lines and "Traceback" not in launcher.text
    summary = json.loads((tmp_path / "made" / "summary.json").read_text())
    assert summary["ok"] is False and summary["error"] == "interrupted"
    assert not processes.survivors()
