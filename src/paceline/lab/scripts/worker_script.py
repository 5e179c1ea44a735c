"""WHAT does a process train while the lab looks on? Document 000's recipe, a large model, or a step that sleeps.

Run by lab/measuring/starting: `single` as a plain process without paceline in its loop, `worker` through
launchers/entry, three changed lines and all. Must never differ between the two in anything but those lines.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import paceline
from paceline.lab.scripts.orders import Orders
from paceline.lab.scripts.sizes import SIZES
from paceline.models.mlp import document_000

BATCH = 100
LEARNING_RATE = 0.001
LARGE, LARGE_LEARNING_RATE = "11M", 0.01
CONVOLUTIONS = "convolutions"  # little to carry, much to compute
PUSH = "push"
SLEEP, SLEEP_S, SLOWER = "sleep", 0.020, 5
SLEEPER = (64, 32, 10)

Steps = Callable[[int], None]


def main(argv: Sequence[str] | None = None) -> None:
    """Load, join if there is a cluster, then obey."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["single", "worker"])
    parser.add_argument("--data", type=Path, required=True, help="folder with x.npy and y.npy")
    parser.add_argument(
        "--what", choices=["", LARGE, CONVOLUTIONS, SLEEP, PUSH], default="", help="document 000's recipe if left out"
    )
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--straggler", type=int, help=f"this worker sleeps {SLOWER} times as long")
    args = parser.parse_args(argv)
    orders = Orders()
    torch.set_num_threads(1)
    model, rate = recipe(args.what)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    if args.role == "single":
        orders.obey(trainer(model, optimizer, *loaded(args.data), seed=0, size=args.batch))
        return
    ctx = paceline.init()
    model, optimizer = ctx.prepare(model, optimizer)
    is_slow = ctx.worker_index == args.straggler
    if args.what == SLEEP:
        train = sleeper(model, optimizer, SLEEP_S * (SLOWER if is_slow else 1))
    elif args.what == PUSH:
        train = pusher(model, optimizer)
    else:
        train = trainer(model, optimizer, *loaded(args.data), seed=ctx.worker_index, size=args.batch)

    def steps(count: int) -> None:
        train(count)
        _ = ctx.global_step  # takes the last answer: its parameters belong to these steps

    if args.what != SLEEP:
        orders.obey(steps)
    elif is_slow:
        orders.run_along(steps, ctx.pause)
    else:
        orders.obey(steps, ctx.pause)  # nobody waits for a worker that waits for orders


def recipe(what: str) -> tuple[nn.Module, float]:
    """The model and its learning rate."""
    if what == SLEEP:
        return layers(SLEEPER), LEARNING_RATE
    if what == CONVOLUTIONS:
        return convolutions(), LARGE_LEARNING_RATE
    return (layers(SIZES[LARGE]), LARGE_LEARNING_RATE) if what == LARGE else (document_000(seed=1), LEARNING_RATE)


def layers(widths: Sequence[int]) -> nn.Sequential:
    """Fully connected, relu between them, the same in every process."""
    torch.manual_seed(1)
    made: list[nn.Module] = []
    for before, after in pairwise(widths):
        made += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*made[:-1])


def convolutions() -> nn.Sequential:
    """Two of them, and ten logits: 18,000 parameters, and twenty times the computing of document 000's model."""
    torch.manual_seed(1)
    first, second = nn.Conv2d(1, 16, 5), nn.Conv2d(16, 32, 5)
    sees = [first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(nn.Unflatten(1, (1, 28, 28)), *sees, nn.Flatten(), nn.Linear(32 * 4 * 4, 10))


def loaded(data: Path) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = (torch.from_numpy(np.load(data / name)) for name in ("x.npy", "y.npy"))
    return images, labels


def trainer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: torch.Tensor,
    labels: torch.Tensor,
    seed: int,
    size: int = BATCH,
) -> Steps:
    """The loop that is timed, in every process the same."""
    generator = torch.Generator().manual_seed(seed)
    count = len(images)

    def train(steps: int) -> None:
        for _ in range(steps):
            batch = torch.randint(0, count, (size,), generator=generator)
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return train


def pusher(model: nn.Module, optimizer: torch.optim.Optimizer) -> Steps:
    """A step that computes nothing: the same gradients go out, the parameters come back."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.step()

    return train


def sleeper(model: nn.Module, optimizer: torch.optim.Optimizer, sleep_s: float) -> Steps:
    """A step that sleeps where another computes: between its parameters and its push, which grow old meanwhile."""
    images = torch.ones(1, SLEEPER[0])

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            time.sleep(sleep_s)
            optimizer.step()

    return train


if __name__ == "__main__":
    main()
