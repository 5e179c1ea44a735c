"""HOW MUCH is trained in a given time? Document 000's model on made-up images, for so many seconds; each worker tells.

Started by lab/scripts/hosts_script for lab/matrices/slow_link, a worker a process.

1. warm up with a model that is thrown away, 2. wait until everybody has, 3. train until the time is over, 4. tell how
many samples, and from when to when.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.lab.matrices.cards import BEGAN_S, ENDED_S, SAMPLES

WIDTHS = (784, 100, 10)
WARM_UP = 5
POOL = 20  # batches that are taken in turn
LEARNING_RATE = 0.01


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--batch", type=int, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    ctx = paceline.init()
    images, labels = torch.randn(POOL, args.batch, WIDTHS[0]), torch.randint(0, WIDTHS[-1], (POOL, args.batch))
    model, optimizer = made()
    for _ in range(WARM_UP):
        step(model, optimizer, images[0], labels[0])  # 1
    model, optimizer = ctx.prepare(*made())
    ctx.barrier()  # 2
    steps, began_s = 0, time.monotonic()
    while time.monotonic() < began_s + args.seconds:  # 3
        step(model, optimizer, images[steps % POOL], labels[steps % POOL])
        steps += 1
    ctx.log({SAMPLES: steps * args.batch, BEGAN_S: began_s, ENDED_S: time.monotonic()})  # 4


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(*WIDTHS[:2]), nn.Sigmoid(), nn.Linear(*WIDTHS[1:]))
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor) -> None:
    optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


if __name__ == "__main__":
    main()
