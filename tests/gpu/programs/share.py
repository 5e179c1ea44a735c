"""Trains a small model on ctx.device, and prints what torch says about the card, as one line of JSON."""

import argparse
import json
import os

import torch

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--visible", help="set CUDA_VISIBLE_DEVICES here, before init")
parser.add_argument("--hog", type=float, help="then try to take this share of the card's memory")
arguments = parser.parse_args()
if arguments.visible is not None:
    os.environ["CUDA_VISIBLE_DEVICES"] = arguments.visible

ctx = paceline.init()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).to(ctx.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ctx.prepare(model, optimizer)
x = torch.randn(32, 64, device=ctx.device)
for _ in range(arguments.steps):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
told: dict[str, object] = {"worker": ctx.worker_index, "device": str(ctx.device), "loss": loss.item()}
if ctx.device.type == "cuda":
    total = torch.cuda.get_device_properties(ctx.device).total_memory
    told |= {"current": torch.cuda.current_device(), "reserved": torch.cuda.memory_reserved(ctx.device) / total}
    if arguments.hog:
        try:
            torch.empty(int(arguments.hog * total), dtype=torch.uint8, device=ctx.device)
            told["hog"] = "taken"
        except torch.OutOfMemoryError:
            told["hog"] = "refused"
print("CARD " + json.dumps(told), flush=True)
ctx.barrier()
