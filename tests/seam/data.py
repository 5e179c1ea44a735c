"""Cases of data: loaders and samplers that one worker iterates as plain PyTorch does, and shares of several."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from alike import Job, Returned, weights
from table import NotCompared, case, small
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

TOPIC = "Data"
SHARED = "Several workers share the set out: each takes every n-th batch of one permutation."


def numbers() -> TensorDataset:
    return TensorDataset(torch.randn(26, 7, generator=torch.Generator().manual_seed(2)), torch.arange(26))


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return iter(numbers())


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + i % 3 for i in range(26)], 20)


LOADERS: dict[str, dict[str, Any]] = {
    "a loader that shuffles": {"shuffle": True, "batch_size": 5},
    "a loader that drops the last batch": {"shuffle": True, "batch_size": 5, "drop_last": True},
    "a loader with worker processes": {"shuffle": True, "batch_size": 5, "num_workers": 2},
    "a loader with persistent worker processes": {
        "shuffle": True, "batch_size": 5, "num_workers": 1, "persistent_workers": True,
    },
    "a loader with a generator of its own": {"batch_size": 5, "shuffle": True, "generator": True},
    "a sampler with replacement": {"batch_size": 5, "sampler": lambda: RandomSampler(range(26), True, 20)},
    "a weighted sampler": {"batch_size": 5, "sampler": weighted},
    "batches that the script samples itself": {"batch_sampler": lambda: [[0, 3, 5], [1, 2], [25, 24, 7, 8]]},
    "an iterable dataset": {"batch_size": 5, "dataset": Stream},
    "samples without batches (batch_size=None)": {"batch_size": None, "shuffle": True},
}  # fmt: skip


def loaded(job: Job, options: dict[str, Any]) -> Returned:
    """Two epochs over a prepared loader."""
    given = {name: value() if callable(value) else value for name, value in options.items()}
    if given.get("generator"):
        given["generator"] = torch.Generator().manual_seed(9)
    loader = DataLoader(given.pop("dataset", None) or numbers(), **given)
    model = job.make(small)
    model, optimizer, loader = job.prepare(model, SGD(model.parameters(), lr=0.1), loader)
    torch.manual_seed(6)
    seen = []
    for _ in range(2):
        for x, index in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            seen.append(index.clone())
    return {"model": weights(model), "seen": seen, "drawn": torch.randn(2)}


for _name, _options in LOADERS.items():
    case(TOPIC, _name, two=NotCompared(), note=SHARED)(partial(loaded, options=_options))


@case(TOPIC, "a loader in the order of the set, each worker with the whole of it (--data full)", data="full")
def full(job: Job) -> Returned:
    loader = DataLoader(numbers(), batch_size=5)
    model = job.make(small)
    model, optimizer, loader = job.prepare(model, SGD(model.parameters(), lr=0.1), loader)
    seen = []
    for x, index in loader:
        optimizer.zero_grad()
        model(x * (job.index + 1)).square().mean().backward()
        optimizer.step()
        seen.append(index.clone())
    return {"model": weights(model), "seen": seen}
