"""Trap 17: a push that overlaps with backward contradicts clipping, unscaling and accumulation."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline

LOCK = threading.Lock()


def clip(model: nn.Module, scaler: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def unscale(model: nn.Module, scaler: Any, optimizer: Any) -> None:
    scaler.unscale_(optimizer)


def accumulate(model: nn.Module, scaler: Any, optimizer: Any) -> None:
    scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()


AFTER_BACKWARD: dict[str, Callable[..., None]] = {"clip": clip, "unscale": unscale, "accumulate": accumulate}


def train(after: str, prepare: Callable[..., Any], on_model: Callable[[nn.Module], None]) -> list[torch.Tensor]:
    with LOCK:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    on_model(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
        AFTER_BACKWARD[after](model, scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("after", AFTER_BACKWARD)
def test_what_backward_hands_over_is_not_what_step_means(after: str) -> None:
    """The wrong way pushes from a hook of autograd; then comes what the script does before step()."""
    pushed: list[torch.Tensor] = []
    meant: list[torch.Tensor] = []

    def overlapping(model: nn.Module) -> None:
        weight: Any = model.weight
        weight.register_post_accumulate_grad_hook(lambda p: pushed.append(p.grad.clone()))

    def noting(*objects: Any) -> Any:
        optimizer = objects[1]
        weight = optimizer.param_groups[0]["params"][0]
        optimizer.register_step_pre_hook(lambda *_: meant.append(weight.grad.clone()))
        return objects

    train(after, noting, overlapping)
    early = pushed[:: len(pushed) // len(meant)]  # the first push of each step, which can not be taken back
    assert not any(torch.equal(a, b) for a, b in zip(early, meant, strict=True))


@pytest.mark.parametrize("after", AFTER_BACKWARD)
def test_ours_pushes_what_the_script_has_made_of_its_gradients(after: str) -> None:
    attached: list[Any] = []

    def look(model: nn.Module) -> None:
        for parameter in model.parameters():
            attached.extend([parameter._backward_hooks, parameter._post_accumulate_grad_hooks])

    want = train(after, lambda *objects: objects, lambda model: None)
    got: list[list[torch.Tensor]] = []
    paceline.launch(lambda ctx: got.append(train(after, ctx.prepare, look)), ps=2, workers=1)
    assert all(torch.equal(a, b) for a, b in zip(want, got[0], strict=True))
    assert not any(attached), "autograd owns p.grad; nothing is attached to it"
