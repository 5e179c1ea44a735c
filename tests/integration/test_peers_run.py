"""IS another system measured in a group of its own? A tiny run of `lab run peers`, from the command to the files."""

import json
import re
import sys
from pathlib import Path

import pytest
from processes import Processes

from paceline.lab.matrices import peers
from paceline.lab.measuring import starting

NIGHTLY = pytest.mark.nightly("a peer whose steps cannot be measured beside ours any more")


@NIGHTLY
@pytest.mark.parametrize("text", ["torch RPC, 1 ps + 1", "first step"])
@pytest.mark.timeout(450)
def test_a_tiny_run_of_a_group_of_its_own(text: str, processes: Processes, tmp_path: Path) -> None:
    asked = ("--reps", "1", "--steps", "5", "--only", text, "--out", tmp_path / "out")
    done = processes.start("paceline", "lab", "run", "peers", *asked, within_s=400.0).ends_with(0)
    assert "part 2 of 2" in done.text and "failed" not in done.text and "did not end" not in done.text
    row = re.search(rf"^{re.escape(text)}.*|.*{re.escape(text)}  +\d.*", done.text, re.M)
    assert row is not None and "The bars" in done.text and "Between the systems" in done.text
    (path,) = (tmp_path / "out").rglob("results*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len([line for line in lines if line["kind"] == "row"]) == 2
    assert len([line for line in lines if line["kind"] == "verdicts"]) == 2


@pytest.mark.nightly("another system that cannot be measured beside ours any more")
@pytest.mark.timeout(450)
def test_workers_of_tensorflow_in_sync_end_every_order_together(processes: Processes, tmp_path: Path) -> None:
    """A worker that counted its calls, not the updates, would leave the other one waiting for it."""
    if starting.peers_python() == sys.executable:
        pytest.importorskip("tensorflow")
    asked = ("--reps", "2", "--steps", "400", "--only", "TensorFlow's runtime, 1 ps + 2 workers, sync")
    command = ("paceline", "lab", "run", "peers", *asked, "--out", tmp_path / "out")
    done = processes.start(*command, within_s=400.0).ends_with(0)
    assert "failed" not in done.text and "missing" not in done.text and "did not end" not in done.text
    (path,) = (tmp_path / "out").rglob("results*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    times = [line["us"] for line in lines if line["kind"] == "segment" and line["scenario"] == peers.TF_SYNC]
    assert [len(each) for each in times] == [2, 2]
    assert all(max(each) < 1.3 * min(each) for each in times), "both were there until the last update"
