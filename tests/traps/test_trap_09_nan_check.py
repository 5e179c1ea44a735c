"""Trap 9: check the whole gradient on the worker, with one sum. Checks on each shard apply half of a push."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

import paceline

LOCK = threading.Lock()


def two_tensors() -> nn.Module:
    with LOCK:
        torch.manual_seed(0)
        return nn.Linear(32, 32)


def test_checks_on_each_shard_apply_half_a_push() -> None:
    """The wrong way in small: each shard looks at its own part."""
    parts = [torch.ones(4), torch.tensor([1.0, float("nan"), 1.0, 1.0])]
    shards = [torch.zeros(4), torch.zeros(4)]
    versions = [0, 0]
    for index, part in enumerate(parts):
        if bool(torch.isfinite(part).all()):
            shards[index] -= part
            versions[index] += 1
    assert versions == [1, 0], "one push, two truths"


@pytest.mark.parametrize("lane", ["inproc", "shm", "tcp"])
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_number_discards_the_whole_push_everywhere(value: float, mode: str, lane: str) -> None:
    versions: list[Any] = []

    def work(ctx: paceline.Context) -> None:
        model = two_tensors()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model.bias.grad[-1] = value  # the last number of the last tensor: on the last ps
        optimizer.step()
        after = model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        versions.append([link.version for link in ctx._session.training_step.client.links])
        model.bias.grad[-1] = 1.0
        optimizer.step()
        versions.append([link.version for link in ctx._session.training_step.client.links])
        assert not torch.equal(before["weight"], model.state_dict()["weight"])

    with pytest.warns(UserWarning, match=r"step 1 discarded, gradient not finite in bias$"):
        summary = paceline.launch(work, ps=3, workers=1, mode=mode, lane=lane)
    assert versions == [[0, 0, 0], [1, 1, 1]]
    assert summary["workers"][0]["discarded"] == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lane", ["inproc", "tcp"])
def test_large_but_finite_is_finite(lane: str) -> None:
    """The sum overflows, the numbers do not: a check that trusts the sum alone would discard them."""
    huge = torch.full((32,), 3e38)
    assert not bool(torch.isfinite(huge.sum()))

    def work(ctx: paceline.Context) -> None:
        model = two_tensors()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-38))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 3e38)
        optimizer.step()
        assert ctx.global_step == 1

    assert paceline.launch(work, ps=2, workers=1, lane=lane)["workers"][0]["discarded"] == 0


@pytest.mark.filterwarnings("ignore:paceline")
def test_a_nan_that_stayed_in_the_slot_does_not_discard_the_next_step() -> None:
    """The tensor that had it has no gradient in the next step, so its old bytes lie there still."""

    def work(ctx: paceline.Context) -> None:
        model = two_tensors()
        model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.weight.grad = torch.ones_like(model.weight)
        model.bias.grad = torch.full_like(model.bias, float("nan"))
        optimizer.step()
        assert ctx.global_step == 0
        model.bias.grad = None
        optimizer.step()
        assert ctx.global_step == 1
        assert all(bool(v.isfinite().all()) for v in model.state_dict().values())

    paceline.launch(work, ps=2, workers=1, lane="shm")
