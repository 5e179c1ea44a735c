"""A training script whose every number must come back after a stop: dropout, shuffling, momentum, a scheduler.

--die-at STEP    after this global step the chief waits until there is a checkpoint under the run folder (of an earlier
                 step: it is written meanwhile), then kills the launcher, and the kernel everybody else
--stop-at STEP   after this global step the chief presses the launcher's Ctrl+C, and trains on
--run FOLDER     that run folder
--out FOLDER     each worker writes a hash of all that it ends with to FOLDER/<worker>
"""

import argparse
import hashlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--stop-at", type=int, default=-1)
    parser.add_argument("--run", default=".")
    parser.add_argument("--loop", choices=["epochs", "steps"], default="epochs")
    parser.add_argument("--optimizer", default="Adam")
    parser.add_argument("--scheduler", choices=["step", "epoch"], default="step")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--norm", action="store_true")
    return parser.parse_args()


def model_of(norm: bool) -> nn.Module:
    middle: list[nn.Module] = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(6, 16), *middle, nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(96, 6, generator=generator), torch.randint(0, 3, (96,), generator=generator))


def hashed(*parts: Any) -> str:
    digest = hashlib.sha256()
    for part in parts:
        for name in sorted(part):
            value = part[name]
            digest.update(name.encode())
            digest.update(
                value.detach().contiguous().numpy().tobytes() if hasattr(value, "detach") else repr(value).encode()
            )
    return digest.hexdigest()


class Training:
    def __init__(self) -> None:
        self.args = arguments()
        self.ctx = paceline.init()
        torch.manual_seed(100 + self.ctx.worker_index)  # each worker draws its own numbers
        np.random.seed(200 + self.ctx.worker_index)
        random.seed(300 + self.ctx.worker_index)
        model = model_of(self.args.norm)
        optimizer = self.make_optimizer(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4 if self.args.scheduler == "step" else 1, 0.8)
        loader = DataLoader(data(), batch_size=4, shuffle=True)
        self.model, self.optimizer, self.loader, self.scheduler = self.ctx.prepare(model, optimizer, loader, scheduler)
        self.drawn = 0.0

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.args.optimizer == "SGD":
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        made: torch.optim.Optimizer = getattr(torch.optim, self.args.optimizer)(model.parameters(), lr=0.01)
        return made

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        noise = 0.01 * random.random() + float(np.random.rand())  # from every generator there is
        cross_entropy(self.model(x + noise * torch.randn_like(x)), y).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.args.scheduler == "step":
            self.scheduler.step()
        self.ctx.global_step  # noqa: B018  (takes the answer: the step below has been made)
        if self.ctx.is_chief and self.ctx.global_step == self.args.die_at:
            self.die()
        if self.ctx.is_chief and self.ctx.global_step == self.args.stop_at:
            os.kill(os.getppid(), signal.SIGINT)

    def die(self) -> None:
        while not list(Path(self.args.run, "checkpoints").glob("step-*/MANIFEST.json")):
            time.sleep(0.01)  # another thread of this process writes it
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()

    def epochs(self) -> None:
        for _ in self.ctx.epochs(self.args.epochs):
            for number, (x, y) in enumerate(self.loader, start=1):
                self.backward(x, y)
                if number % self.args.accumulate == 0:
                    self.step()
            if self.args.scheduler == "epoch":
                self.scheduler.step()

    def steps(self) -> None:
        batches = self.stream()
        for _ in self.ctx.steps(self.args.steps):
            for _ in range(self.args.accumulate):
                self.backward(*next(batches))
            self.step()

    def stream(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def end(self) -> None:
        state = self.optimizer.state_dict()
        slots = {f"{i}.{n}": v for i, named in state["state"].items() for n, v in named.items()}
        numbers = {"random": random.random(), "numpy": float(np.random.rand()), "torch": torch.rand(1).item()}
        lr = {"lr": state["param_groups"][0]["lr"], "last": self.scheduler.last_epoch}
        Path(self.args.out, str(self.ctx.worker_index)).write_text(
            "\n".join([hashed(self.model.state_dict()), hashed(slots), hashed(numbers), hashed(lr), repr(lr)])
        )


if __name__ == "__main__":
    training = Training()
    getattr(training, training.args.loop)()
    training.end()
