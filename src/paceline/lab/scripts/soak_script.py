"""WHAT trains in a soak? A linear model that is soon as good as it gets, until a given time; the chief tells its loss.

Started by lab/measuring/soaking through `paceline run`. Inputs are drawn anew for every step, so the loss stays where
it is once it has come there, however long the run: runs of any length can be compared.
"""

import argparse
import time
from collections.abc import Sequence

import msgspec
import torch
from torch import nn

import paceline
from paceline.lab.matrices.soak import Told
from paceline.lab.scripts.curves import TOLD
from paceline.lab.scripts.mnist_script import folder_of
from paceline.telemetry.faults import began_s
from paceline.telemetry.paths import RunPaths

INPUTS, OUTPUTS = 784, 100  # 314 kB of parameters
BATCH, LEARNING_RATE, NOISE = 100, 0.05, 0.5
TEST = 4000


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--until-s", type=float, required=True, help="after the run began")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    ctx = paceline.init()
    folder = folder_of(ctx)
    until_s = began_s(RunPaths(folder)) + args.until_s
    truth = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(1)) / INPUTS**0.5
    torch.manual_seed(2)
    model = nn.Linear(INPUTS, OUTPUTS)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    model, optimizer = ctx.prepare(model, optimizer)
    chance = torch.Generator().manual_seed(time.time_ns())  # after a restart other inputs, from the same well
    while time.time() < until_s:
        optimizer.zero_grad()
        loss_of(model, truth, BATCH, chance).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    ctx.barrier()
    ctx.pull()
    if ctx.is_chief:
        with torch.no_grad():
            loss = loss_of(model, truth, TEST, torch.Generator().manual_seed(3)).item()
        ctx.log({"loss": loss})
        (folder / TOLD).write_bytes(msgspec.json.encode(Told(loss)))


def loss_of(model: nn.Module, truth: torch.Tensor, count: int, chance: torch.Generator) -> torch.Tensor:
    """Half the squared error of an output, of `count` fresh inputs."""
    inputs = torch.randn(count, INPUTS, generator=chance)
    wanted = inputs @ truth.T + NOISE * torch.randn(count, OUTPUTS, generator=chance)
    error: torch.Tensor = model(inputs) - wanted
    return error.square().sum(1).mean() / 2


if __name__ == "__main__":
    main()
