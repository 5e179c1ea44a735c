"""DO ops work under `paceline run`? One client, workers that only join, and a run that ends when the client is done."""

import re
from pathlib import Path

import pytest
from process_fixtures import PROGRAMS
from processes import Processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
PROGRAM = PROGRAMS / "serves_ops.py"


def test_workers_that_only_join_end_with_their_client(processes: Processes, tmp_path: Path) -> None:
    run = processes.paceline("run", "--ps=1", "--workers=3", "--run-dir=r", PROGRAM).ends_with(0)
    logs = [(tmp_path / "r" / "logs" / f"worker-{index}.log").read_text() for index in range(3)]
    said = re.findall(r"^worker:(\d) says (\[.*\]), (\w+) process$", logs[0], re.M)
    assert said == [
        ("0", "[0.0, 1.0, 4.0, 9.0]", "this"),
        ("1", "[1.0, 4.0, 9.0, 16.0]", "another"),
        ("2", "[4.0, 9.0, 16.0, 25.0]", "another"),
    ]
    assert "worker:1 was let go" in logs[1] and "worker:2 was let go" in logs[2]
    assert "Training failed" not in run.text and "did not end properly" not in run.text


def test_a_client_that_ends_before_the_others_have_started(processes: Processes, tmp_path: Path) -> None:
    script = tmp_path / "quick.py"
    script.write_text(
        "import os, pathlib, threading\n"
        "import paceline\n"
        "from paceline.cluster.discovery import discover\n"
        "task, done = discover().task, pathlib.Path('r/telemetry/worker-0.jsonl')\n"
        "while task.index and not (done.exists() and '\"over\"' in done.read_text()):\n"
        "    threading.Event().wait(0.05)\n"
        "server = paceline.Server()\n"
        "if task.index:\n"
        "    server.join()\n"
    )
    processes.paceline("run", "--ps=1", "--workers=2", "--run-dir=r", script).ends_with(0)
    assert "Started server with target" in (tmp_path / "r" / "logs" / "worker-1.log").read_text()


def test_a_client_that_fails_for_good_does_not_leave_the_others_joined(processes: Processes, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import paceline\n"
        "server = paceline.Server()\n"
        "if server.task.index:\n"
        "    server.join()\n"
        "else:\n"
        "    raise SystemExit(5)\n"
    )
    run = processes.paceline("run", "--ps=1", "--workers=2", "--max-restarts=0", "--run-dir=r", script)
    assert run.end() == 1
    assert "worker:0 failed with exit code 5" in run.text


def test_a_launched_ps_runs_no_ops(processes: Processes, tmp_path: Path) -> None:
    script = tmp_path / "asks_ps.py"
    script.write_text(
        "import paceline\n"
        "@paceline.op\ndef f(): return 1\n"
        "server = paceline.Server()\n"
        'with paceline.device("/job:ps/task:0"):\n    f()\n'
    )
    run = processes.paceline("run", "--ps=1", "--workers=1", "--max-restarts=0", "--run-dir=r", script)
    assert run.end() != 0
    assert "ps:0 holds parameters and runs no ops; name one of: worker:0" in run.text
