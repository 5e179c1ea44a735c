"""HOW long is a step of towers in one process? Each has a batch of its own; timed as worker_script's steps are.

Run by lab/measuring/starting, one process. Models, rates and data are those of lab/scripts/worker_script, so that only
the towers differ.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import paceline
from paceline.lab.scripts.orders import Orders
from paceline.lab.scripts.worker_script import BATCH, CONVOLUTIONS, loaded, recipe


def main(argv: Sequence[str] | None = None) -> None:
    """Load, make the towers, then obey."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, help="folder with x.npy and y.npy")
    parser.add_argument("--what", choices=["", CONVOLUTIONS], default="")
    parser.add_argument("--batch", type=int, default=BATCH, help="of each tower")
    parser.add_argument("--towers", type=int, default=1)
    args = parser.parse_args(argv)
    orders = Orders()
    torch.set_num_threads(1)
    images, labels = loaded(args.data)
    model, rate = recipe(args.what)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(0)
    with paceline.towers(model, optimizer, devices(args.towers)) as towers:

        def steps(count: int) -> None:
            for _ in range(count):
                chosen = [torch.randint(0, len(images), (args.batch,), generator=generator) for _ in range(len(towers))]
                towers.step(loss, [(images[each], labels[each]) for each in chosen])

        orders.obey(steps)


def loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(images), labels)


def devices(count: int) -> list[str]:
    """Cards in turn; without any, the CPU for each."""
    cards = torch.cuda.device_count()
    return [f"/gpu:{index % cards}" if cards else "/cpu:0" for index in range(count)]


if __name__ == "__main__":
    main()
