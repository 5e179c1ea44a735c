"""Trap 8: no gradient is not a zero gradient, a momentum buffer starts absent, and strides are part of a tensor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline

MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
}


class Two(nn.Module):
    """Two weights; only one of them is used in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.once = nn.Parameter(torch.ones(1))
        self.always = nn.Parameter(torch.ones(1))

    def forward(self, is_first: bool) -> torch.Tensor:
        return self.once + self.always if is_first else self.always * 1.0


def one_gradient_then_none(make: Any, prepare: Callable[..., Any], is_zero: bool = False) -> float:
    model = Two()
    model, optimizer = prepare(model, make(model.parameters()))
    for step in range(5):
        optimizer.zero_grad()
        model(step == 0).backward()
        if is_zero and model.once.grad is None:
            model.once.grad = torch.zeros(1)  # the wrong way: a flat slot that holds zeros where nothing came
        optimizer.step()
    return model.state_dict()["once"].item()


@pytest.mark.parametrize("lane", ["inproc", "tcp"])
@pytest.mark.parametrize("name", MAKE)
def test_a_tensor_without_a_gradient_stays_where_it_is(name: str, lane: str) -> None:
    want = one_gradient_then_none(MAKE[name], lambda *objects: objects)
    wrong = one_gradient_then_none(MAKE[name], lambda *objects: objects, is_zero=True)
    assert abs(want - wrong) > 0.01
    got: list[float] = []
    paceline.launch(lambda ctx: got.append(one_gradient_then_none(MAKE[name], ctx.prepare)), ps=2, workers=1, lane=lane)
    assert got == [want]


def test_a_momentum_buffer_starts_absent() -> None:
    """With dampening the first step takes the whole gradient; a buffer of zeros would take half."""

    def first_step(prepare: Callable[..., Any], has_zeros: bool = False) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = MAKE["dampening"](model.parameters())
        if has_zeros:
            optimizer.state[model.weight]["momentum_buffer"] = torch.zeros(1, 1)
        model, optimizer = prepare(model, optimizer)
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        return model.state_dict()["weight"].item()

    want = first_step(lambda *objects: objects)
    assert want == pytest.approx(0.9)
    assert first_step(lambda *objects: objects, has_zeros=True) == pytest.approx(0.95)
    got: list[float] = []
    paceline.launch(lambda ctx: got.append(first_step(ctx.prepare)), ps=1, workers=1)
    assert got == [want]


@pytest.mark.parametrize("lane", ["inproc", "tcp"])
def test_channels_last_is_lost_in_a_naive_flat_copy(lane: str) -> None:
    conv = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    strides = conv.weight.stride()
    naive = torch.empty(conv.weight.numel()).view_as(conv.weight)
    assert naive.stride() != strides
    seen: list[Any] = []

    def work(ctx: paceline.Context) -> None:
        model = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
        values = model.weight.detach().clone()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        assert torch.equal(values, model.weight)
        picked = torch.arange(model.weight.numel(), dtype=torch.float32).view(model.weight.shape)
        model.weight.grad = picked.contiguous(memory_format=torch.channels_last)
        optimizer.step()
        ctx.pull()
        seen.extend([model.weight.stride(), torch.equal(model.weight, values - picked)])
        kv = ctx.kv
        seen.append(torch.equal(torch.from_numpy(kv["weight"]), values - picked))
        kv.close()

    paceline.launch(work, ps=3, workers=1, lane=lane)
    assert seen == [strides, True, True]
