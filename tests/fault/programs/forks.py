"""Train, and let worker 0 fork children between two steps that end in every way and ask for what they may not have.

Writes {child: [exit code, what it was told]} to the file that its first argument names.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import UsageError

WAIT_S = 20

faulthandler.register(signal.SIGALRM, chain=True)  # of a child that waits for a thread which it does not have
torch.set_num_threads(1)
torch.manual_seed(0)
seen_at = Path(sys.argv[1])
ctx = paceline.init()
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=1, num_workers=1)
model, optimizer, loader = ctx.prepare(model, optimizer, loader)
seen: dict[str, Any] = {}


def train() -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def enter(manager: Any) -> None:
    with manager:
        raise AssertionError("this child came in")


def own_training() -> None:
    """What a child may do with its copy."""
    before = [p.detach().clone() for p in model.parameters()]
    own = torch.optim.Adam(model.parameters())
    for _ in range(3):
        own.zero_grad()
        model(torch.randn(2, 4)).square().sum().backward()
        own.step()
    assert not torch.equal(before[0], next(model.parameters()))
    model.load_state_dict({**model.state_dict(), "0.bias": torch.zeros(4)})
    assert len(list(loader)) and ctx.global_step and ctx.mode and ctx.is_chief
    ctx.close()


REFUSED: dict[str, Callable[[], Any]] = {
    "optimizer.step()": lambda: train(),
    "optimizer.state_dict()": optimizer.state_dict,
    "ctx.pull()": ctx.pull,
    "ctx.barrier()": ctx.barrier,
    "ctx.save()": ctx.save,
    "ctx.log()": lambda: ctx.log({"loss": 1.0}),
    "ctx.assign()": lambda: enter(ctx.assign()),
    "ctx.pause()": lambda: enter(ctx.pause()),
    "ctx.ema()": lambda: enter(ctx.ema()),
    "ctx.switch_mode()": lambda: ctx.switch_mode("async"),
    "ctx.epochs()": lambda: next(iter(ctx.epochs(9))),
    "ctx.steps()": lambda: next(iter(ctx.steps(9))),
    "ctx.prepare()": lambda: ctx.prepare(nn.Linear(2, 2)),
    "paceline.init()": paceline.init,
}


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except UsageError as refused:
        return str(refused)
    return ""


def fork(name: str, body: Callable[[], str]) -> bool:
    """True in the child, which then ends as the body says: by returning from here, or by an error."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(WAIT_S)
        os.close(read)
        os.write(write, body().encode())
        return True
    os.close(write)
    with open(read) as told_by_child:
        text = told_by_child.read()
    seen[name] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text]
    return False


def ends(name: str) -> str:
    if name == "grandchild" and os.fork() == 0:
        signal.alarm(WAIT_S)
        sys.exit(4)
    if name == "raise":
        raise RuntimeError("a child failed")
    if name == "interrupt":
        raise KeyboardInterrupt
    if name == "with":
        with ctx:
            sys.exit(5)
    if name == "_exit":
        os._exit(6)
    if name == "sys.exit":
        sys.exit(7)
    return ""


def while_training() -> None:
    """Children of another thread, forked wherever the thread that trains is: in the middle of a push, say."""
    for number in range(10):
        pid = os.fork()
        if pid == 0:
            signal.alarm(WAIT_S)
            is_refused = told(ctx.pull) and told(optimizer.step)
            os._exit(0 if is_refused else 1)
        seen[f"thread {number}"] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), ""]


def main() -> None:
    for step in range(40):
        train()
        if step != 5 or ctx.worker_index:
            continue
        for name, call in REFUSED.items():
            if fork(name, lambda call=call: told(call)):  # type: ignore[misc]
                os._exit(0)
        for name in ("grandchild", "raise", "interrupt", "with", "_exit", "sys.exit", "return"):
            if fork(name, lambda name=name: ends(name)):  # type: ignore[misc]
                return  # the script of this child has come to its end
        if fork("own training", lambda: own_training() or ""):  # type: ignore[func-returns-value]
            return
        forking = threading.Thread(target=while_training)
        forking.start()
        while forking.is_alive():
            train()
        forking.join()
    if ctx.worker_index == 0:
        seen_at.write_text(json.dumps(seen))


main()
