"""Document 002's distributed.py: two workers share 10,000 global steps on MNIST.

    python distributed.py --job_name="ps" --ps_hosts="a:2222" --worker_hosts="b:2222,c:2222" --task_index=0

Without --ps_hosts and --worker_hosts the cluster in settings.py is taken; --log_every=1 prints the document's line
a step. Look at how many steps each worker made: one four times as slow makes a quarter as many, and nobody waits.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.datasets import mnist
from paceline.models.mlp import document_002, summed_cross_entropy


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_steps", type=int, default=10000, help="of the whole cluster")
    parser.add_argument("--batch_size", type=int, default=100)
    parser.add_argument("--hidden_units", type=int, default=100)
    parser.add_argument("--learning_rate", type=float, default=0.01)
    parser.add_argument("--issync", type=int, choices=(0, 1), help="1: sync, 0: async; left out: as --mode says")
    parser.add_argument("--data_dir", help="a folder with MNIST; the embedded set when left out")
    return parser.parse_known_args()[0]  # the cluster's four flags are for paceline.init


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def main() -> None:
    args = arguments()
    mode = None if args.issync is None else ("async", "sync")[args.issync]
    ctx = paceline.init(flags=True, mode=mode)  # a ps serves here, and ends when the workers are done
    digits = mnist.load(args.data_dir).tensorflow_split()
    train = TensorDataset(torch.from_numpy(digits.train_x), torch.from_numpy(digits.train_y))

    model = document_002(args.hidden_units)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)

    batches, made = endless(loader), 0
    for step in ctx.steps(args.train_steps):
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = summed_cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        made = step + 1

    print(f"Worker {ctx.worker_index} made {made} of {args.train_steps} training step(s)", flush=True)
    ctx.pull()  # the other worker may have made the last step
    with torch.no_grad():
        validation = summed_cross_entropy(
            model(torch.from_numpy(digits.validation_x)), torch.from_numpy(digits.validation_y)
        )
    ctx.log({"validation_cross_entropy": validation.item()})
    print(f"After {args.train_steps} training step(s), validation cross entropy = {validation:g}", flush=True)


if __name__ == "__main__":
    main()
