"""Training that comes to the same weights in every run: fixed data in a fixed order, a fixed start.

--gate 1:20:PATH   worker 1 tells the socket PATH where it is after its step 20, and goes on when that connection ends
--raise-at 1:20    worker 1 raises there
"""

import argparse
import os
import socket

import torch
from torch import nn

import paceline

STEPS = 60


def stand_at(path: str, ctx: paceline.Context, step: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(os.path.relpath(path))
        connection.sendall(f"{ctx.job}:{ctx.task_index} step {step} pid {os.getpid()}\n".encode())
        connection.recv(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gate", action="append", default=[])
    parser.add_argument("--raise-at", action="append", default=[])
    args = parser.parse_args()
    ctx = paceline.init()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = ctx.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(ctx.worker_index)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = (model(torch.randn(16, 64, generator=generator)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        me = f"{ctx.worker_index}:{step}"
        if me in args.raise_at:
            raise RuntimeError(f"worker {ctx.worker_index} was told to fail at step {step}")
        for gate in args.gate:
            where, _, path = gate.rpartition(":")
            if where == me:
                stand_at(path, ctx, step)


if __name__ == "__main__":
    main()
