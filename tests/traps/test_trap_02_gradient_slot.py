"""Trap 2: the gradient slot must not be `p.grad`: `zero_grad(set_to_none=False)` clears what the ps still reads."""

import pytest
import torch
from torch import nn

import paceline

PUSHES = 60


def test_a_slot_that_is_the_gradient_loses_pushes() -> None:
    """The wrong way in small: the push only says 'look', and the ps looks after the script has gone on."""
    weight, gradient = torch.zeros(1), torch.zeros(1)
    waiting = []
    for _ in range(PUSHES):
        for apply in waiting:
            apply()
        gradient.fill_(1.0)
        waiting = [lambda: weight.sub_(gradient)]
        gradient.zero_()  # zero_grad(set_to_none=False)
    assert weight.item() != -PUSHES


@pytest.mark.parametrize("lane", ["inproc", "shm", "tcp"])
@pytest.mark.parametrize("ps", [1, 2])
def test_every_push_counts_although_the_gradient_is_cleared_at_once(lane: str, ps: int) -> None:
    seen: list[torch.Tensor] = []

    def train(ctx: paceline.Context) -> None:
        model = nn.Linear(40, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(PUSHES):
            model(torch.ones(1, 40)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            assert model.weight.grad.abs().sum() == 0
        seen.append(model.state_dict()["weight"].clone())

    paceline.launch(train, ps=ps, workers=1, lane=lane)
    assert torch.equal(seen[0], torch.full((1, 40), -float(PUSHES)))
