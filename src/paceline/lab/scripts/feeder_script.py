"""WHAT do the processes of an in-graph scenario do? Workers join; the client feeds them and is timed.

Run by lab/measuring/starting: `joins` in every worker, `client` once. The model, the rate and the batches are those of
lab/scripts/worker_script, so that only who feeds whom differs. Must never hold data in a worker.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import paceline
from paceline.ingraph.neighbours import Neighbours, connect
from paceline.lab.scripts.feeding import PICK, UPDATE, FeederClock
from paceline.lab.scripts.orders import Orders
from paceline.lab.scripts.worker_script import BATCH, CONVOLUTIONS, loaded, recipe


@paceline.op
def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(images), labels)


def main(argv: Sequence[str] | None = None) -> None:
    """Join, or load the data and obey."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["joins", "client"])
    parser.add_argument("--data", type=Path, required=True, help="folder with x.npy and y.npy")
    parser.add_argument("--what", choices=["", CONVOLUTIONS], default="", help="document 000's recipe if left out")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--worker-hosts", default="", help="of the workers, for the client")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.role == "joins":
        paceline.Server().join()
        return
    orders, clock = Orders(), FeederClock()
    clock.watch_the_client()
    feed(orders, clock, connect({"worker": args.worker_hosts.split(",")}), args)


def feed(orders: Orders, clock: FeederClock, here: Neighbours, args: argparse.Namespace) -> None:
    """One batch for each worker, all of them from here."""
    tasks = here.cluster.workers
    images, labels = loaded(args.data)
    generator = torch.Generator().manual_seed(0)
    model, rate = recipe(args.what)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with paceline.towers(model, optimizer, [task.device for task in tasks]) as towers:

        def steps(count: int) -> None:
            for _ in range(count):
                with clock.part(PICK):
                    chosen = [torch.randint(0, len(images), (args.batch,), generator=generator) for _ in tasks]
                    batches = [(images[each], labels[each]) for each in chosen]
                with clock.part(UPDATE):
                    towers.step(loss, batches)

        orders.obey(steps, parts=clock.taken)


if __name__ == "__main__":
    main()
