"""Print what a worker draws from every generator, the parameters it begins with, and the samples it is given."""

import argparse
import random
import sys
from pathlib import Path

import numpy
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

import paceline

SIZE = 24
SAMPLERS = {
    "shuffle": lambda: {"shuffle": True},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * SIZE, SIZE, replacement=False)},
    "replacement": lambda: {"sampler": RandomSampler(range(SIZE), replacement=True)},
}
parser = argparse.ArgumentParser()
parser.add_argument("--manual", type=int)
parser.add_argument("--die", type=Path, help="worker 1 ends badly once, after this file was made")
args = parser.parse_args()
if args.manual is not None:
    torch.manual_seed(args.manual)
ctx = paceline.init()


def draws() -> list[float]:
    return [torch.rand(()).item(), float(numpy.random.rand()), random.random()]


def tell(what: str, values: object) -> None:
    print(f"seen {what}: {values}", flush=True)


own = torch.Generator()
tell("draws", draws())
model = torch.nn.Linear(3, 2)
tell("made", model.weight.flatten().tolist())
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
loader = DataLoader(TensorDataset(torch.arange(SIZE)), batch_size=4, shuffle=True)
model, optimizer, loader = ctx.prepare(model, optimizer, loader)
tell("begins", model.weight.flatten().tolist())
others = {name: ctx.prepare(DataLoader(TensorDataset(torch.arange(SIZE)), 4, **of())) for name, of in SAMPLERS.items()}
for name, each in others.items():
    drawn = []
    for (batch,) in each:
        drawn.append(batch.tolist())
        torch.rand(3 + ctx.worker_index)  # as dropout does, of other sizes on other workers
    tell(name, drawn)
samples = []
for (batch,) in loader:
    samples.append(batch.tolist())
    optimizer.zero_grad()
    model(torch.nn.functional.dropout(torch.ones(2, 3))).sum().backward()
    optimizer.step()
tell("samples", samples)
tell("mask", torch.nn.functional.dropout(torch.ones(64)).bool().int().tolist())
if args.die is not None and ctx.worker_index == 1 and not args.die.exists():
    args.die.touch()
    sys.exit(7)
