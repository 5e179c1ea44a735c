"""A model of 40 M parameters (784-8192-4096-10), SGD; argument: the batch. What bench/two_hosts/overlap.py times."""

import statistics
import sys
import time

import torch
from torch import nn

import paceline

STEPS, LEFT_OUT = 10, 3

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(784, 8192), nn.ReLU(), nn.Linear(8192, 4096), nn.ReLU(), nn.Linear(4096, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
ctx = paceline.init()
model, optimizer = ctx.prepare(model, optimizer)
batch = int(sys.argv[1])
x, y = torch.randn(batch, 784), torch.randint(0, 10, (batch,))
took = []
for _ in range(STEPS):
    began = time.perf_counter()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    _ = ctx.global_step  # takes the answer: its parameters belong to this step
    took.append(1e3 * (time.perf_counter() - began))
print(f"median step {statistics.median(took[LEFT_OUT:]):.1f} ms", flush=True)
