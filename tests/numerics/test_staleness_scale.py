"""--staleness-scale: an update's lr is divided by 1 + its staleness, bit for bit; the next one has the full lr again.

Who pushes when is written down as a schedule: (worker, does it read first?). The reference is one process that takes
the same gradients in the same order, each with its own lr.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from alike import Job, Returned, assert_same, run_cluster, weights
from torch import nn
from torch.optim import SGD, Adam
from toy import LANES, drawn, give, model_of

pytestmark = pytest.mark.filterwarnings("error")

RATE = 0.1
Make = Callable[[nn.Module], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "momentum": lambda model: SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-2),
    "Adam": lambda model: Adam(model.parameters(), lr=RATE),
    "fused": lambda model: Adam(model.parameters(), lr=RATE, fused=True),
    "groups": lambda model: SGD(
        [{"params": model[0].parameters()}, {"params": [*model[2].parameters(), *model[4].parameters()], "lr": 0.03}],
        lr=RATE,
        momentum=0.5,
    ),
}
# Worker 1 pushes twice between pull and push of worker 0, then once, and at the end both read what they push to.
SCHEDULE = [1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 0]
STALENESS = [0, 0, 2, 1, 1, 1, 0, 0, 3, 0, 0]


class Turns:
    """Lets the workers push in the order of the schedule, one at a time."""

    def __init__(self, schedule: Sequence[int]) -> None:
        self._schedule = schedule
        self._begin = threading.Barrier(2, timeout=60)
        self._next = 0
        self._changed = threading.Condition()

    def mine(self, worker: int) -> Any:
        self._begin.wait()  # both have read version 0 by now
        for number, who in enumerate(self._schedule):
            if who == worker:
                with self._changed:
                    assert self._changed.wait_for(lambda n=number: self._next == n, timeout=120)
                yield number
                with self._changed:
                    self._next += 1
                    self._changed.notify_all()


def reference(make: Make, is_scaled: bool = True, halve_after: int | None = None) -> dict[str, torch.Tensor]:
    model = model_of()
    optimizer = make(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    for number, staleness in enumerate(STALENESS):
        if halve_after == number:
            rates = [rate / 2 for rate in rates]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate / (1 + staleness) if is_scaled else rate
        give(model, drawn(model, number))
        optimizer.step()
    return weights(model)


def recipe_of(make: Make, halve_after: int | None = None) -> Callable[[Job], Returned]:
    turns = Turns(SCHEDULE)

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, make(model))
        for number in turns.mine(job.index):
            for group in optimizer.param_groups if halve_after is not None and number >= halve_after else ():
                if not group.get("was_halved"):
                    group["lr"] /= 2
                    group["was_halved"] = True
            give(model, drawn(model, number))
            optimizer.step()
            weights(model)  # reads the answer: from here on this worker knows this version
        job.ctx.barrier()
        return {"model": weights(model)}

    return recipe


def holds(want: dict[str, torch.Tensor], recipe: Any, **options: Any) -> dict[str, Any]:
    options = {"mode": "async", "staleness_scale": True, "save_every": "none", **options}
    got, summary = run_cluster(recipe, 2, **options)
    for index, each in enumerate(got):
        assert_same(want, each["model"], f"worker {index}")
    assert summary["global_step"] == len(SCHEDULE)
    return summary


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("ps", [1, 2])
@pytest.mark.parametrize("name", MAKERS)
def test_the_rate_is_divided_by_one_more_than_the_staleness(name: str, ps: int, lane: str) -> None:
    make = MAKERS[name]
    want = reference(make)
    assert not torch.equal(want["0.weight"], reference(make, is_scaled=False)["0.weight"])
    summary = holds(want, recipe_of(make), ps=ps, lane=lane)
    for each in summary["ps"]:
        assert each["staleness"] == {"0": {"0": 2, "1": 1, "2": 1, "3": 1}, "1": {"0": 4, "1": 2}}


def test_without_the_flag_every_update_has_the_whole_rate() -> None:
    make = MAKERS["momentum"]
    holds(reference(make, is_scaled=False), recipe_of(make), ps=2, staleness_scale=False)


def test_in_bounded_too() -> None:
    make = MAKERS["Adam"]
    holds(reference(make), recipe_of(make), ps=2, mode="bounded", staleness=5)


@pytest.mark.parametrize("name", ["momentum", "groups"])
def test_a_rate_that_changes_is_divided_as_it_is_now(name: str) -> None:
    make = MAKERS[name]
    holds(reference(make, halve_after=2), recipe_of(make, halve_after=2), ps=2, lane="tcp")


def test_an_outer_update_is_scaled_too() -> None:
    """Mode local with outer async: deltas may be stale, and the outer lr is divided."""
    turns = Turns([1, 0, 0])

    def recipe(job: Job) -> Returned:
        model = model_of()
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.05))
        for number in turns.mine(job.index):
            give(model, drawn(model, number))
            optimizer.step()
            weights(model)
        job.ctx.barrier()
        return {"model": weights(model)}

    common = model_of()
    outer = SGD(common.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    start = weights(common)
    for number, (staleness, is_from_start) in enumerate([(0, True), (1, True), (0, False)]):
        own = model_of()
        own.load_state_dict(start if is_from_start else common.state_dict())
        origin = [p.detach().clone() for p in own.parameters()]
        give(own, drawn(own, number))
        SGD(own.parameters(), lr=0.05).step()
        give(common, [w - v.detach() for w, v in zip(origin, own.parameters(), strict=True)])
        outer.param_groups[0]["lr"] = 0.7 / (1 + staleness)
        outer.step()
    options: dict[str, Any] = {"local_steps": 1, "outer": "async", "outer_momentum": 0.9, "staleness_scale": True}
    got, _ = run_cluster(recipe, 2, mode="local", ps=2, save_every="none", **options)
    for index, each in enumerate(got):
        assert_same(weights(common), each["model"], f"worker {index}")
