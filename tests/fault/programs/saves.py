"""A small training that is saved after every step."""

import sys

import torch

import paceline

ctx = paceline.init()
model = torch.nn.Linear(64, 64)
model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
for _ in ctx.steps(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    ctx.save()
