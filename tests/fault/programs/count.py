"""Every push adds exactly 1 to each of two weights, and this worker may be killed, or stopped, at a point of its step.

    count.py [--steps N] [--die WORKER:POINT:STEP] [--stop WORKER:STEP] [--stand WORKER:STEP] [--gate PATH]

Points, in the order of a step: pulled (parameters read), backward (a gradient is half computed), half (half a frame is
sent; tcp), sent (all frames are sent, nothing answered), answered (ps:0's answer is here), done (everything is read).
A restarted worker is never killed again, and the others do not end before it was. --stop: SIGSTOP by itself; --stand:
waits at the gate, alive.
"""

import argparse
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--die", default="")
    parser.add_argument("--stop", default="")
    parser.add_argument("--stand", default="")
    parser.add_argument("--gate", default="")
    return parser.parse_known_args()[0]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

    def forward(self) -> torch.Tensor:
        return -(self.a.sum() + self.b.sum())


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Fate:
    """What happens to this worker at which of its steps."""

    def __init__(self, args: argparse.Namespace, ctx: Any, model: nn.Module) -> None:
        self._args = args
        self._ctx = ctx
        self._model = model
        worker, point, step = args.die.split(":") if args.die else ("", "", "0")
        is_me = worker == str(ctx.worker_index) and ctx._session.assignment.incarnation == 1
        self._point, self._step = (point, int(step)) if is_me else ("", 0)
        self._pid_file = Path(ctx.run_dir, f"victim-{worker}") if args.die else None
        self._is_other = worker != str(ctx.worker_index)
        if is_me:
            written = self._pid_file.with_suffix(".new")
            written.write_text(str(os.getpid()))
            written.rename(self._pid_file)

    def begins(self, step: int) -> None:
        """Parameters are read; the forward pass is next."""
        client = self._ctx._session.training_step.client
        if self._args.stop == f"{self._ctx.worker_index}:{step}":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._args.stand == f"{self._ctx.worker_index}:{step}":
            self._stand(step)
        if step != self._step:
            return
        link = client.links[-1]
        if self._point == "pulled":
            kill()
        elif self._point == "backward":
            self._model.a.register_hook(kill)
        elif self._point == "half":
            client.links[0].channel.stream = Half(client.links[0].channel.stream)
        elif self._point == "answered":
            client.links[0].read = kill
        elif self._point == "sent":
            client.take = kill
        assert link is not None

    def ends(self, step: int) -> None:
        if step == self._step and self._point == "done":
            assert self._ctx.global_step >= 0  # takes the answer
            kill()

    def outlive(self) -> None:
        """Who ends saves; what the one that dies has sent must be in there."""
        while self._pid_file is not None and self._is_other and not self._is_dead():
            time.sleep(0.01)  # that it is gone is all that there is to see

    def _is_dead(self) -> bool:
        return self._pid_file.exists() and not Path("/proc", self._pid_file.read_text()).exists()

    def _stand(self, step: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(os.path.relpath(self._args.gate))
            connection.sendall(f"worker:{self._ctx.worker_index} step {step} pid {os.getpid()}\n".encode())
            connection.recv(1)


class Half:
    """A stream whose process dies in the middle of a frame."""

    write = None

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def send(self, buffers: Any, size_bytes: int = -1) -> None:
        whole = b"".join(bytes(b) for b in buffers)
        self._inner.send([whole[: len(whole) // 2]])
        kill()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def main() -> None:
    args = arguments()
    ctx = paceline.init()
    model = Two()
    lr = 1.0
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    fate = Fate(args, ctx, model)
    first = 2  # each start makes all its steps; counted from 0 or 1 on, one that is started again ends with the others
    for number in range(first, first + args.steps):
        step = number - 1
        ctx._session.training_step.settle()
        fate.begins(step)
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
        fate.ends(step)
    fate.outlive()
    ctx.log({"steps": args.steps})


if __name__ == "__main__":
    main()
