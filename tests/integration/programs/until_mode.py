"""Trains in whatever mode holds until --until does, then so many steps more; the faults of train.py are known too."""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from train import Faults
from train import arguments as fault_arguments

import paceline


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until", default="sync")
    parser.add_argument("--more", type=int, default=20)
    return parser.parse_known_args()[0]


def main() -> None:
    args = arguments()
    ctx = paceline.init()
    faults = Faults(fault_arguments(), ctx)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = ctx.prepare(model, optimizer)
    images, labels = torch.randn(4, 8), torch.randint(0, 2, (4,))
    step, more = 0, args.more
    while more:
        seen = ctx.global_step  # takes the answer of the last push, and with it a mode that has changed
        more -= ctx.mode == args.until
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        step += 1
        faults.at(step)
    print(f"{args.more} steps in mode {ctx.mode}, the last at global step {seen}", flush=True)


if __name__ == "__main__":
    main()
