"""Does every worker's `prepare()` return with the first values, also that of a slow worker beside a fast one?

A worker is held between the moment at which the run begins and its first pull, until a faster one has done what its
script does next: loading other values, or training.
"""

import threading
from typing import Any

import pytest
import torch
from alike import Job, weights
from torch import nn

import paceline
from paceline.worker.requests.client import Client

HELD_S = 1.0  # without what is tested, a fast worker needs a tenth of it


@pytest.mark.parametrize("change", ["loads", "trains"])
@pytest.mark.parametrize(("lane", "ps", "slow"), [("shm", 1, 1), ("tcp", 2, 1), ("tcp", 1, 0)])
def test_a_slow_worker_has_the_first_values(
    change: str, lane: str, ps: int, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_changed = threading.Event()
    carry = Client.carry

    def hold(client: Client, *decisions: Any, **options: Any) -> None:
        if client._me.worker == slow and not client.push_id:
            is_changed.wait(HELD_S)
        carry(client, *decisions, **options)

    monkeypatch.setattr(Client, "carry", hold)
    seen: list[Any] = [None, None]
    first = weights(Job.make(lambda: nn.Linear(7, 3)))

    def work(ctx: Any) -> None:
        model = Job.make(lambda: nn.Linear(7, 3), seed=ctx.worker_index)
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        seen[ctx.worker_index] = weights(model)
        if ctx.worker_index == slow:
            return
        if change == "loads":
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        else:
            model(torch.ones(2, 7)).square().mean().backward()
            optimizer.step()
        is_changed.set()

    paceline.launch(work, workers=2, ps=ps, lane=lane, mode="async")
    for worker, values in enumerate(seen):
        for name, value in first.items():
            assert torch.equal(values[name], value), f"worker {worker} saw other values of {name}"
