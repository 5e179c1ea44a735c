"""The peer PyTorch DDP on the gloo backend: document 000's recipe, one process a rank, gradients averaged every step.

By hand, from the root of the repository:  torchrun --nproc-per-node 2 bench/peers/ddp_gloo.py --steps 300
The lab starts the ranks itself and speaks with each over stdin and stdout (src/paceline/lab/processes.py).

Written as PyTorch's DDP tutorial does it (init_process_group from the environment, DistributedDataParallel around
the model), with the options that its documentation recommends for speed where they apply: gradients are views of
the buckets, and the graph is static. (The model has no buffers, so none are broadcast.)
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

BATCH = 100
LEARNING_RATE = 0.001


def model_of_document_000() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(784, 100), nn.Sigmoid(), nn.Linear(100, 10))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.normal_(0.0, 1.0, generator=generator)
                layer.bias.zero_()
    return model


def load(folder: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The images that the lab wrote down; by hand random ones, which cost the same."""
    if folder is None:
        generator = torch.Generator().manual_seed(0)
        return torch.rand(55_000, 784, generator=generator), torch.randint(0, 10, (55_000,), generator=generator)
    return torch.from_numpy(np.load(folder / "x.npy")), torch.from_numpy(np.load(folder / "y.npy"))


def trainer(folder: Path | None) -> Callable[[int], None]:
    images, labels = load(folder)
    ddp = DistributedDataParallel(model_of_document_000(), gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(dist.get_rank())
    count = len(images)

    def train(steps: int) -> None:
        for _ in range(steps):
            batch = torch.randint(0, count, (BATCH,), generator=generator)
            optimizer.zero_grad()
            functional.cross_entropy(ddp(images[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return train


def say(reply: dict[str, object]) -> None:
    print(json.dumps(reply), flush=True)


def timed(train: Callable[[int], None], untimed_steps: int, steps: int) -> float:
    """The time of a step in microseconds."""
    train(untimed_steps)
    began_s = time.perf_counter()
    train(steps)
    return 1e6 * (time.perf_counter() - began_s) / steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="folder with x.npy and y.npy")
    parser.add_argument("--steps", type=int, help="run so many steps once and print the time of one")
    args = parser.parse_args()
    if not (dist.is_available() and dist.is_gloo_available()):
        say({"missing": "this PyTorch was built without gloo"})
        return
    torch.set_num_threads(1)
    if sys.platform == "linux" and os.environ["MASTER_ADDR"] in ("127.0.0.1", "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    train = trainer(args.data)
    if args.steps is not None:
        say({"us": timed(train, 50, args.steps)})
    else:
        say({})
        for line in iter(sys.stdin.readline, ""):
            say({"us": timed(train, *map(int, line.split()))})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
