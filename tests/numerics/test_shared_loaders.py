"""Which samples do two workers see, whose loader is of a class of the script's own, or shares the set out itself?"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from alike import Job
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import paceline
from paceline.errors import PacelineError

SET = TensorDataset(torch.arange(42.0)[:, None])
Make = Callable[[Any], DataLoader[Any]]


class Negated(DataLoader[Any]):
    """Changes what it gives, as loaders do that move batches to a card or normalise them."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for (x,) in super().__iter__():
            yield (-x,)


class Ahead(DataLoader[Any]):
    """Makes its iterator once, in __init__, to keep its processes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kept = super().__iter__()


def seen_by(make: Make, workers: int = 2, **options: Any) -> list[list[float]]:
    seen: list[list[float]] = [[] for _ in range(workers)]

    def work(ctx: Any) -> None:
        model = Job.make(lambda: nn.Linear(1, 1))
        model, optimizer, loader = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6), make(ctx))
        for _ in ctx.epochs(1):
            for (x,) in loader:
                seen[ctx.worker_index] += x[:, 0].tolist()
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    paceline.launch(work, workers=workers, **options)
    return seen


def own_share(ctx: Any, ranks: int | None = None, rank: int | None = None) -> "DistributedSampler[Any]":
    return DistributedSampler(
        SET, ranks or ctx.num_workers, ctx.worker_index if rank is None else rank, shuffle=True, seed=4
    )


def test_a_loader_of_ones_own_class_keeps_what_it_does() -> None:
    first, second = seen_by(lambda ctx: Negated(SET, batch_size=6, shuffle=True))
    assert sorted(set(first + second)) == [float(-x) for x in reversed(range(42))]
    assert len(first) == len(second) == 24, "seven batches, the last round filled"
    (alone,) = seen_by(lambda ctx: Negated(SET, batch_size=6), workers=1)
    assert alone == [float(-x) for x in range(42)]


def test_a_loader_that_has_made_its_iterator_is_refused() -> None:
    with pytest.raises(PacelineError, match=r"Ahead has made its iterator before prepare\(\) \(\.kept\)"):
        seen_by(lambda ctx: Ahead(SET, batch_size=6))


@pytest.mark.parametrize("is_batched", [False, True])
def test_a_distributed_sampler_is_not_shared_out_again(is_batched: bool) -> None:
    def make(ctx: Any) -> DataLoader[Any]:
        sampler = own_share(ctx)
        if is_batched:
            return DataLoader(SET, batch_sampler=BatchSampler(sampler, 3, drop_last=False))
        return DataLoader(SET, batch_size=3, sampler=sampler)

    first, second = seen_by(make)
    assert sorted(first + second) == [float(x) for x in range(42)]


@pytest.mark.parametrize(
    "make",
    [
        lambda ctx: DataLoader(SET, batch_size=3, sampler=own_share(ctx, 4)),
        lambda ctx: DataLoader(SET, batch_size=3, sampler=own_share(ctx, 2, 0)),
    ],
    ids=["another number", "the same share for all"],
)
def test_another_share_than_the_workers_is_refused(make: Make) -> None:
    with pytest.raises(PacelineError, match=r"DistributedSampler\(num_replicas=\d, rank=\d\) shares the set out"):
        seen_by(make)
    assert len(seen_by(make, data="full")[0]) in (11, 21), "asked for"
