"""Lane grpc from the command line: it trains, also after a worker was killed, and tells what each pair carried."""

import json
from pathlib import Path

import pytest
from processes import Processes

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("grpc")]


def test_one_ps_and_two_workers_train_over_grpc(processes: Processes, train: Path, tmp_path: Path) -> None:
    flags = ["--workers=2", "--lane=grpc", "--chaos=kill=worker:1@5", "--run-dir=made"]
    processes.paceline("run", *flags, train).ends_with(0)
    summary = json.loads((tmp_path / "made" / "summary.json").read_text())
    assert summary["ok"] and summary["restarts"] == 1
    assert [(pair["worker"], pair["ps"], pair["lane"]) for pair in summary["pairs"]] == [
        ("worker:0", "ps:0", "grpc"),
        ("worker:1", "ps:0", "grpc"),
    ]
    assert all(pair["pushed_bytes"] > 0 and pair["tcp_sent_bytes"] is None for pair in summary["pairs"])
    assert [task["name"] for task in summary["tasks"]] == ["ps:0", "worker:0", "worker:1"]
    assert all(task["peak_memory_mb"] >= task["memory_mb"] > 1 for task in summary["tasks"])
    assert all(task["telemetry_ms_per_s"] is not None for task in summary["tasks"])
