"""`paceline lab run slow-link`: one of three workers behind 10 Mbit/s, and all that helps against it."""

import json
from pathlib import Path

import pytest
from processes import Processes

from paceline.lab.matrices.slow_link import FREE, RATE, WAYS
from paceline.lab.measuring.hosts import lacking

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]


@pytest.mark.nightly("a way to send less, or to wait less, that is no faster over a slow link")
def test_who_does_not_wait_for_the_cable_is_faster_and_then_who_sends_less(
    processes: Processes, tmp_path: Path
) -> None:
    """Every way once, for five seconds. The far worker crosses the cable in all of them, and no faster than it is."""
    if why := lacking():
        pytest.skip(f"NOT TESTED: {why}")
    processes.leave_unverified("the lab measures, and writes no ledger")
    processes.start("paceline", "lab", "run", "slow-link", "--quick", "--out", tmp_path, within_s=250.0).ends_with(0)
    (results,) = tmp_path.glob("slow-link-*/results.jsonl")
    told = [json.loads(line) for line in results.read_text().splitlines()]
    lines = [each["line"] for each in told if each["kind"] == "cell"]
    assert [(each["cable"], each["mode"]) for each in lines] == [(way.rate or FREE, way.title) for way in WAYS]
    assert {each["lane"] for each in lines} == {"tcp"}
    slow = {each["mode"]: each for each in lines if each["cable"] == RATE}
    samples_per_s = {mode: float(each["samples/s"]) for mode, each in slow.items()}
    order = ["sync, 2 of 3", "local, 50 steps", "sync, bfloat16 on the wire", "sync"]
    assert sorted(order, key=lambda mode: -samples_per_s[mode]) == order, samples_per_s
    assert samples_per_s["async"] > samples_per_s["local, 50 steps"], "nobody waits there either"
    for mode, each in slow.items():
        assert float(each["MB"]) < 25, f"{mode}: twice 10 Mbit/s for some seconds"
    for mode in ("sync, 2 of 3", "async"):
        assert float(slow[mode]["of worker:2"]) < 1000 < samples_per_s[mode]  # two steps of 100 a second
