"""After: convert_me.py with three lines more, marked 1, 2 and 3, and its loop, marked 4, which goes on after a stop.

    python convert_me_after.py
    paceline run --workers 2 --mode sync convert_me_after.py

Look at the losses: alone they are those of convert_me.py, digit for digit.
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline  # 1


def two_spirals(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on two arms that wind around each other, and on which arm each of them lies."""
    arm = torch.arange(count) % 2
    turn = torch.rand(count).sqrt() * 9
    points = torch.stack([turn * turn.cos(), turn * turn.sin()], 1) * (1 - 2 * arm)[:, None]
    return points / 5 + 0.03 * torch.randn(count, 2), arm


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--points", type=int, default=8192)
args = parser.parse_args()
ctx = paceline.init()  # 2

torch.manual_seed(1)
train, (test_x, test_y) = TensorDataset(*two_spirals(args.points)), two_spirals(1024)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
loader = DataLoader(train, batch_size=64, shuffle=True)
model, optimizer, scheduler, loader = ctx.prepare(model, optimizer, scheduler, loader)  # 3

for epoch in ctx.epochs(args.epochs):  # 4, to go on after a stop
    for points, arm in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(points), arm)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    scheduler.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.6f}", flush=True)

with torch.no_grad():
    accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
print(f"accuracy {accuracy:.4f}", flush=True)
