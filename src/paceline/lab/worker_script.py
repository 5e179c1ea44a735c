"""WHAT does a process train while the lab looks on? Document 000's recipe, alone or as a worker of a cluster.

Run by lab/starting: `single` as a plain process without paceline in its loop, `worker` through launchers/entry, three
changed lines and all. Must never differ between the two in anything but those lines.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import paceline
from paceline.lab.orders import Orders
from paceline.models.mlp import document_000

BATCH = 100
LEARNING_RATE = 0.001


def main(argv: Sequence[str] | None = None) -> None:
    """Load, join if there is a cluster, then obey."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["single", "worker"])
    parser.add_argument("--data", type=Path, required=True, help="folder with x.npy and y.npy")
    args = parser.parse_args(argv)
    orders = Orders()
    torch.set_num_threads(1)
    images, labels = (torch.from_numpy(np.load(args.data / name)) for name in ("x.npy", "y.npy"))
    model = document_000(seed=1)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    if args.role == "single":
        orders.obey(trainer(model, optimizer, images, labels, seed=0))
        return
    ctx = paceline.init()
    model, optimizer = ctx.prepare(model, optimizer)
    train = trainer(model, optimizer, images, labels, seed=ctx.worker_index)

    def steps(count: int) -> None:
        train(count)
        _ = ctx.global_step  # takes the last answer: its parameters belong to these steps

    orders.obey(steps)


def trainer(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor, seed: int
) -> Callable[[int], None]:
    """The loop that is timed, in every process the same."""
    generator = torch.Generator().manual_seed(seed)
    count = len(images)

    def train(steps: int) -> None:
        for _ in range(steps):
            batch = torch.randint(0, count, (BATCH,), generator=generator)
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return train


if __name__ == "__main__":
    main()
