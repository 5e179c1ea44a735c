"""In-graph replication (documents 000, 002, 004): one client hands out data and values, the workers only join.

    paceline run --workers 3 in_graph.py                       worker:0 is the client, the other two have a tower each

    python in_graph.py --job_name=worker --task_index=0        by hand, with the workers of settings.py
    python in_graph.py --job_name=worker --task_index=1
    python in_graph.py --job_name=client

The recipe is document 000's: try `--lr=0.01 --batches=55` for the same curve at a tenth of the time, and
`--updates=async`. Sync ends at the accuracy of tfdist_between_sync.py, async at that of tfdist_between.py: what differs
is that here one process holds all data and hands out every batch.
"""

import argparse
import time
from collections.abc import Iterator

import torch
from settings import worker_svrs
from torch import nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.datasets import mnist
from paceline.errors import UsageError
from paceline.models.mlp import document_000

BATCH = 100


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job_name", choices=["worker", "client"], help="by hand only; `paceline run` knows it")
    parser.add_argument("--task_index", type=int, default=0)
    parser.add_argument("--worker_hosts", default=",".join(worker_svrs), help="by hand only")
    parser.add_argument("--updates", choices=["sync", "async"], default="sync")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batches", type=int, default=550, help="of 100 images, for each tower in an epoch")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=1, help="of the first weights")
    return parser.parse_known_args()[0]


@paceline.op
def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What every tower computes; a worker finds it by its name, because it runs this file, too."""
    return cross_entropy(model(images), labels)


def find_workers(args: argparse.Namespace) -> list[str]:
    """The devices of all workers, if this process is the client; a worker serves in join() until the end."""
    if args.job_name is None:
        server = paceline.Server()  # the one that `paceline run` has started
        if server.task.index > 0:
            server.join()
            raise SystemExit
        towers = server.cluster.task_indices("worker")[1:]
        if not towers:
            raise UsageError(
                "in_graph.py needs at least 2 workers: worker:0 is the client, each other one has a tower."
            )
        return [f"/job:worker/task:{index}" for index in towers]
    cluster = {"worker": args.worker_hosts.split(",")}
    if args.job_name == "worker":
        paceline.Server(cluster, job_name="worker", task_index=args.task_index).join()
        raise SystemExit
    paceline.connect(cluster)
    return [f"/job:worker/task:{index}" for index in range(len(cluster["worker"]))]


def batches(digits: mnist.Split, towers: int, count: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A batch for each tower in turn; every tower has the whole set, in an order of its own."""
    images, labels = torch.from_numpy(digits.train_x), torch.from_numpy(digits.train_y)
    orders = [
        torch.randperm(len(images), generator=torch.Generator().manual_seed(seed * towers + n)) for n in range(towers)
    ]
    for number in range(count):
        for order in orders:
            chosen = order[number * BATCH : (number + 1) * BATCH]
            yield images[chosen], labels[chosen]


def main() -> None:
    args = arguments()
    devices = find_workers(args)
    digits = mnist.load().tensorflow_split()
    model = document_000(args.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    towers = paceline.towers(model, optimizer, devices, variables="/cpu:0", mode=args.updates)
    print(towers, flush=True)

    for epoch in range(args.epochs):
        began = time.monotonic()
        for update in towers.train(loss, batches(digits, len(towers), args.batches, seed=epoch)):
            cost = update.loss
        print(
            f"Epoch {epoch + 1}: cost {cost.item():.4f}, {towers.step_count} updates, {time.monotonic() - began:.2f} s",
            flush=True,
        )

    with torch.no_grad():
        right = model(torch.from_numpy(digits.test_x)).argmax(1) == torch.from_numpy(digits.test_y)
    print(f"Test-Accuracy: {right.float().mean().item():.2f}", flush=True)


if __name__ == "__main__":
    main()
