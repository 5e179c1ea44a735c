"""Workers that do different things (document 003): one learns digits as they are, one shifted digits, one only watches.

    paceline run --workers 3 worker_roles.py

Between-graph replication starts one program in every worker; what a worker does with its index is the program's affair.
Look at the watcher's two accuracies in logs/worker-2.log: with --workers 1 there is nobody to learn shifted digits.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.datasets import mnist
from paceline.models.mlp import mlp

ROLES = ("digits", "shifted digits", "watch")  # of worker 0, of worker 1, of all others


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3000, help="of the whole cluster")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two looks of the watcher")
    parser.add_argument("--patience", type=float, default=60, help="seconds without a step that it bears")
    parser.add_argument("--data-dir", help="a folder with MNIST; the embedded set when left out")
    return parser.parse_args()


def as_it_is(images: torch.Tensor) -> torch.Tensor:
    return images


def shifted(images: torch.Tensor) -> torch.Tensor:
    """All of a batch by up to three pixels each way."""
    down, right = (int(torch.randint(-3, 4, ())) for _ in range(2))
    return images.view(-1, 28, 28).roll((down, right), (1, 2)).view(-1, 784)


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def watch(ctx: paceline.Context, args: argparse.Namespace, look: Callable[[], None]) -> None:
    """Pull and look, until the others have made all steps; paused, so that nobody's round waits for this worker."""
    seen, since = -1, time.monotonic()
    with ctx.pause():
        while ctx.global_step < args.steps:
            if ctx.global_step != seen:
                seen, since = ctx.global_step, time.monotonic()
            elif time.monotonic() - since > args.patience:
                print(f"No step for {args.patience:g} s: nobody trains any more.", flush=True)
                return
            time.sleep(args.every)
            ctx.pull()
            look()


def evaluate(ctx: paceline.Context, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    reached = {}
    for name, change in (("accuracy", as_it_is), ("shifted_accuracy", shifted)):
        with torch.no_grad():
            parts = [model(change(part)).argmax(1) for part in images.split(500)]
        reached[name] = float((torch.cat(parts) == labels).float().mean())
    ctx.log(reached)
    print(f"Global step {ctx.global_step}:", "  ".join(f"{n} {v:.4f}" for n, v in reached.items()), flush=True)


def main() -> None:
    args = arguments()
    ctx = paceline.init()
    digits = mnist.load(args.data_dir)
    train = TensorDataset(torch.from_numpy(digits.train_x), torch.from_numpy(digits.train_y))
    test = torch.from_numpy(digits.test_x), torch.from_numpy(digits.test_y)

    model = mlp(hidden=100, activation="relu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(train, batch_size=100, shuffle=True)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader, shard=False)

    role = ROLES[min(ctx.worker_index, len(ROLES) - 1)]
    print(f"Worker {ctx.worker_index}: {role}", flush=True)
    if role == "watch":
        watch(ctx, args, lambda: evaluate(ctx, model, *test))
        return
    change = shifted if role == "shifted digits" else as_it_is
    batches = endless(loader)
    for _ in ctx.steps(args.steps):
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = cross_entropy(model(change(images)), labels)
        loss.backward()
        optimizer.step()
        ctx.log({"loss": loss.item()})
    ctx.pull()
    evaluate(ctx, model, *test)


if __name__ == "__main__":
    main()
