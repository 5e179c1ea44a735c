"""The soak of `paceline lab run soak`, three minutes of faults: the version that a long test run can bear."""

import json
from pathlib import Path

import pytest
from processes import Processes


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_minutes_of_faults(processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("processes.DEADLINE_S", 800.0)
    lab = processes.paceline("lab", "run", "soak", "--minutes", "3", "--out", "lab").ends_with(0)
    [results] = (tmp_path / "lab").glob("results-*.jsonl")
    [done] = [each for each in map(json.loads, results.read_text().splitlines()) if each["kind"] == "soak"]
    assert done["missed"] == [] and sum(done["fired"].values()) == 18, lab.text
    assert done["fired"]["kill ps"] >= 2 and done["restarts"] >= 4
    assert done["is_verified"] and done["verified"].startswith("0 violations in ")
    assert done["lost"] == [] and done["leaked"] == []
