"""A model whose weight counts the updates: every gradient is 1, the learning rate is 1. Two ps have a half each.

--total N   the cluster makes exactly N updates (ctx.steps), whatever happens to its workers
--steps N   every worker makes N steps of its own
"""

import argparse

import torch
from torch import nn

import paceline


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--total", type=int)
    parser.add_argument("--steps", type=int, default=0)
    args = parser.parse_known_args()[0]
    ctx = paceline.init()
    model = Counter()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = ctx.prepare(model, optimizer)
    for _ in ctx.steps(args.total) if args.total else range(args.steps):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    ctx.pull()
    ctx.log({"updates": -model.weight[0].item()})


if __name__ == "__main__":
    main()
