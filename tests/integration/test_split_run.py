"""WHERE did the steps of a worker go? One loads slowly, one computes slowly, and sync makes the first one wait.

Parts are compared with each other, of one worker or of both: a busy machine makes all of them longer.
"""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from process_fixtures import PROGRAMS
from processes import Processes
from torch import nn

import paceline
from paceline.cluster.spec import Task
from paceline.lab.cells import Worker
from paceline.telemetry.read import records
from paceline.telemetry.records import SplitMs

pytestmark = pytest.mark.timeout(120)

BATCH = 4


def split_of(worker: Worker) -> SplitMs:
    assert worker.split_ms is not None
    return worker.split_ms


@pytest.mark.parametrize("lane", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_loading_computing_and_waiting_are_told_apart(lane: str, processes: Processes, tmp_path: Path) -> None:
    flags = ["--workers=2", "--mode=sync", f"--lane={lane}", "--run-dir=made"]
    processes.paceline("run", *flags, PROGRAMS / "split.py").ends_with(0)
    summary = json.loads((tmp_path / "made" / "summary.json").read_text())
    workers = msgspec.convert(summary["workers"], list[Worker])
    loads, computes = (split_of(worker) for worker in workers)
    assert loads.data is not None and computes.data is not None
    assert loads.data > computes.data
    assert computes.compute > loads.compute
    assert loads.wait > computes.wait, "it waits for the one that computes"
    assert computes.compute > max(computes.data, computes.exchange, computes.wait)
    for worker in workers:
        assert worker.samples_per_s is not None
        assert split_of(worker).step == pytest.approx(1e3 * BATCH / worker.samples_per_s)
        assert min(split_of(worker).compute, split_of(worker).exchange, split_of(worker).wait) > 0
    *_, last = (each for each in records(tmp_path / "made", Task("worker", 0)) if each.kind == "tick")
    assert last.fields["split_ms"] == msgspec.to_builtins(loads)


def test_data_of_the_script_s_own_is_a_part_of_compute() -> None:
    def train(ctx: paceline.Context) -> None:
        model = nn.Linear(8, 1)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(5):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()

    (worker,) = msgspec.convert(paceline.launch(train, workers=1)["workers"], list[Worker])
    assert split_of(worker).data is None
    assert split_of(worker).compute > 0
