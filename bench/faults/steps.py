"""A training script for bench/faults/times.py: steps of about 5 ms; when each one ended goes into a file."""

import os
import time

import torch
from torch import nn

import paceline

ctx = paceline.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model, optimizer = ctx.prepare(model, optimizer)
with open(f"steps-{ctx.job}:{ctx.task_index}-{os.getpid()}", "w", buffering=1) as written:
    for _ in ctx.steps(3000):
        optimizer.zero_grad()
        model(torch.randn(128, 256)).square().mean().backward()
        optimizer.step()
        written.write(f"{time.time()}\n")
