"""Trap 12: a ps is killed in the middle of an update. Half-done blocks are undone by its successor: equal bits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "killed_ps.py"
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory that outlives a process is handed over by Linux")

MODES = ("async", "sync", "1 of 2", "4 of 2", "bounded")
NIGHTLY = pytest.mark.nightly("a block that is not undone once in hundreds of kills; tens of them are in make test")


def killed(optimizer: str, mode: str, pushes: int, numbers: int) -> dict[str, float]:
    command = [sys.executable, str(PROGRAM), optimizer, mode, str(pushes), "7", str(numbers)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    told: dict[str, float] = json.loads(ran.stdout)
    return told


@linux
def test_a_killed_ps_goes_on_where_it_was() -> None:
    told = killed("SGD", "async", 40, 600_000)
    assert told["same"] and told["kills"] >= 10 and told["inside"] >= 3, told


@linux
@NIGHTLY
@pytest.mark.timeout(250)
@pytest.mark.parametrize("mode", MODES)
def test_hundreds_of_kills(mode: str) -> None:
    told = killed("Adam", mode, 300, 600_000)
    assert told["same"] and told["kills"] >= 150 and told["inside"] >= 40, told
