"""A script that forks and starts processes in its training loop; run by children.py as `python` and `paceline run`.

Writes what it saw to the file that its first argument names, one tensor a row of the table.
"""

import multiprocessing
import os
import sys
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import paceline

WAIT_S = 60.0


def evaluate(model: nn.Module, answers: Any) -> None:
    torch.set_num_threads(1)
    with torch.no_grad():
        answers.put(model(torch.ones(1, 7)).flatten().tolist())


def evaluate_when_asked(model: nn.Module, is_ready: Any, go: Any, answers: Any) -> None:
    is_ready.set()
    go.wait(WAIT_S)
    evaluate(model, answers)


def overwrite(model: nn.Module, answers: Any) -> None:
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    evaluate(model, answers)


def train_a_copy(model: nn.Module, answers: Any) -> None:
    torch.set_num_threads(1)
    model.load_state_dict({name: value + 0.5 for name, value in model.state_dict().items()})
    own = optim.Adam(model.parameters(), lr=0.1)
    for _ in range(3):
        own.zero_grad()
        model(torch.ones(4, 7)).square().mean().backward()
        own.step()
    evaluate(model, answers)


def evaluate_in_a_child(model: nn.Module, answers: Any) -> None:
    pid = os.fork()
    if pid == 0:
        sys.exit(evaluate(model, answers))
    os.waitpid(pid, 0)


def exit_code(pid: int) -> torch.Tensor:
    return torch.tensor(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


CHILDREN = {
    2: ("fork_writes", overwrite),
    3: ("own_training", train_a_copy),
    4: ("fork_evaluates", evaluate),
    5: ("grandchild", evaluate_in_a_child),
}


def main(path: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ctx = paceline.init()
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(torch.randn(80, 7)), batch_size=4, shuffle=True, num_workers=1)
    model, optimizer, loader = ctx.prepare(model, optimizer, loader)
    fork, spawn = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
    answers = fork.Queue()
    seen: dict[str, torch.Tensor] = {}
    snapshot, is_ready, go = None, fork.Event(), fork.Event()
    for step, (x,) in enumerate(loader):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if step in CHILDREN:
            name, target = CHILDREN[step]
            child = fork.Process(target=target, args=(model, answers))
            child.start()
            seen[name] = torch.tensor(answers.get(timeout=WAIT_S))
            child.join(WAIT_S)
        if step == 6:
            snapshot = fork.Process(target=evaluate_when_asked, args=(model, is_ready, go, answers))
            snapshot.start()
            is_ready.wait(WAIT_S)
        if step == 8:
            with fork.Pool(2) as pool:
                seen["pool"] = torch.stack(pool.map(square, [torch.ones(2), torch.full((2,), 3.0)]))
        if step == 10:
            own = spawn.Queue()
            child = spawn.Process(target=evaluate, args=(model, own))
            child.start()
            seen["spawn"] = torch.tensor(own.get(timeout=WAIT_S))
            child.join(WAIT_S)
    go.set()
    seen["snapshot"] = torch.tensor(answers.get(timeout=WAIT_S))
    snapshot.join(WAIT_S)
    if (pid := os.fork()) == 0:
        sys.exit(3)  # a child that ends as a program ends: exit handlers run
    seen["os_fork"] = exit_code(pid)
    if (pid := os.fork()) == 0:
        raise RuntimeError("a child fails")
    seen["failing_fork"] = exit_code(pid)
    if (pid := os.fork()) == 0:
        return
    seen["whole_script"] = exit_code(pid)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 7)).square().mean().backward()
        optimizer.step()
    save_file({**seen, **{f"model.{name}": value.clone() for name, value in model.state_dict().items()}}, path)


if __name__ == "__main__":
    main(sys.argv[1])
