"""The soak of `paceline lab run soak`, with every kind of fault once: the version that a long test run can bear."""

import json
from pathlib import Path

import pytest
from processes import Processes

from paceline.lab.matrices import soak


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_round_of_faults(processes: Processes, tmp_path: Path) -> None:
    asked = ("--minutes", f"{8 * 10 / 60:.2f}", "--out", "lab")
    lab = processes.start("paceline", "lab", "run", "soak", *asked, within_s=500.0).ends_with(0)
    [results] = (tmp_path / "lab").glob("*/results.jsonl")
    [done] = [each for each in map(json.loads, results.read_text().splitlines()) if each["kind"] == "soak"]
    assert done["missed"] == [] and sum(done["fired"].values()) == len(soak.CYCLE) == 8, lab.text
    assert done["fired"]["kill ps"] >= 2 and done["restarts"] >= 4
    assert done["is_verified"] and done["verified"].startswith("0 violations in ")
    assert done["lost"] == [] and done["leaked"] == []
