"""A launcher that is stopped (Ctrl+Z, a debugger) stops nobody: the tasks train on without it."""

import signal
from pathlib import Path

import pytest
from processes import Gate, Processes


@pytest.mark.slow
def test_training_goes_on_without_its_launcher(processes: Processes, gate: Gate, train: Path) -> None:
    stops = [f"--gate=1:{step}:{gate.path}" for step in (5, 900)]
    launcher = processes.paceline("run", "--workers=2", "--run-dir=made", train, "--batches=500", *stops)
    first = gate.arrival()
    launcher.signal(signal.SIGSTOP)
    try:
        first.release()
        gate.arrival().release()  # a second and more of training later: the ps has written its counts many times
    finally:
        launcher.signal(signal.SIGCONT)
    assert "Training done" in launcher.ends_with(0).text
