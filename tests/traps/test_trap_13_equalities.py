"""Trap 13: equalities that do not exist. Compare with one process that does the same arithmetic in the same order."""

import threading
from typing import Any

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


def parameters_of(work: Any, **options: Any) -> list[torch.Tensor]:
    """Runs a cluster whose workers return their parameters, all the same; gives those."""
    got: dict[int, list[torch.Tensor]] = {}

    def noted(ctx: paceline.Context) -> None:
        torch.set_num_threads(1)
        model = work(ctx)
        ctx.pull()
        got[ctx.worker_index] = [p.detach().clone() for p in model.parameters()]

    paceline.launch(noted, ps=2, **options)
    for each in got.values():
        assert all(torch.equal(a, b) for a, b in zip(got[0], each, strict=True))
    return got[0]


def test_three_workers_with_10_20_and_70_samples_are_not_one_with_100_but_the_weighted_mean() -> None:
    x, rate = data(), 1.0
    parts = x.split(SIZES)

    def work(ctx: paceline.Context) -> nn.Module:
        model = model_of()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))
        ctx.weight(SIZES[ctx.worker_index])
        gradients(model, parts[ctx.worker_index])
        optimizer.step()
        return model

    def stepped(gradient: list[torch.Tensor]) -> list[torch.Tensor]:
        return [p.detach().add(g, alpha=-rate) for p, g in zip(model_of().parameters(), gradient, strict=True)]

    got = parameters_of(work, workers=3, mode="sync")
    whole = stepped(gradients(model_of(), x))
    each = [gradients(model_of(), part) for part in parts]
    ours = stepped([(a * 10 + b * 20 + c * 70) / 100 for a, b, c in zip(*each, strict=True)])
    shares = stepped([a * 0.1 + b * 0.2 + c * 0.7 for a, b, c in zip(*each, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(ours, got, strict=True))
    for other in (whole, shares):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(other, got, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(other, got, strict=True))


def test_one_local_step_and_a_plain_outer_update_is_not_sync_but_nearly() -> None:
    """w - ((w - v0) + (w - v1)) / 2 rounds otherwise than w - rate * (g0 + g1) / 2."""
    halves = data().chunk(2)

    def work(ctx: paceline.Context) -> nn.Module:
        model = model_of()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(20):
            gradients(model, halves[ctx.worker_index])
            optimizer.step()
        return model

    local = parameters_of(work, workers=2, mode="local", local_steps=1, outer_lr=1.0, outer_momentum=0.0)
    sync = parameters_of(work, workers=2, mode="sync")
    assert all(torch.allclose(a, b, rtol=0, atol=2e-6) for a, b in zip(local, sync, strict=True))
    differ = sum(int((a != b).sum()) for a, b in zip(local, sync, strict=True))
    assert differ > 0.1 * sum(p.numel() for p in sync), "a test that expects the same bits would be wrong"
    model = model_of()
    for _ in range(20):
        moved = []
        for half in halves:
            own = model_of()
            own.load_state_dict(model.state_dict())
            gradients(own, half)
            torch.optim.SGD(own.parameters(), lr=0.1).step()
            moved.append([w.detach() - v.detach() for w, v in zip(model.parameters(), own.parameters(), strict=True)])
        with torch.no_grad():
            for parameter, a, b in zip(model.parameters(), *moved, strict=True):
                parameter.sub_((a + b) / 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), local, strict=True))
