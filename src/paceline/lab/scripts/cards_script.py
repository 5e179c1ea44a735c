"""HOW SOON does a network of photographs reach a score? Document 001's CIFAR-10, on towers or as a worker; in lab.json.

Started by lab/measuring/whole_runs: alone with `--told FILE` (and `--towers N`), or through `paceline run`. The
photographs are a made-up set of CIFAR-10's format, so nothing is downloaded. Training must never wait for an
evaluation: parameters are copied now and then, and looked at when all of it is over.

1. warm each device up with a model that is thrown away, 2. wait until everybody has, 3. train, 4. look at the copies.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.datasets import cifar10
from paceline.datasets.distort import centred
from paceline.lab.matrices.cards import BEGAN_S, DEVICE, ENDED_S, SAMPLES
from paceline.lab.scripts.curves import TOLD, Curve, Point, Timed, jitter
from paceline.lab.scripts.mnist_script import folder_of
from paceline.lab.scripts.towers_script import devices
from paceline.models.cnn import Cnn

TESTED = 500
WARM_UP = 10  # steps that are not in the throughput; as many with a model of its own come before
Step = Callable[[], float]
Batch = tuple[torch.Tensor, torch.Tensor]


class Copy(NamedTuple):
    at_s: float
    updates: int
    values: list[torch.Tensor]


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(1)
    if args.told is None:
        together(args)
    else:
        args.told.write_bytes(msgspec.json.encode(alone(args)))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--towers", type=int, default=1, help="alone: on so many devices")
    parser.add_argument("--steps", type=int, default=400, help="of the towers together, or of each worker")
    parser.add_argument("--batch", type=int, default=32, help="of each tower or worker")
    parser.add_argument("--channels", type=int, default=16, help="of a convolution; the tutorial has 64")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=5, help="steps between two copies")
    parser.add_argument("--score", type=float, default=0.9, help="the accuracy to reach")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--told", type=Path, help="alone: where to write the course")
    args = parser.parse_args(argv)
    if args.steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP}: the first ones warm up")
    return args


class Photographs:
    """Batches drawn by a seed, and how many of the test set a model knows."""

    def __init__(self, seed: int) -> None:
        data = cifar10.load()
        self._train = torch.from_numpy(centred(data.train_x)), torch.from_numpy(data.train_y)
        self._test = torch.from_numpy(centred(data.test_x))[:TESTED], torch.from_numpy(data.test_y)[:TESTED]
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self, size: int) -> Batch:
        chosen = torch.randint(0, len(self._train[1]), (size,), generator=self._generator)
        return self._train[0][chosen], self._train[1][chosen]

    def accuracy(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(self._test[0]).argmax(1) == self._test[1]).float().mean())


def alone(args: argparse.Namespace) -> Curve:
    """One process, with a tower on each device."""
    photographs = Photographs(args.seed)
    model = Cnn(args.channels, seed=args.seed)
    optimizer = torch.optim.SGD(model.groups(), lr=args.lr)
    cards = torch.cuda.device_count()
    for index in range(args.towers):
        warm_up(args, photographs, torch.device("cuda", index % cards) if cards else torch.device("cpu"))
    with paceline.towers(model, optimizer, devices(args.towers)) as towers:

        def step() -> float:
            return float(towers.step(loss, [photographs.batch(args.batch) for _ in range(len(towers))]))

        told = course(args, photographs, model, step, lambda: towers.step_count)
        return msgspec.structs.replace(told, device=" ".join(towers.devices))


def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(images), labels)


def warm_up(args: argparse.Namespace, photographs: Photographs, device: torch.device) -> None:
    """1. What a device does only once: first kernels, first memory. Nothing is learned by it."""
    model = Cnn(args.channels).to(device)
    for _ in range(WARM_UP):
        images, labels = photographs.batch(args.batch)
        loss(model, images.to(device), labels.to(device)).backward()  # type: ignore[no-untyped-call]


def together(args: argparse.Namespace) -> None:
    """One worker of a cluster; the chief tells how it went."""
    ctx = paceline.init()
    photographs = Photographs(args.seed * 1000 + ctx.worker_index)
    network = Cnn(args.channels, seed=args.seed).to(ctx.device)
    model, optimizer = ctx.prepare(network, torch.optim.SGD(network.groups(), lr=args.lr))

    def step() -> float:
        images, labels = photographs.batch(args.batch)
        optimizer.zero_grad()
        found = loss(model, images.to(ctx.device), labels.to(ctx.device))
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return found.item()

    warm_up(args, photographs, ctx.device)
    ctx.barrier()  # 2
    told = course(args, photographs, model, step, lambda: ctx.global_step, looks=ctx.is_chief)
    assert told.timed is not None
    window = {SAMPLES: told.timed.samples, BEGAN_S: told.timed.began_s, ENDED_S: told.timed.ended_s}
    ctx.log({**window, DEVICE: float(ctx.device.type == "cuda")})
    if ctx.is_chief:
        (folder_of(ctx) / TOLD).write_bytes(msgspec.json.encode(told))


def course(
    args: argparse.Namespace,
    photographs: Photographs | None,
    model: nn.Module,
    step: Step,
    updates: Callable[[], int],
    looks: bool = True,
) -> Curve:
    """3 and 4. All steps; who `looks` has photographs."""
    copies, losses = [], []
    warm_s = 0.0
    began_s = time.perf_counter()
    for number in range(1, args.steps + 1):
        losses.append(step())
        if number == WARM_UP:
            warm_s = time.monotonic()  # of all processes of a machine the same clock
        if looks and number % args.every == 0:
            count = updates()  # takes the answer to the last push, and with it the parameters
            values = [value.detach().to("cpu", copy=True) for value in model.parameters()]
            copies.append(Copy(time.perf_counter() - began_s, count, values))
    total = updates()
    seconds = time.perf_counter() - began_s
    timed = Timed((args.steps - WARM_UP) * args.batch * args.towers, warm_s, time.monotonic())
    points = evaluated(photographs, Cnn(args.channels), copies) if photographs is not None else []
    reached = next((point for point in points if point.accuracy >= args.score), None)
    return Curve(
        seconds=seconds,
        updates=total,
        reached=reached,
        points=points,
        tail=[],
        jitter=jitter(losses, len(losses) // 2),
        timed=timed,
    )


def evaluated(photographs: Photographs, shown: nn.Module, copies: Sequence[Copy]) -> list[Point]:
    """What the copies know; `shown` holds one after the other."""
    points = []
    for copy in copies:
        with torch.no_grad():
            for parameter, value in zip(shown.parameters(), copy.values, strict=True):
                parameter.copy_(value)
        points.append(Point(copy.at_s, copy.updates, photographs.accuracy(shown)))
    return points


if __name__ == "__main__":
    main()
