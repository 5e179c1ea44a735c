"""WHAT may a script do to parameters on a card? Each loop runs alone and with a ps, and must end with the same weights.

Run by tests/gpu/on_card.py. The ps's optimizer runs on the CPU, so sums may differ in their last bits.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from on_card import Check, main
from torch import nn

import paceline
from paceline.errors import TrainingFailed

STEPS = 30
CARD = "cuda:0"
After = Callable[[nn.Module], None]


class Recurrent(nn.Module):
    """Lays its weights into new memory in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 16, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rnn.flatten_parameters()
        return self.out(self.rnn(x)[0][:, -1])


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 10 * 6, 4))


def batch(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(5, 12, 8, generator=generator).to(CARD)
    return x if isinstance(model, Recurrent) else x[:, None]


def trained(make: Callable[[], nn.Module], after: After, ctx: Any, first: After = lambda model: None) -> dict[str, Any]:
    """Train for STEPS; `after` each of them the script does something to its model."""
    torch.manual_seed(0)
    model = make().to(CARD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if ctx is not None:
        model, optimizer = ctx.prepare(model, optimizer)
    first(model)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch(model, generator)).square().mean().backward()
        optimizer.step()
        after(model)
    if ctx is not None:
        ctx.pull()
        for name, value in model.named_parameters():
            assert torch.equal(torch.as_tensor(ctx.kv[name]), value.detach().cpu()), f"{name} is another on the ps"
    return {name: value.detach().cpu().clone() for name, value in model.named_parameters()}


def same(make: Callable[[], nn.Module], after: After = lambda model: None, first: After = lambda model: None) -> Check:
    def check(folder: Path) -> str:
        want = trained(make, after, None, first)
        got: list[dict[str, Any]] = []
        paceline.launch(lambda ctx: got.append(trained(make, after, ctx, first)), ps=1, workers=1)
        apart = max((want[name] - got[0][name]).abs().max().item() for name in want)
        assert apart < 1e-5, f"{apart:g} apart"
        return f"up to {apart:.2g} apart after {STEPS} steps"

    return check


def refused(make: Callable[[], nn.Module], after: After, reason: str, workers: int = 1) -> Check:
    def check(folder: Path) -> str:
        try:
            paceline.launch(lambda ctx: trained(make, after, ctx), ps=1, workers=workers)
        except TrainingFailed as error:
            assert reason in str(error), error
            return reason
        raise AssertionError("it was not refused")

    return check


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def clamp_one(model: nn.Module) -> None:
    model[3].bias.data.clamp_(-1e-6, 1e-6)


def channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


CHECKS: dict[str, Check] = {
    "a loop that writes nothing": same(small),
    "lstm.flatten_parameters() in forward": same(Recurrent),
    "weights are clamped after each step": same(small, clamp),
    "channels_last after prepare": same(small, first=channels_last),
    "weights are clamped beside another worker": refused(small, clamp_one, "3.bias was written", workers=2),
}

if __name__ == "__main__":
    sys.exit(main(CHECKS))
