"""Trap 3: changing the optimizer in place. `optimizer.__class__ = Sub` alone goes wrong silently, in three ways."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from paceline.frameworks.torch import optimizer as module
from paceline.frameworks.torch.optimizer_state import OptimizerState
from paceline.frameworks.torch.training_step import step_of

pytestmark = pytest.mark.filterwarnings("error")  # a scheduler that thinks its optimizer never stepped warns


class Calls:
    """Stands for the cluster; notes what a step would have pushed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.gradients: list[float] = []
        self.state = OptimizerState(dict)

    def step(self) -> None:
        self.gradients.append(max(p.grad.abs().max().item() for p in self.model.parameters()))

    def load_state(self) -> None: ...


def naive(optimizer: torch.optim.Optimizer, calls: Calls) -> None:
    """The wrong way: a subclass with a new step, and nothing else."""

    class Sub(type(optimizer)):  # type: ignore[misc]
        def step(self, closure: Any = None) -> None:
            calls.step()

    optimizer.__class__ = Sub


def convert(optimizer: torch.optim.Optimizer, calls: Calls) -> None:
    """Do what prepare() does."""
    module.convert(optimizer, calls, step_of(calls))


Way = Callable[[torch.optim.Optimizer, Calls], None]


def one_step(way: Way, make: Callable[[nn.Module], Any], scheduler: str = "") -> tuple[Calls, list[str], bool]:
    """A step with hooks and, before or after, a scheduler; returns the calls, the hooks, whether weights moved here."""
    model = nn.Linear(3, 2)
    calls, hooks = Calls(model), []
    optimizer = make(model)
    optimizer.register_step_pre_hook(lambda *_: hooks.append("pre"))
    optimizer.register_step_post_hook(lambda *_: hooks.append("post"))
    rates = StepLR(optimizer, 1) if scheduler == "before" else None
    way(optimizer, calls)
    rates = StepLR(optimizer, 1) if scheduler == "after" else rates
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    if rates is not None:
        rates.step()
    return calls, hooks, not torch.equal(before, model.weight)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return SGD(model.parameters(), lr=0.1)


def test_a_scheduler_made_before_keeps_the_old_step() -> None:
    calls, _, moved = one_step(naive, sgd, "before")
    assert calls.gradients == []
    assert moved, "the naive way trains here, and the ps never hears of it"
    calls, hooks, moved = one_step(convert, sgd, "before")
    assert len(calls.gradients) == 1
    assert hooks == ["pre", "post"]
    assert not moved


def test_hooks_are_lost_or_run_twice() -> None:
    assert one_step(naive, sgd)[1] == []
    for scheduler in ("", "before", "after"):
        assert one_step(convert, sgd, scheduler)[1] == ["pre", "post"]


def test_a_class_that_torch_wraps_again_runs_hooks_once() -> None:
    """Making another optimizer, or loading a state, lets torch look at the class again."""
    model = nn.Linear(3, 2)
    calls, hooks = Calls(model), []
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: hooks.append("pre"))
    convert(optimizer, calls)
    optimizer.load_state_dict({"state": {}, "param_groups": [dict(sgd(model).state_dict()["param_groups"][0])]})
    optimizer._patch_step_function()
    sgd(model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert hooks == ["pre"]
    assert len(calls.gradients) == 1


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_grad_scaler_hands_over_gradients_that_are_still_scaled(is_fused: bool) -> None:
    def scaled_step(way: Way) -> list[float]:
        model = nn.Linear(3, 2)
        optimizer = SGD(model.parameters(), lr=0.1, fused=is_fused)
        calls = Calls(model)
        way(optimizer, calls)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return calls.gradients

    assert scaled_step(naive) == [1024.0 if is_fused else 1.0]
    assert scaled_step(convert) == [1.0]


def test_the_object_stays_what_it_was() -> None:
    model = nn.Linear(3, 2)
    optimizer = sgd(model)
    identity, groups = id(optimizer), optimizer.param_groups
    convert(optimizer, Calls(model))
    assert id(optimizer) == identity
    assert optimizer.param_groups is groups
    assert isinstance(optimizer, SGD)
    assert type(optimizer).__name__ == "SGD"
