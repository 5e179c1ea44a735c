"""Start async, finish sync: nobody waits while every gradient helps, then all agree on each of the last steps.

    paceline run --workers 2 async_then_sync.py

From another terminal the same is done by `paceline ctl mode sync latest`.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.datasets import mnist
from paceline.models.mlp import mlp


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000, help="of the whole cluster; half of them async")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--data-dir", help="a folder with MNIST; the embedded set when left out")
    return parser.parse_args()


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def main() -> None:
    args = arguments()
    ctx = paceline.init()
    digits = mnist.load(args.data_dir)
    train = TensorDataset(torch.from_numpy(digits.train_x), torch.from_numpy(digits.train_y))
    test = torch.from_numpy(digits.test_x), torch.from_numpy(digits.test_y)

    model = mlp(hidden=100, activation="relu")
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(train, batch_size=100, shuffle=True))

    batches = endless(loader)
    may_switch = ctx.is_chief and ctx.mode == "async"
    for _ in ctx.steps(args.steps):
        images, labels = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        if may_switch and ctx.global_step >= args.steps // 2:
            may_switch = False
            ctx.print(f"async up to global step {ctx.global_step}: test accuracy {accuracy(model, *test):.4f}")
            ctx.switch_mode("sync")  # holds as soon as every worker has finished its step

    ctx.pull()  # the newest parameters: another worker may have made the last step
    reached = accuracy(model, *test)
    ctx.log({"test_accuracy": reached})
    ctx.print(f"{ctx.mode} up to global step {ctx.global_step}: test accuracy {reached:.4f}")


if __name__ == "__main__":
    main()
