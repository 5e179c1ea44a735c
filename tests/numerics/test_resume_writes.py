"""What a script loads between prepare() and its loop counts in a new run, and is dropped in one that goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from alike import Job, assert_same, weights
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import PacelineError

STEPS = 12


class Stopped(Exception):
    """The script ends here, in the middle."""


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5), nn.Linear(5, 2))


def run(folder: Path, workers: int, stop_at: int | None = None, **options: Any) -> dict[int, Any]:
    """What each worker ends with; the script loads weights after prepare(), as it does for fine-tuning."""
    seen: dict[int, Any] = {}
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))

    def work(ctx: Any) -> None:
        torch.set_num_threads(1)
        model = Job.make(net)
        model[2].requires_grad_(False)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
        loader = DataLoader(TensorDataset(inputs), batch_size=4)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader)
        model.load_state_dict({k: torch.linspace(0.1, 0.9, v.numel()).view_as(v) for k, v in weights(model).items()})
        with torch.no_grad():
            model[2].weight.add_(0.25 if ctx.global_step == 0 else 0.5)
        for _ in ctx.epochs(STEPS * workers // 4):
            for (x,) in loader:
                optimizer.zero_grad()
                mse_loss(model(x), x[:, :2]).backward()
                optimizer.step()
                if ctx.global_step == stop_at:
                    ctx.save()
                    raise Stopped
        seen[ctx.worker_index] = weights(model)

    paceline.launch(work, workers=workers, mode="sync", run_dir=str(folder), **options)
    return seen


@pytest.mark.parametrize(("workers", "ps", "lane"), [(1, 1, "shm"), (1, 2, "tcp"), (2, 2, "shm")])
def test_buffers_and_frozen_layers_go_on_too(workers: int, ps: int, lane: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", workers, ps=ps, lane=lane)
    with pytest.raises(PacelineError):
        run(tmp_path / "parts", workers, stop_at=7, ps=ps, lane=lane)
    again = run(tmp_path / "parts", workers, ps=ps, lane=lane, resume="auto")
    assert_same(whole, again, "resumed")
