"""One that joins while the mode changes has no step to finish: nobody waits for it, and it joins what holds then."""

import threading
import time

import msgspec
import pytest
import torch

import paceline
from paceline.cluster.spec import Task
from paceline.launchers import task as tasks

LIMIT_S = 20.0


def steps(ctx: paceline.Context, count: int) -> None:
    model = torch.nn.Linear(2, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(count):
        if number == 5 and ctx.is_chief:
            yield_to_a_joiner(ctx)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def yield_to_a_joiner(ctx: paceline.Context) -> None:
    """Ask for the other mode, and go on only when somebody has joined: the switch cannot be done before."""
    ctx.switch_mode("async" if ctx.mode == "sync" else "sync")
    threading.Thread(target=join, args=(ctx,), daemon=True).start()
    deadline = time.monotonic() + LIMIT_S
    while ctx._session.place() != (0, 2):
        assert time.monotonic() < deadline, "nobody joined"


def join(ctx: paceline.Context) -> None:
    assert ctx._session.assignment is not None
    with tasks.in_this_thread(msgspec.structs.replace(ctx._session.assignment, task=Task("worker", 1))) as sessions:
        steps(tasks.init(), 5)
        for each in sessions:
            each.close()


@pytest.mark.parametrize("mode", ["async", "sync", "bounded"])
@pytest.mark.parametrize("num_ps", [1, 2])
def test_the_switch_does_not_wait_for_one_that_waits_for_the_switch(mode: str, num_ps: int) -> None:
    told = paceline.launch(lambda ctx: steps(ctx, 10), num_ps, 2, mode, started_workers=1, wait_s=LIMIT_S)
    assert (told["ok"], told["lost"]) == (True, [])
    assert [(row["task"], row["steps"]) for row in told["workers"]] == [("worker:0", 10), ("worker:1", 5)]
    after = "async" if mode == "sync" else "sync"
    assert [(change["at_step"], change["mode"]) for change in told["modes"]] == [(6, after)]
