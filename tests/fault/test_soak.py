"""Three minutes of `paceline lab run soak`: two rounds of every kind of fault, and what a run leaves behind."""

import json
from pathlib import Path

import pytest
from processes import Processes

from paceline.lab.matrices import soak


@pytest.mark.nightly("faults that do harm only one after the other; memory, descriptors and files that grow")
@pytest.mark.timeout(600)
def test_a_round_of_faults(processes: Processes, tmp_path: Path) -> None:
    asked = ("--minutes", "3", "--out", "lab")
    lab = processes.start("paceline", "lab", "run", "soak", *asked, within_s=500.0).ends_with(0)
    [results] = (tmp_path / "lab").glob("*/results.jsonl")
    [done] = [each for each in map(json.loads, results.read_text().splitlines()) if each["kind"] == "soak"]
    assert done["missed"] == [] and sum(done["fired"].values()) >= 2 * len(soak.CYCLE), lab.text
    assert done["fired"]["kill ps"] >= 2 and done["restarts"] >= 4
    assert done["is_verified"] and done["verified"].startswith("0 violations in ")
    assert done["lost"] == [] and done["leaked"] == []
