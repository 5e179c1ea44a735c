"""Trap 7: after optimizer.step() every way to a parameter shows the new values, without any hook on the model."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline

STEPS = 6
LOCK = threading.Lock()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.encoder(x)))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x).square().mean()


LOOPS: dict[str, Callable[[Net, torch.Tensor], torch.Tensor]] = {
    "model(x)": lambda model, x: model(x).square().mean(),
    "model.forward(x)": lambda model, x: model.forward(x).square().mean(),
    "model.loss(x)": lambda model, x: model.loss(x),
    "model.encoder(x)": lambda model, x: model.head(torch.tanh(model.encoder(x))).square().mean(),
}


def train(loop: str, prepare: Callable[..., Any]) -> list[float]:
    """Return the losses and, after each step, a weight as a list made before training shows it."""
    with LOCK:
        torch.manual_seed(0)
        model = Net()
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    held = [p.data for p in model.parameters()]
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = LOOPS[loop](model, torch.ones(3, 4))
        loss.backward()
        optimizer.step()
        seen += [loss.item(), held[0][0, 0].item()]
    return seen


@pytest.mark.parametrize("loop", LOOPS)
def test_no_loop_reads_old_weights(loop: str) -> None:
    seen: list[list[float]] = []

    def work(ctx: paceline.Context) -> None:
        torch.set_num_threads(1)
        seen.append(train(loop, ctx.prepare))

    paceline.launch(work, ps=1, workers=1)
    assert seen == [train(loop, lambda *objects: objects)]


def test_the_prepared_model_compiles_without_graph_breaks() -> None:
    def work(ctx: paceline.Context) -> None:
        with LOCK:
            model = Net()
        _, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(4):
            compiled(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        assert ctx.global_step == 4

    torch._dynamo.reset()
    paceline.launch(work, ps=1, workers=1)
    torch._dynamo.reset()
