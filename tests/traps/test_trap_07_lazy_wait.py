"""Trap 7: the lazy wait. Loops that never run the model's pre-forward hook would train on old weights for ever."""

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.worker.torch import TorchTrainee

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
    """The losses: each one tells with which weights it was computed."""
    with LOCK:
        torch.manual_seed(0)
        model = Net()
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = LOOPS[loop](model, torch.ones(3, 4))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_a_cluster(loop: str) -> tuple[list[float], bool]:
    seen: list[Any] = []

    def work(ctx: paceline.Context) -> None:
        torch.set_num_threads(1)
        seen.append(train(loop, ctx.prepare))
        seen.append(ctx._trainee.is_lazy)

    paceline.launch(work, ps=1, workers=1)
    return seen[0], seen[1]


@pytest.mark.parametrize("loop", LOOPS)
def test_no_loop_trains_on_old_weights(loop: str) -> None:
    losses, is_lazy = on_a_cluster(loop)
    assert losses == train(loop, lambda *objects: objects)
    assert is_lazy == (loop == "model(x)"), "only a loop that runs the hook may wait for it"


@pytest.mark.parametrize("loop", ["model.forward(x)", "model.encoder(x)"])
def test_always_lazy_is_wrong(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong way: trust the hook, without looking whether it runs."""
    joined = TorchTrainee.joined

    def joined_lazy(self: TorchTrainee, *args: Any) -> None:
        joined(self, *args)
        self.is_lazy = True

    monkeypatch.setattr(TorchTrainee, "joined", joined_lazy)
    monkeypatch.setattr(TorchTrainee, "_go_eager", lambda self: None)
    losses, _ = on_a_cluster(loop)
    right = train(loop, lambda *objects: objects)
    assert losses[0] == right[0]
    assert losses[1] == losses[0], "the second step saw the first weights again"
    assert losses != right


def test_fullgraph_needs_the_hook_out_of_the_graph() -> None:
    """A hook that dynamo traces into breaks fullgraph=True; ours is disabled for it."""
    near, far = socket.socketpair()

    def talk(*_: Any) -> None:
        near.send(b"x")
        far.recv(1)

    model = Net()
    handle = model.register_forward_pre_hook(talk)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 4))
    handle.remove()
    torch._dynamo.reset()
    model.register_forward_pre_hook(torch._dynamo.disable(talk))
    assert torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 4)).shape == (1, 2)
    torch._dynamo.reset()
    near.close()
    far.close()

    def work(ctx: paceline.Context) -> None:
        with LOCK:
            model = Net()
        _, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for _ in range(4):
            compiled(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        assert ctx._trainee.is_lazy
        assert ctx.global_step == 4

    paceline.launch(work, ps=1, workers=1)
