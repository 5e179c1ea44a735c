"""Lanes forced with --lane, over two ps with each placement; the default is in test_run.

The quick suite has tcp in tests/fault/test_worker_killed.
"""

import json
import re
from pathlib import Path

import pytest
from processes import Processes

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

TABLES = {
    "round_robin": {"0.weight": "0", "0.bias": "1", "2.weight": "0", "2.bias": "1"},
    "greedy": {"0.weight": "0", "0.bias": "1", "2.weight": "1", "2.bias": "1"},
}


@pytest.mark.parametrize(
    ("lane", "placement", "mode"),
    [
        ("tcp", "round_robin", "async"),
        ("shm", "greedy", "sync"),
        ("tcp", "greedy", "sync"),
        ("shm", "round_robin", "async"),
        ("grpc", "greedy", "sync"),
    ],
)
def test_a_forced_lane_is_taken_and_named(
    lane: str,
    placement: str,
    mode: str,
    processes: Processes,
    train: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if lane == "grpc":
        request.getfixturevalue("grpc")
    flags = ["--ps=2", "--workers=1", f"--lane={lane}", f"--placement={placement}", f"--mode={mode}"]
    processes.paceline("run", *flags, "--log_device_placement", "--run-dir=made", train).ends_with(0)
    log = (tmp_path / "made" / "logs" / "worker-0.log").read_text()
    assert f"Worker 0 of 1: mode {mode}, lane {lane}, batch 4 a worker, 4 together" in log.splitlines()
    rows = re.findall(r"^(\S+): \(Variable .*\): /job:ps/replica:0/task:(\d)/device:CPU:0$", log, re.M)
    assert dict(rows) == TABLES[placement]
    summary = json.loads((tmp_path / "made" / "summary.json").read_text())
    assert summary["ok"] and [row["updates"] for row in summary["ps"]] == [40, 40]
    payload = 40 * 4 * (32 * 8 + 32 + 2 * 32 + 2)
    carried = sum(row["bytes_in"] for row in summary["ps"])
    assert (carried > payload) == (lane != "shm"), "on shm the gradients do not go through the socket"
