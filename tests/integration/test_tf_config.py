"""TF_CONFIG gives the same as flags: with a chief, and with an evaluator outside the cluster."""

import json
import sys
from pathlib import Path

import pytest
from processes import Gate, Process, Processes

from paceline.launchers.ports import Reserved

pytestmark = pytest.mark.timeout(180)


class Tasks:
    """Starts the tasks of one cluster, each told by TF_CONFIG who it is."""

    def __init__(self, processes: Processes, cluster: dict[str, list[str]]) -> None:
        self._processes = processes
        self._cluster = cluster

    def start(self, job: str, index: int, *command: object) -> Process:
        told = {"cluster": self._cluster, "task": {"type": job, "index": index}, "environment": "cloud"}
        return self._processes.start(*command, name=f"{job}:{index}", TF_CONFIG=json.dumps(told))


@pytest.mark.slow
def test_chief_worker_ps_and_an_evaluator_outside(
    processes: Processes, ports: Reserved, gate: Gate, train: Path, tmp_path: Path
) -> None:
    processes.leave_unverified("the chief is a plain Python process, which writes no ledger")
    addresses = ports.addresses(3)
    cluster = {"chief": addresses[:1], "worker": addresses[1:2], "ps": addresses[2:]}
    tasks = Tasks(processes, cluster)
    serve = ("paceline", "serve", "--run_dir", tmp_path / "run")
    worker = tasks.start("worker", 0, *serve, train)
    chief = tasks.start("chief", 0, sys.executable, train, "--run_dir", tmp_path / "run", "--gate", f"0:5:{gate.path}")
    ps = tasks.start("ps", 0, *serve)
    arrival = gate.arrival()
    evaluator = tasks.start("evaluator", 0, sys.executable, train, "--kv")
    evaluator.ends_with(0)
    assert "kv says (32, 8)" in evaluator.lines, "an evaluator reads the ps, and joins nothing"
    arrival.release()
    for task in (chief, worker, ps):
        task.ends_with(0)
    assert "Found by: TF_CONFIG" in chief.lines and "Found by: TF_CONFIG" in worker.lines
    assert f"Cluster: job chief -> {{0 -> {addresses[0]}}}" in ps.lines
    assert any(line.startswith("Worker 0 of 2: mode async") for line in chief.lines)
    assert any(line.startswith("Worker 1 of 2: mode async") for line in worker.lines)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [row["task"] for row in summary["workers"]] == ["chief:0", "worker:0"]
    assert summary["ok"] and summary["global_step"] == 80
    assert (tmp_path / "run" / "checkpoints" / "step-00000080" / "MANIFEST.json").is_file()
