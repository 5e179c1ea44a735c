"""HOW are 10,000 global steps shared out? Document 002's training, with a seed; summary.json has what each worker did.

Started by lab/measuring/whole_runs through `paceline run`. The original is examples/distributed.py; here batches are
cut from one tensor, so that a step is a step and not the making of a batch.
"""

import argparse
import time
from collections.abc import Iterator, Sequence

import torch
from torch import nn

import paceline
from paceline.datasets import mnist
from paceline.lab.matrices.budget import ELAPSED, LOSS
from paceline.models.mlp import document_002, summed_cross_entropy

BATCH = 100
LR = 0.01


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_steps", type=int, default=10_000, help="of the whole cluster")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    ctx = paceline.init()
    split = mnist.load().tensorflow_split()
    model: nn.Module = document_002()
    model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=LR))
    batches = endless(split, seed=1000 * args.seed + ctx.worker_index)
    began_s = time.monotonic()
    for _ in ctx.steps(args.train_steps):
        images, labels = next(batches)
        optimizer.zero_grad()
        summed_cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    elapsed_s = time.monotonic() - began_s
    ctx.pull()  # the other worker may have made the last step
    with torch.no_grad():
        validation = summed_cross_entropy(
            model(torch.from_numpy(split.validation_x)), torch.from_numpy(split.validation_y)
        ).item()
    ctx.log({LOSS: validation, ELAPSED: elapsed_s})
    print(f"After {args.train_steps} training step(s), validation cross entropy = {validation:g}", flush=True)


def endless(split: mnist.Split, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = torch.from_numpy(split.train_x), torch.from_numpy(split.train_y)
    generator = torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.split(torch.randperm(len(labels), generator=generator), BATCH):
            yield images[chosen], labels[chosen]


if __name__ == "__main__":
    main()
