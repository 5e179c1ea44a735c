"""HOW does a mode learn? MNIST until the chief sees a test accuracy, then a while longer; its course in lab.json.

Started by lab/measuring/whole_runs through `paceline run`, and may be started so by hand. All modes take the same
script. Must never let the others wait for an evaluation: the chief looks in ctx.pause(), and at copies.

1. the chief trains, and copies its parameters now and then, until a look finds the accuracy, or time is up,
2. it trains a fixed number of steps more, and copies them at equal distances,
3. it tells the others to stop, evaluates the copies, and writes what it found.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import paceline
from paceline.datasets import mnist
from paceline.lab.scripts import curves
from paceline.launchers.demos.mnist import Digits, accuracy, as_it_is
from paceline.models.mlp import mlp

BATCH = 100
COPY_STEPS = 50  # a multiple of every H that is measured: between exchanges a worker's parameters are its own
LOOK_S = 0.25
TELL_STEPS = 10  # how often the others look whether the chief has ended
STOP = "stop"

Step = Callable[[], float]


class Copy(NamedTuple):
    """The chief's parameters at a moment."""

    at_s: float
    updates: int
    values: list[torch.Tensor]


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    ctx = paceline.init()
    data = mnist.load()
    model, step = prepared(ctx, data, args.lr)
    folder = folder_of(ctx)
    ctx.barrier()  # a mode is not judged by who came first
    if ctx.is_chief:
        chief = Chief(ctx, model, step, data)
        told = chief.train(args, folder / STOP)
        ctx.log({"accuracy": told.best or 0.0})
        (folder / curves.TOLD).write_bytes(msgspec.json.encode(told))
    else:
        follow(step, folder / STOP, args.limit_s)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", type=float, default=0.97)
    parser.add_argument("--limit-s", type=float, default=40.0, help="for the accuracy to be reached")
    parser.add_argument("--tail", type=int, default=10, help="evaluations after that")
    parser.add_argument("--tail-steps", type=int, default=100, help="of the chief, between two of them")
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def prepared(ctx: Any, data: mnist.Mnist, lr: float, momentum: float = 0.0) -> tuple[nn.Module, Step]:
    """The model, and a function that trains one batch and returns its loss."""
    train = Digits(torch.from_numpy(data.train_x), torch.from_numpy(data.train_y))
    loader: Any = DataLoader(train, batch_size=BATCH, shuffle=True, collate_fn=as_it_is)
    model: nn.Module = mlp(hidden=100, activation="relu")
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    batches = endless(loader)

    def step() -> float:
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return model, step


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def folder_of(ctx: Any) -> Path:
    """The run folder; this script is nothing without one."""
    if ctx.run_dir is None:
        raise SystemExit("start this script with paceline run: what it tells goes into the run folder")
    return Path(ctx.run_dir)


def follow(step: Step, stop: Path, limit_s: float) -> None:
    """Train until the chief has ended, however it did."""
    deadline_s = time.monotonic() + 3 * limit_s + 30.0
    while time.monotonic() < deadline_s and not stop.exists():
        for _ in range(TELL_STEPS):
            step()


class Chief:
    """Trains, copies, looks."""

    def __init__(self, ctx: Any, model: nn.Module, step: Step, data: mnist.Mnist) -> None:
        self._ctx = ctx
        self._model = model
        self._step = step
        self._test = (torch.from_numpy(data.test_x), torch.from_numpy(data.test_y))
        self._shown = mlp(hidden=100, activation="relu")  # holds the copy that is evaluated
        self._losses: list[float] = []
        self._began_s = time.perf_counter()

    def train(self, args: argparse.Namespace, stop: Path) -> curves.Curve:
        points, window = self._until(args.target, args.limit_s)  # 1
        skip = len(self._losses)
        copies = []
        for _ in range(args.tail):  # 2
            self._run(args.tail_steps)
            copies.append(self._copy())
        seconds, updates = self._now_s(), self._ctx.global_step
        stop.touch()  # 3
        with self._ctx.pause():
            reached = [point for point in map(self._evaluate, window) if point.accuracy >= args.target]
            tail = [self._evaluate(copy) for copy in copies]
        return curves.Curve(
            seconds=seconds,
            updates=updates,
            reached=reached[0] if reached else None,
            points=points,
            tail=tail,
            jitter=curves.jitter(self._losses, skip),
        )

    def _until(self, target: float, limit_s: float) -> tuple[list[curves.Point], list[Copy]]:
        """What the looks found, and the copies since the last look but one: among them is the first at the target."""
        points: list[curves.Point] = []
        window: list[Copy] = []
        look_s = LOOK_S
        while not points or (points[-1].accuracy < target and points[-1].at_s < limit_s):
            window = []
            while not window or window[-1].at_s < look_s:
                self._run(COPY_STEPS)
                window.append(self._copy())
            with self._ctx.pause():
                points.append(self._evaluate(window[-1]))
            look_s = self._now_s() + LOOK_S
        return points, window

    def _run(self, count: int) -> None:
        for _ in range(count):
            self._losses.append(self._step())

    def _copy(self) -> Copy:
        updates = self._ctx.global_step  # takes the answer to the last push, and with it the parameters
        return Copy(self._now_s(), updates, [value.detach().clone() for value in self._model.parameters()])

    def _evaluate(self, copy: Copy) -> curves.Point:
        with torch.no_grad():
            for parameter, value in zip(self._shown.parameters(), copy.values, strict=True):
                parameter.copy_(value)
        return curves.Point(copy.at_s, copy.updates, accuracy(self._shown, *self._test))

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s


if __name__ == "__main__":
    main()
