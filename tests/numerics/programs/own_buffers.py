"""Two workers with a norm layer. After 4 steps both save; then the worker that was named is killed, and writes down
what it has when it begins again: OUT/before, OUT/after."""

import os
import signal
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import paceline

out, victim = Path(sys.argv[1]), int(sys.argv[2])
ctx = paceline.init()
torch.manual_seed(ctx.worker_index)
model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ctx.prepare(model, optimizer)


def statistics() -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


is_victim = ctx.worker_index == victim
if is_victim and (out / "before").exists():
    save_file(statistics(), out / "after")
    raise SystemExit
for _ in range(4):
    optimizer.zero_grad()
    (model(torch.randn(5, 4) + ctx.worker_index) - 1).square().mean().backward()
    optimizer.step()
ctx.save()
if is_victim:
    ctx.global_step  # noqa: B018  (an answer: what was sent before it has come)
    ctx.barrier()
    save_file(statistics(), out / "before")
    os.kill(os.getpid(), signal.SIGKILL)
ctx.barrier()
