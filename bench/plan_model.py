"""WHAT does bench/plan.py train? MNIST for ever, with a small model or one of several megabytes and milliseconds.

paceline run --workers 2 bench/plan_model.py --model large
"""

import argparse
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import paceline
from paceline.datasets import mnist
from paceline.launchers.demos.mnist import Digits, as_it_is
from paceline.models.mlp import mlp

LARGE = (784, 1024, 1024, 10)


def large() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in pairwise(LARGE):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["mnist", "large"], default="mnist")
    asked = parser.parse_args()
    ctx = paceline.init()
    digits = mnist.load()
    train = Digits(torch.from_numpy(digits.train_x), torch.from_numpy(digits.train_y))
    loader: Any = DataLoader(train, batch_size=100, shuffle=True, collate_fn=as_it_is)
    model: Any = mlp(hidden=100, activation="relu") if asked.model == "mnist" else large()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    while True:
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
