"""Trap 10: a JSON record a step would be gigabytes an hour. Telemetry is a record a second and one per event."""

import json
import threading
from pathlib import Path

import torch
from torch import nn

import paceline

STEPS = 400
LOCK = threading.Lock()


def test_telemetry_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    per_step: list[str] = []  # the wrong way

    def work(ctx: paceline.Context) -> None:
        with LOCK:
            model = nn.Linear(4, 2)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 4)).sum()
            loss.backward()
            optimizer.step()
            ctx.log({"loss": loss.item()})
            if ctx.is_chief:
                per_step.append(json.dumps({"kind": "step", "step": step, "loss": loss.item()}))

    summary = paceline.launch(work, ps=1, workers=2, run_dir=str(tmp_path))
    assert len(per_step) == STEPS
    for file in sorted((tmp_path / "telemetry").glob("*.jsonl")):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(records) < 10 + 2 * summary["wall_s"], file.name
        assert file.stat().st_size < sum(len(line) for line in per_step) / 2, file.name
        assert {"start", "report"} <= {r["kind"] for r in records}
    assert summary["workers"][0]["steps"] == STEPS, "and yet every step was counted"
