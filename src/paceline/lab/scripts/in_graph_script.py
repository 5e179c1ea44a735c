"""WHAT does in-graph replication learn? Document 000's recipe from one client that feeds all towers; told in lab.json.

Started by lab/measuring/whole_runs through `paceline run`: worker 0 is the client, the others only join. Each tower
gets the batches that a worker of lab/scripts/accuracy_script would have taken itself, so that the bits must be those
of sync workers.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.cluster.discovery import discover
from paceline.lab.scripts.accuracy_script import Digits, arguments, learned
from paceline.lab.scripts.curves import TOLD
from paceline.models.mlp import document_000


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
    digits, epochs_s = Digits(), []
    model = document_000(args.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    with paceline.towers(model, optimizer, devices) as towers:
        for number in range(args.epochs):
            began_s = time.perf_counter()
            for batches in zip(*(digits.epoch(args, tower, number) for tower in range(len(devices))), strict=True):
                towers.step(loss, batches)
            epochs_s.append(time.perf_counter() - began_s)
    told = learned([digits.point(model, args.epochs * args.batches)], epochs_s)
    Path(assignment.settings.run_dir, TOLD).write_bytes(msgspec.json.encode(told))


if __name__ == "__main__":
    main()
