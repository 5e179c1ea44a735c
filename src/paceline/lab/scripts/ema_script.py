"""WHAT do averaged parameters gain? MNIST with `--ema`: the accuracy of the last and of the averaged ones, in lab.json.

Started by lab/measuring/whole_runs through `paceline run`. All workers stop at the same points, so that both are of
one moment.
"""

import argparse
from collections.abc import Sequence

import msgspec
import torch

import paceline
from paceline.datasets import mnist
from paceline.lab.scripts.curves import TOLD, Averages
from paceline.lab.scripts.mnist_script import folder_of, prepared
from paceline.launchers.demos.mnist import accuracy


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--lr", type=float, help="0.3, with momentum 0.1, if left out")
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300, help="of each worker, between two points")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    ctx = paceline.init()
    data = mnist.load()
    test = (torch.from_numpy(data.test_x), torch.from_numpy(data.test_y))
    model, step = prepared(ctx, data, args.lr or (0.1 if args.momentum else 0.3), args.momentum)
    last: list[float] = []
    averaged: list[float] = []
    for _ in range(args.points):
        for _ in range(args.steps):
            step()
        ctx.barrier()  # everybody's updates are in, and pulled
        if ctx.is_chief:
            last.append(accuracy(model, *test))
            with ctx.ema():
                averaged.append(accuracy(model, *test))
        ctx.barrier()
    if ctx.is_chief:
        ctx.log({"last": last[-1], "averaged": averaged[-1]})
        (folder_of(ctx) / TOLD).write_bytes(msgspec.json.encode(Averages(last=last, averaged=averaged)))


if __name__ == "__main__":
    main()
