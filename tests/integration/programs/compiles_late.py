"""Trains, and compiles only after its first steps, or in place; then does the same alone: the bits are equal."""

import sys

import torch
from torch import nn

import paceline


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def train(called, optimizer, steps: range) -> None:
    for step in steps:
        batch = torch.randn(6, 7, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        called(batch).square().mean().backward()
        optimizer.step()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


ctx = paceline.init()
model = Small()
model, optimizer = ctx.prepare(model, optimizer_of(model))
train(model, optimizer, range(3))
assert "torch._dynamo" not in sys.modules, "imported though nobody has compiled anything"
options = {"backend": "eager", "fullgraph": True}
if "in-place" in sys.argv:
    getattr(model, "compile")(**options)  # noqa: B009  the launcher must not see it
    compiled = model
else:
    compiled = getattr(torch, "compile")(model, **options)  # noqa: B009
train(compiled, optimizer, range(3, 6))
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
alone = Small()
train(alone, optimizer_of(alone), range(6))
for name, value in model.state_dict().items():
    assert torch.equal(value, alone.state_dict()[name]), name
print("compiled, and equal")
