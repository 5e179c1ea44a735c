"""Train 5 MB on as many workers as there are, for STEPS updates; files of this process may be limited to so many MB."""

import argparse
import resource

import torch

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--limit-mb", type=int)
args = parser.parse_args()
ctx = paceline.init()
if args.limit_mb:
    resource.setrlimit(resource.RLIMIT_FSIZE, (args.limit_mb << 20, args.limit_mb << 20))
model = torch.nn.Linear(1_250_000, 1, bias=False)
model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
for _ in ctx.steps(args.steps):
    optimizer.zero_grad()
    (-model.weight.sum()).backward()
    optimizer.step()
