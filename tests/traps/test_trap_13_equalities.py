"""Trap 13: equalities that do not exist. Compare with one process that does the same arithmetic in the same order."""

import threading

import torch
from torch import nn

import paceline

LOCK = threading.Lock()
SIZES = (10, 20, 70)


def model_of() -> nn.Module:
    with LOCK:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(31, 17), nn.Tanh(), nn.Linear(17, 3))


def data() -> torch.Tensor:
    return torch.randn(sum(SIZES), 31, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_parts_of_a_batch_are_not_the_batch() -> None:
    """Weighted as they should be, 10 + 20 + 70 samples give nearly the gradient of 100. Nearly is not bit for bit."""
    model, x = model_of(), data()
    whole = gradients(model, x)
    parts = [gradients(model, part) for part in x.split(SIZES)]
    summed = [sum(g * (n / len(x)) for g, n in zip(each, SIZES, strict=True)) for each in zip(*parts, strict=True)]
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, summed, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(whole, summed, strict=True))


def test_halves_of_a_batch_are_not_the_batch_but_the_same_arithmetic_is_the_same() -> None:
    """Sync with two workers is not one process on the batch of both; it is one process on (g0 + g1) / 2."""
    x = data()
    halves = x.chunk(2)
    rate = 1.0

    def stepped(gradient: list[torch.Tensor]) -> list[torch.Tensor]:
        return [p.detach().add(g, alpha=-rate) for p, g in zip(model_of().parameters(), gradient, strict=True)]

    whole = stepped(gradients(model_of(), x))
    first, second = (gradients(model_of(), half) for half in halves)
    same_arithmetic = stepped([(a + b) / 2 for a, b in zip(first, second, strict=True)])
    got: dict[int, list[torch.Tensor]] = {}

    def work(ctx: paceline.Context) -> None:
        torch.set_num_threads(1)
        model = model_of()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))
        gradients(model, halves[ctx.worker_index])
        optimizer.step()
        ctx.pull()
        got[ctx.worker_index] = [p.detach().clone() for p in model.parameters()]

    paceline.launch(work, ps=2, workers=2, mode="sync")
    for each in got.values():
        assert all(torch.equal(a, b) for a, b in zip(same_arithmetic, each, strict=True))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole, got[0], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(whole, got[0], strict=True))
