"""A small training script for tests. Its faults happen at a worker's own step, never at a time.

--raise-at 1:20    worker 1 raises after its step 20 (step 0: before prepare)
--kill-at 1:20     worker 1 kills itself with SIGKILL there
--gate 1:20:PATH   worker 1 tells the socket PATH where it is, and goes on when that connection ends
"""

import argparse
import os
import signal
import socket
from contextlib import suppress

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--epochs-of", action="append", default=[], help="WORKER:EPOCHS, where one differs")
    parser.add_argument("--batches", type=int, default=20, help="of each worker in an epoch")
    parser.add_argument("--raise-at", action="append", default=[])
    parser.add_argument("--kill-at", action="append", default=[])
    parser.add_argument("--gate", action="append", default=[])
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--no-parameters", action="store_true")
    parser.add_argument("--kv", action="store_true", help="print what ctx.kv says at the end")
    return parser.parse_known_args()[0]


class Faults:
    """What shall happen to this worker, by step."""

    def __init__(self, args: argparse.Namespace, ctx: paceline.Context) -> None:
        self._args = args
        self._ctx = ctx

    def at(self, step: int) -> None:
        me = f"{self._ctx.worker_index}:{step}"
        if me in self._args.raise_at:
            raise RuntimeError(f"worker {self._ctx.worker_index} was told to fail at step {step}")
        if me in self._args.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        for gate in self._args.gate:
            where, _, path = gate.rpartition(":")
            if where == me:
                self._stand_at(path, step)

    def _stand_at(self, path: str, step: int) -> None:
        gone = (FileNotFoundError, ConnectionError)  # the gate was opened for good
        with suppress(*gone), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(os.path.relpath(path))
            connection.sendall(f"{self._ctx.job}:{self._ctx.task_index} step {step} pid {os.getpid()}\n".encode())
            connection.recv(1)


def main(ctx: paceline.Context | None = None) -> None:
    args = arguments()
    ctx = ctx or paceline.init()
    faults = Faults(args, ctx)
    faults.at(0)
    torch.manual_seed(1)
    model: nn.Module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=0.01)
    if args.no_parameters:
        model = nn.ReLU()
    size = 4 * args.batches * ctx.num_workers
    data = TensorDataset(torch.randn(size, 8), torch.randint(0, 2, (size,)))
    model, optimizer, loader = ctx.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
    epochs = dict(map(int, each.split(":")) for each in args.epochs_of).get(ctx.worker_index, args.epochs)
    step = 0
    for _ in ctx.epochs(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            ctx.log({"loss": loss.item(), "own_step": step})
            faults.at(step)
    if args.kv:
        print(f"kv says {ctx.kv['0.weight'].shape}", flush=True)


if __name__ == "__main__":
    main()
