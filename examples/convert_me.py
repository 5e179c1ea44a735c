"""Before: an ordinary PyTorch program, for one process; it knows nothing of paceline.

    python convert_me.py

Compare it with convert_me_after.py, which has three lines more and another loop: diff convert_me.py convert_me_after.py
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


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

torch.manual_seed(1)
train, (test_x, test_y) = TensorDataset(*two_spirals(args.points)), two_spirals(1024)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
loader = DataLoader(train, batch_size=64, shuffle=True)

for epoch in range(args.epochs):
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
