"""WHAT does a run do that only updates? A large model, gradients that are made once, and nothing computed between.

Started by lab/measuring/whole_runs through `paceline run`; what is wanted, the ps measures itself.
"""

import argparse
from collections.abc import Sequence

import torch

import paceline
from paceline.lab.scripts.sizes import SIZES
from paceline.lab.scripts.worker_script import layers


def main(argv: Sequence[str] | None = None) -> None:
    """Join, then push the same gradients again and again."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=list(SIZES), required=True)
    parser.add_argument("--optimizer", choices=["momentum", "adam"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = layers(SIZES[args.size])
    optimizer: torch.optim.Optimizer
    if args.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    ctx = paceline.init()
    model, optimizer = ctx.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(ctx.worker_index)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for _ in range(args.steps):
        optimizer.step()


if __name__ == "__main__":
    main()
