"""WHAT does in-graph replication learn? Document 000's recipe from one client that feeds all towers; told in lab.json.

Started by lab/measuring/whole_runs through `paceline run`: worker 0 is the client, the others only join. Each tower
gets the batches that a worker of lab/scripts/accuracy_script would have taken itself, so that the bits must be those
of sync workers. The client's steps are divided as lab/scripts/feeder_script does, so that its share can be told.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.cluster.discovery import discover
from paceline.lab.scripts.accuracy_script import Course, Digits, arguments, learned
from paceline.lab.scripts.curves import TOLD
from paceline.lab.scripts.feeding import PICK, UPDATE, FeederClock
from paceline.models.mlp import document_000

Picked = TypeVar("Picked")


@paceline.op
def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(images), labels)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve, or train and tell."""
    args = arguments(argv)
    torch.set_num_threads(1)
    server = paceline.Server()
    if server.task.index > 0:
        server.join()
        return
    assignment = discover(argv=[])
    assert assignment is not None and assignment.settings.run_dir is not None, "start this with paceline run"
    devices = [f"/job:worker/task:{index}" for index in server.cluster.task_indices("worker")[1:]]
    digits, course, epochs_s, clock = Digits(), Course(args), [], FeederClock()
    clock.watch_the_client()
    model = document_000(args.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    with paceline.towers(model, optimizer, devices) as towers:
        for number in range(args.epochs):
            began_s = time.perf_counter()
            each = (digits.epoch(args, tower, number) for tower in range(len(devices)))
            for batches in picked(clock, zip(*each, strict=True)):
                with clock.part(UPDATE):
                    towers.step(loss, batches)
            epochs_s.append(time.perf_counter() - began_s)
            if len(epochs_s) == 1 and args.epochs > 1:
                clock.taken()  # connections, and whatever else is done once
            if course.is_due(number):
                course.keep(model, (number + 1) * args.batches, sum(epochs_s))
    timed = max(1, args.epochs - 1) * args.batches
    client_us = {part: 1e6 * seconds / timed for part, seconds in clock.taken().items()}
    told = learned([digits.point(model, args.epochs * args.batches)], epochs_s, course.told(digits))
    told = msgspec.structs.replace(told, client_us=client_us)
    Path(assignment.settings.run_dir, TOLD).write_bytes(msgspec.json.encode(told))


def picked(clock: FeederClock, batches: Iterator[Picked]) -> Iterator[Picked]:
    """The same batches; that they are looked up is a part of the client's step."""
    while True:
        with clock.part(PICK):
            found = next(batches, None)
        if found is None:
            return
        yield found


if __name__ == "__main__":
    main()
