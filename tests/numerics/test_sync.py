"""I4: sync is bit for bit the single process on (g0 + g1 + …) / n, whatever the ps, placement, lane, arrival order.

The reference below is one plain PyTorch process with one model. It computes every worker's gradient at the same
weights, averages them in worker order with a true division, and lets torch's own optimizer step.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import LOCK, Job, Returned, assert_same, check, mean, run_cluster, weights
from torch import nn

STEPS = 6
WORKERS = PS = (1, 2, 3)
PLACEMENTS = ("bytes", "round_robin", "greedy")
LANES = ("inproc", "shm", "tcp")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **o: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, **o),
    "adam": lambda p, **o: torch.optim.Adam(p, lr=0.01, **o),
}
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {"default": {}, "fused": {"fused": True}}


def model_of(seed: int = 3) -> nn.Module:
    """Shapes whose sizes are no multiples of anything, so that SIMD tails and cut tensors show."""
    with LOCK:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(37, 29), nn.Tanh(), nn.Linear(29, 17), nn.Tanh(), nn.Linear(17, 3))


def batch(worker: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + worker)
    return torch.randn(5, 37, generator=generator) * 10 ** (-step % 3)


def gradients(model: nn.Module, worker: int, step: int) -> list[torch.Tensor | None]:
    model.zero_grad()
    model(batch(worker, step)).square().mean().backward()
    return [p.grad for p in model.parameters()]


def single_process(make: Callable[..., torch.optim.Optimizer], workers: int) -> dict[str, torch.Tensor]:
    model = model_of()
    optimizer = make(model.parameters())
    for step in range(STEPS):
        given = [gradients(model, worker, step) for worker in range(workers)]
        for parameter, *parts in zip(model.parameters(), *given, strict=True):
            parameter.grad = mean(parts)
        optimizer.step()
    return weights(model)


def worker_of(make: Callable[..., torch.optim.Optimizer]) -> Callable[[Job], Returned]:
    def recipe(job: Job) -> Returned:
        model = model_of(seed=3 if job.index == 0 else 99 + job.index)  # the chief's values count
        optimizer = make(model.parameters())
        model, optimizer = job.prepare(model, optimizer)
        for step in range(STEPS):
            gradients(model, job.index, step)
            optimizer.step()
        return weights(model)

    return recipe


def holds(make: Callable[..., torch.optim.Optimizer], workers: int, mode: str = "sync", **options: Any) -> None:
    want = single_process(make, workers)
    got, summary = run_cluster(worker_of(make), workers, mode=mode, save_every="none", **options)
    for index, each in enumerate(got):
        assert_same(want, each, f"worker {index}")
    assert summary["global_step"] == STEPS
    assert [row["steps"] for row in summary["workers"]] == [STEPS] * workers


Case = tuple[int, int, str, str, str, str]
EVERYTHING: list[Case] = list(product(WORKERS, PS, PLACEMENTS, LANES, OPTIMIZERS, IMPLEMENTATIONS))


def representatives() -> list[Case]:
    """Every pair of two choices appears in some case of this list; built greedily, so it is short."""
    open_pairs = {pair for case in EVERYTHING for pair in pairs(case)}
    chosen: list[Case] = []
    while open_pairs:
        best = max(EVERYTHING, key=lambda case: len(pairs(case) & open_pairs))
        chosen.append(best)
        open_pairs -= pairs(best)
    return chosen


def pairs(case: Case) -> set[tuple[int, object, int, object]]:
    return {(i, case[i], j, case[j]) for i in range(len(case)) for j in range(i)}


FEW = [
    *representatives(),
    *[(3, 3, "bytes", lane, o, i) for lane in LANES for o in OPTIMIZERS for i in IMPLEMENTATIONS],
]


@pytest.mark.parametrize(("workers", "ps", "placement", "lane", "optimizer", "implementation"), sorted(set(FEW)))
def test_i4_sync_is_the_single_process(
    workers: int, ps: int, placement: str, lane: str, optimizer: str, implementation: str
) -> None:
    make = OPTIMIZERS[optimizer]
    chosen = IMPLEMENTATIONS[implementation]
    holds(lambda p: make(p, **chosen), workers, ps=ps, placement=placement, lane=lane)


@pytest.mark.nightly("bits that differ where three or more of these choices meet; pairs are in make test")
@pytest.mark.parametrize(
    ("workers", "ps", "placement", "lane", "optimizer", "implementation"), sorted(set(EVERYTHING) - set(FEW))
)
def test_i4_sync_is_the_single_process_everywhere(
    workers: int, ps: int, placement: str, lane: str, optimizer: str, implementation: str
) -> None:
    make = OPTIMIZERS[optimizer]
    chosen = IMPLEMENTATIONS[implementation]
    holds(lambda p: make(p, **chosen), workers, ps=ps, placement=placement, lane=lane)


def test_the_few_cases_cover_every_pair_of_choices() -> None:
    covered = {pair for case in FEW for pair in pairs(case)}
    assert covered == {pair for case in EVERYTHING for pair in pairs(case)}
    assert len(set(FEW)) < 35


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("ps", PS)
def test_async_with_one_worker_is_the_single_process(ps: int, lane: str) -> None:
    for implementation in IMPLEMENTATIONS.values():
        holds(lambda p, o=implementation: OPTIMIZERS["adam"](p, **o), 1, mode="async", ps=ps, lane=lane)


T = torch.optim
ODD: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD nesterov": lambda p: T.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "SGD dampening": lambda p: T.SGD(p, lr=0.05, momentum=0.9, dampening=0.3, maximize=True),
    "SGD foreach": lambda p: T.SGD(p, lr=0.05, momentum=0.9, dampening=0.3, foreach=True),
    "SGD fused": lambda p: T.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2, fused=True),
    "SGD fused maximize": lambda p: T.SGD(p, lr=0.05, momentum=0.9, dampening=0.3, maximize=True, fused=True),
    "Adam amsgrad": lambda p: T.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6),
    "Adam foreach": lambda p: T.Adam(p, lr=0.01, amsgrad=True, maximize=True, foreach=True),
    "Adam fused": lambda p: T.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1, fused=True),
    "AdamW maximize": lambda p: T.AdamW(p, lr=0.01, weight_decay=0.3, maximize=True, amsgrad=True),
    "AdamW foreach": lambda p: T.AdamW(p, lr=0.01, weight_decay=0.3, foreach=True),
    "AdamW fused": lambda p: T.AdamW(p, lr=0.01, weight_decay=0.3, maximize=True, fused=True),
    "Adagrad": lambda p: T.Adagrad(p, lr=0.02, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.2),
    "Adagrad foreach": lambda p: T.Adagrad(p, lr=0.02, lr_decay=0.1, maximize=True, foreach=True),
    "Adagrad fused": lambda p: T.Adagrad(p, lr=0.02, lr_decay=0.1, weight_decay=0.01, fused=True),
    "Adadelta": lambda p: T.Adadelta(p, lr=0.5, rho=0.8, weight_decay=0.01, maximize=True),
    "Adadelta foreach": lambda p: T.Adadelta(p, lr=0.5, rho=0.8, foreach=True),
    "Adamax": lambda p: T.Adamax(p, lr=0.01, weight_decay=0.1, maximize=True),
    "Adamax foreach": lambda p: T.Adamax(p, lr=0.01, weight_decay=0.1, foreach=True),
    "NAdam": lambda p: T.NAdam(p, lr=0.01, momentum_decay=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "NAdam foreach": lambda p: T.NAdam(p, lr=0.01, weight_decay=0.1, maximize=True, foreach=True),
    "RAdam": lambda p: T.RAdam(p, lr=0.01, betas=(0.5, 0.6), weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam foreach": lambda p: T.RAdam(p, lr=0.01, betas=(0.5, 0.6), maximize=True, foreach=True),
    "RMSprop centered": lambda p: T.RMSprop(p, lr=0.01, centered=True, momentum=0.7, weight_decay=0.1),
    "RMSprop foreach": lambda p: T.RMSprop(p, lr=0.01, centered=True, momentum=0.7, maximize=True, foreach=True),
    "Rprop": lambda p: T.Rprop(p, lr=0.01, etas=(0.4, 1.3), step_sizes=(1e-5, 3.0), maximize=True),
    "Rprop foreach": lambda p: T.Rprop(p, lr=0.01, foreach=True),
}


def test_every_supported_optimizer_is_tried() -> None:
    from paceline.frameworks.torch.layout import SUPPORTED

    assert {name.split()[0] for name in ODD} == {cls.__name__ for cls in SUPPORTED}


@pytest.mark.parametrize("name", ODD)
def test_every_optimizer_with_odd_options(name: str) -> None:
    """2 ps share the bytes evenly, so a tensor is cut in two."""
    holds(ODD[name], 2, ps=2, placement="bytes", lane="inproc")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_tensor_of_several_blocks(implementation: str, tmp_path: Path) -> None:
    """300,000 elements are more than one block of 2^18, on one ps as on two."""

    def recipe(job: Job) -> Returned:
        model = job.make(lambda: nn.Linear(1000, 300))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **IMPLEMENTATIONS[implementation])
        model, optimizer = job.prepare(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(job.randn(2, 1000)).square().mean().backward()
            optimizer.step()
        return {"model": weights(model), "optimizer": optimizer.state_dict()}

    check(recipe, tmp_path / "one", workers=2, mode="sync", ps=1)
    check(recipe, tmp_path / "two", workers=2, mode="sync", ps=2, lane="tcp")
