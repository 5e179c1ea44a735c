"""A script that writes down every batch whose gradient it pushed; worker 1 is killed once, in the middle of a step.

--out FOLDER      <worker>.txt there: a line a pushed batch, "epoch: indices"
--kill-at STEP    worker 1 is killed in its step STEP, after its heartbeats have told where it is
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--kill-at", type=int, default=-1)
parser.add_argument("--plain", action="store_true", help="a plain range of epochs")
parser.add_argument("--no-loader", action="store_true", help="batches of the script's own")
args = parser.parse_args()

torch.manual_seed(4)
ctx = paceline.init()
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
numbers = torch.arange(48.0).reshape(-1, 1)
loader = DataLoader(TensorDataset(numbers), batch_size=2, shuffle=True)
model, optimizer, shared, scheduler = ctx.prepare(model, optimizer, loader, scheduler)
loader = [numbers[i : i + 2].reshape(1, 2, 1) for i in range(0, 24, 2)] if args.no_loader else shared
killed = args.out / "killed"


def die(steps: int) -> None:
    if ctx.worker_index == 1 and steps == args.kill_at and not killed.exists():
        killed.touch()
        time.sleep(4 * ctx._session.assignment.settings.lease_s / 5)  # beats that say where this step began
        os.kill(os.getpid(), signal.SIGKILL)


steps = 0
with (args.out / f"{ctx.worker_index}.txt").open("a", buffering=1) as out:
    for epoch in range(3) if args.plain else ctx.epochs(3):
        for (x,) in loader:
            steps += 1
            optimizer.zero_grad()
            model(x).sum().backward()
            die(steps)
            optimizer.step()
            lr = optimizer.param_groups[0]["lr"]
            out.write(f"{epoch}: {[int(v) for v in x.flatten()]} {lr:g}\n")
        scheduler.step()
