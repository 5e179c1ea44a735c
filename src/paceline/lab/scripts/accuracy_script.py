"""HOW does document 000's network learn? Its recipe with a seed, on a cluster or in one process; told in lab.json.

Started by lab/measuring/whole_runs: through `paceline run`, or alone with `--told FILE`, and then it is plain PyTorch
without anything of paceline's training. Must never draw a batch from what a cluster decides: worker w of a seed sees
the same batches wherever it runs, so that runs may be compared bit for bit.

Every worker passes over the whole set, in an order of its own (document 000). `--average N` alone: every update is the
mean of the gradients of the first N workers' batches, which is what sync with N workers must equal (I4).
"""

import argparse
import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.datasets import mnist
from paceline.lab.scripts import curves
from paceline.lab.scripts.curves import TOLD
from paceline.lab.scripts.learned import Learned, Point
from paceline.lab.scripts.mnist_script import folder_of
from paceline.launchers.demos.mnist import accuracy
from paceline.models.mlp import document_000

BATCH = 100
LOOKS = 10  # at a model on its way, while it makes --epochs
Batch = tuple[torch.Tensor, torch.Tensor]


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(1)
    if args.told is None:
        together(args)
    else:
        args.told.write_bytes(msgspec.json.encode(alone(args)))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1, help="of the first weights, and of the order of the images")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batches", type=int, default=550, help="of 100 images, in an epoch")
    parser.add_argument("--times", type=int, default=1, help="alone: as many times --epochs, with a point after each")
    parser.add_argument("--average", type=int, default=1, help="alone: the mean of so many gradients an update")
    parser.add_argument("--late-s", type=float, default=0.0, help="every worker but the first joins so much later")
    parser.add_argument("--own-device", action="store_true", help="each worker computes on the device it was given")
    parser.add_argument("--told", type=Path, help="alone: where to write what was learned")
    return parser.parse_args(argv)


class Digits:
    """MNIST as document 000 splits it."""

    def __init__(self) -> None:
        split = mnist.load().tensorflow_split()
        self._images, self._labels = torch.from_numpy(split.train_x), torch.from_numpy(split.train_y)
        self._test = torch.from_numpy(split.test_x), torch.from_numpy(split.test_y)

    def epoch(self, args: argparse.Namespace, worker: int, number: int) -> Iterator[Batch]:
        """One worker's batches of one epoch."""
        generator = torch.Generator().manual_seed((args.seed * 1000 + worker) * 10_000 + number)
        order = torch.randperm(len(self._labels), generator=generator)
        for chosen in torch.split(order, BATCH)[: args.batches]:
            yield self._images[chosen], self._labels[chosen]

    def point(self, model: nn.Module, updates: int) -> Point:
        values = list(model.state_dict().values())
        digest = hashlib.sha256(b"".join(value.cpu().numpy().tobytes() for value in values))
        images, labels = (each.to(values[0].device) for each in self._test)
        return Point(updates, accuracy(model, images, labels), digest.hexdigest())


class Course:
    """Copies of a model on its way. They are evaluated when all is trained: no evaluation is in what is timed, and
    nobody waits for one."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._seed = args.seed
        self._every: int = max(1, args.epochs // LOOKS)
        self._copies: list[tuple[float, int, dict[str, torch.Tensor]]] = []

    def is_due(self, number: int) -> bool:
        """After epoch `number`, counted from 0."""
        return (number + 1) % self._every == 0

    def keep(self, model: nn.Module, updates: int, at_s: float) -> None:
        self._copies.append((at_s, updates, {name: value.clone() for name, value in model.state_dict().items()}))

    def told(self, digits: Digits) -> list[curves.Point]:
        shown, points = document_000(self._seed), []
        for at_s, updates, values in self._copies:
            shown.load_state_dict(values)
            points.append(curves.Point(at_s, updates, digits.point(shown, updates).accuracy))
        return points


def alone(args: argparse.Namespace) -> Learned:
    """One process. Nothing here knows of a cluster."""
    digits, course = Digits(), Course(args)
    model = document_000(args.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    points, epochs_s = [], []
    for number in range(args.epochs * args.times):
        began_s = time.perf_counter()
        for batches in zip(*(digits.epoch(args, worker, number) for worker in range(args.average)), strict=True):
            average(model, batches)
            optimizer.step()
        epochs_s.append(time.perf_counter() - began_s)
        if course.is_due(number):
            course.keep(model, (number + 1) * args.batches, sum(epochs_s))
        if (number + 1) % args.epochs == 0:
            points.append(digits.point(model, (number + 1) * args.batches))
    return learned(points, epochs_s, course.told(digits))


def learned(points: list[Point], epochs_s: Sequence[float], course: list[curves.Point]) -> Learned:
    """With the first epoch on its own, as the documents have it."""
    later = epochs_s[1:] or epochs_s
    return Learned(points, epochs_s[0], sum(later) / len(later), course, BATCH)


def average(model: nn.Module, batches: Sequence[Batch]) -> None:
    """The gradient of one batch, or the mean of several: their sum in this order, divided once."""
    gradients = []
    for images, labels in batches:
        model.zero_grad()
        cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        gradients.append([parameter.grad for parameter in model.parameters()])
    if len(batches) == 1:
        return
    for parameter, first, *others in zip(model.parameters(), *gradients, strict=True):
        parameter.grad = sum(others, first) / len(batches)


def together(args: argparse.Namespace) -> None:
    """One worker of a cluster. What each has when it ends is logged; the chief tells what all of them made, and what
    it had itself on the way."""
    ctx = paceline.init()
    digits, course = Digits(), Course(args)
    device = ctx.device if args.own_device else torch.device("cpu")
    if not ctx.is_chief:
        time.sleep(args.late_s)  # this is what is measured: a worker that somebody has started later
    model: nn.Module = document_000(args.seed).to(device)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=args.lr))
    began_s = time.perf_counter()
    for number in ctx.epochs(args.epochs):
        for images, labels in digits.epoch(args, ctx.worker_index, number):
            optimizer.zero_grad()
            cross_entropy(model(images.to(device)), labels.to(device)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if ctx.is_chief and course.is_due(number):
            updates = ctx.global_step  # takes the answer to the last push, and with it the parameters
            course.keep(model, updates, time.perf_counter() - began_s)
    ctx.log({"accuracy": digits.point(model, 0).accuracy})
    ctx.barrier()  # everybody's updates are in, and pulled
    if ctx.is_chief:
        told = Learned([digits.point(model, ctx.global_step)], course=course.told(digits), batch=BATCH)
        (folder_of(ctx) / TOLD).write_bytes(msgspec.json.encode(told))


if __name__ == "__main__":
    main()
