"""Document 001's CIFAR-10 on several devices of one machine: a tower each, gradients averaged on the CPU, and EMA.

    python cifar10_towers.py                                     all GPUs here; without one, two towers on the CPU
    python cifar10_towers.py --devices=/gpu:0,/gpu:1             those two
    python cifar10_towers.py --data-dir=data                     the real set, downloaded into data (170 MB)
    paceline run --workers 2 --mode sync cifar10_towers.py       towers in every worker, variables on the ps
    paceline run --workers 1 --virtual-gpus 2 cifar10_towers.py --devices=/gpu:0,/gpu:1       two towers on one card

Every tower takes a batch of its own: random crops, mirrored, of another brightness and contrast, whitened. Look at the
two accuracies at the end: of the last parameters, and of their average over time. A resumed run makes the steps that
are left, with the batches that were to come; the average goes on too where the ps keep it (`paceline run --ema 0.98`),
else it begins anew.
"""

import argparse
import time
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.datasets import cifar10
from paceline.datasets.distort import centred, distorted
from paceline.models.cnn import Cnn


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", help="such as /gpu:0,/gpu:1; a device named twice has two towers")
    parser.add_argument("--steps", type=int, default=200, help="updates, of all workers together")
    parser.add_argument("--batch-size", type=int, default=32, help="of each tower")
    parser.add_argument("--channels", type=int, default=32, help="of a convolution; the tutorial has 64")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--ema", type=float, default=0.98, help="decay of the averaged parameters")
    parser.add_argument("--updates", choices=["sync", "async"], default="sync")
    parser.add_argument("--data-dir", help="a folder with CIFAR-10, or where it shall be kept; left out: a made-up set")
    return parser.parse_args()


def all_devices() -> list[str]:
    """Every GPU; without one the CPU twice, which is no faster than once, but the same arithmetic."""
    return [f"/gpu:{index}" for index in range(torch.cuda.device_count())] or ["/cpu:0", "/cpu:0"]


def steps(ctx: paceline.Context, total: int, updates: str) -> Iterable[int]:
    """The numbers of this worker's steps, those that are left of a resumed run."""
    if updates == "sync":
        return ctx.steps(total)
    return range(ctx.global_step + ctx.worker_index, total, ctx.num_workers)  # several are under way at a time


def batches(
    data: cifar10.Cifar10, size: int, numbers: Iterable[int], towers: int, worker: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each step a batch for each tower, which depends on nothing but the number of the step and the worker."""
    for number in numbers:
        generator = np.random.default_rng((worker, number))
        for _ in range(towers):
            chosen = generator.integers(0, len(data.train_x), size)
            yield torch.from_numpy(distorted(data.train_x[chosen], generator)), torch.from_numpy(data.train_y[chosen])


def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(images), labels)


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        right = [(model(x).argmax(1) == y).sum() for x, y in zip(images.split(500), labels.split(500), strict=True)]
    return float(sum(right)) / len(labels)


def main() -> None:
    args = arguments()
    ctx = paceline.init()
    data = cifar10.load(args.data_dir)
    print(f"CIFAR-10: {data.source}", flush=True)
    test = torch.from_numpy(centred(data.test_x)), torch.from_numpy(data.test_y)

    model = Cnn(args.channels, seed=1)
    optimizer = torch.optim.SGD(model.groups(), lr=args.lr)
    model, optimizer = ctx.prepare(model, optimizer)
    first, numbers = ctx.global_step, steps(ctx, args.steps, args.updates)
    devices = args.devices.split(",") if args.devices else all_devices()
    towers = paceline.towers(model, optimizer, devices, variables="/cpu:0", mode=args.updates, ema=args.ema)
    print(towers, flush=True)

    began = time.monotonic()
    together = len(towers) if args.updates == "sync" else 1
    for update in towers.train(loss, batches(data, args.batch_size, numbers, together, ctx.worker_index)):
        if update.step % 20 == 0:
            rate = args.batch_size * len(update.towers) * update.step / (time.monotonic() - began)
            print(f"step {first + update.step}, loss = {update.loss.item():.2f} ({rate:.0f} examples/sec)", flush=True)

    print(f"Test accuracy: {accuracy(model, *test):.4f}", flush=True)
    with ctx.ema() if ctx.has_averages else towers.ema():
        print(f"Test accuracy with averaged parameters: {accuracy(model, *test):.4f}", flush=True)


if __name__ == "__main__":
    main()
