"""A sampler of the script's own that holds a torch generator goes on where it was, whatever it calls it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from alike import Job, assert_same, weights
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset, WeightedRandomSampler

import paceline
from paceline.errors import PacelineError
from paceline.frameworks.torch.position import TorchOwn

SIZE = 24
SET = TensorDataset(torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(1)))


class Stopped(Exception):
    """The script ends here, in the middle."""


class Shuffled(Sampler[int]):
    def __init__(self, source: Any = None) -> None:
        self.source = source or torch.Generator().manual_seed(4)

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SIZE, generator=self.source).tolist())


def loader_of(kind: str) -> DataLoader[Any]:
    if kind == "own":
        return DataLoader(SET, batch_size=4, sampler=Shuffled())
    if kind == "batched":
        return DataLoader(SET, batch_sampler=BatchSampler(Shuffled(), 4, drop_last=False))
    weighted = WeightedRandomSampler(SIZE * [1.0], SIZE, generator=torch.Generator().manual_seed(5))
    return DataLoader(SET, batch_size=4, sampler=weighted)


def run(folder: Path, kind: str, workers: int, stop_at: int | None = None, **options: Any) -> dict[int, Any]:
    seen: dict[int, Any] = {}

    def work(ctx: Any) -> None:
        torch.set_num_threads(1)
        model = Job.make(lambda: nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = ctx.prepare(model, optimizer, loader_of(kind))
        for _ in ctx.epochs(3):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                if ctx.global_step == stop_at:
                    ctx.save()
                    raise Stopped
        seen[ctx.worker_index] = weights(model)

    paceline.launch(work, workers=workers, mode="sync", run_dir=str(folder), **options)
    return seen


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["own", "batched", "weighted"])
def test_its_generator_goes_on(kind: str, workers: int, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", kind, workers)
    with pytest.raises(PacelineError):
        run(tmp_path / "parts", kind, workers, stop_at=8)
    assert_same(whole, run(tmp_path / "parts", kind, workers, resume="auto"), "resumed")


def test_a_generator_that_does_not_go_on_is_told() -> None:
    told: list[str] = []
    own = TorchOwn(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), [], told.append)
    own.follow(DataLoader(SET, sampler=Shuffled(np.random.default_rng(4))))
    assert len(told) == 1 and "Shuffled.source is a random generator that checkpoints do not hold" in told[0]
