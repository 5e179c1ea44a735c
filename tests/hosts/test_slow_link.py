"""`paceline lab run slow-link`: one of three workers behind 10 Mbit/s, and those who do not wait for it."""

import json
from pathlib import Path

import pytest
from processes import Processes

from paceline.lab.measuring.hosts import lacking

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]


def test_two_of_three_do_not_wait_for_the_cable(processes: Processes, tmp_path: Path) -> None:
    if why := lacking():
        pytest.skip(f"NOT TESTED: {why}")
    processes.leave_unverified("the lab measures, and writes no ledger")
    lab = ("lab", "run", "slow-link", "--quick", "--only", "sync, 2 of 3", "--out", tmp_path)
    processes.start("paceline", *lab, within_s=250.0).ends_with(0)
    (results,) = tmp_path.glob("slow-link-*/results.jsonl")
    told = [json.loads(line) for line in results.read_text().splitlines()]
    free, slow = (each["line"] for each in told if each["kind"] == "cell")
    assert (free["cable"], slow["cable"]) == ("free", "10mbit") and {free["lane"], slow["lane"]} == {"tcp"}
    assert float(slow["of worker:2"]) < 1000 < float(slow["samples/s"])  # 10 Mbit/s are two steps of 100 a second
    assert float(slow["MB"]) < 25, "twice 10 Mbit/s for some seconds"
