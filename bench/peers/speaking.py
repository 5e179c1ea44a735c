"""HOW does a peer speak with the lab? Orders on stdin, times on stdout (lab/measuring/processes.py), and the data.

Used by every peer in this folder, whose own folder is the first on Python's path. Needs nothing but numpy.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

BATCH = 100
LEARNING_RATE = 0.001
SIZES = (784, 100, 10)
LOOKED_AT = 2000  # images, for the loss that is printed by hand

Train = Callable[[int], None]
Parameters = Callable[[], list[np.ndarray]]  # weights (inputs × outputs), bias, weights, bias, as this worker sees them


def options(description: str) -> argparse.ArgumentParser:
    """What every peer may be told."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with x.npy and y.npy; left out: random images")
    parser.add_argument("--steps", type=int, help="run so many steps once, print the time of one and the losses")
    return parser


def add_tasks(parser: argparse.ArgumentParser) -> None:
    """What a peer with ps and workers may be told besides."""
    parser.add_argument("--job", choices=["ps", "worker"], default="worker")
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--ps-hosts", default="")
    parser.add_argument("--worker-hosts", default="")


def load(folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """The images that the lab wrote down; by hand random ones, which cost the same."""
    if folder is None:
        chance = np.random.default_rng(0)
        return chance.random((55_000, SIZES[0]), np.float32), chance.integers(0, 10, 55_000)
    return np.load(folder / "x.npy"), np.load(folder / "y.npy")


def take_stdout() -> Callable[[dict[str, object]], None]:
    """How to answer; what anybody prints goes to stderr, the log, from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(reply: dict[str, object]) -> None:
        answers.write(json.dumps(reply) + "\n")
        answers.flush()

    return say


def missing(what: str) -> None:
    """This peer cannot run here; the lab says so and goes on with the rest."""
    print(json.dumps({"missing": f"{what} is not installed; make peers"}), flush=True)


def obey(
    say: Callable[[dict[str, object]], None], train: Train, parameters: Parameters, args: argparse.Namespace
) -> None:
    """Until the lab closes stdin: so many steps untimed, then so many timed. By hand: once, with the losses."""
    before = parameters()
    train(1)
    check_changed(before, parameters())
    if args.steps is not None:
        us, data = timed(train, 50, args.steps), load(args.data)
        say({"us": us, "loss before": loss(before, *data), "loss after": loss(parameters(), *data)})
        return
    say({})
    for line in iter(sys.stdin.readline, ""):
        say({"us": timed(train, *map(int, line.split()))})


def timed(train: Train, untimed_steps: int, steps: int) -> float:
    """The time of a step in microseconds."""
    train(untimed_steps)
    began_s = time.perf_counter()
    train(steps)
    return 1e6 * (time.perf_counter() - began_s) / steps


def check_changed(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    """A peer that is fast because it does nothing is none."""
    if [each.shape for each in before] != [(784, 100), (100,), (100, 10), (10,)]:
        raise SystemExit("This is not document 000's model.")
    if not all(np.isfinite(each).all() for each in after):
        raise SystemExit("A parameter is not finite after the first step.")
    if any(np.array_equal(old, new) for old, new in zip(before, after, strict=True)):
        raise SystemExit("One step left a parameter as it was: nothing is trained.")


def loss(parameters: list[np.ndarray], images: np.ndarray, labels: np.ndarray) -> float:
    """Of document 000's model, the mean over some images."""
    images, labels = images[:LOOKED_AT], labels[:LOOKED_AT]
    hidden_weights, hidden_bias, weights, bias = (each.astype(np.float64) for each in parameters)
    hidden = 1 / (1 + np.exp(-(images @ hidden_weights + hidden_bias)))
    logits = hidden @ weights + bias
    logits -= logits.max(axis=1, keepdims=True)
    return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(labels)), labels]))
