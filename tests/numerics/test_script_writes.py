"""What a script writes into parameters by torch's own helpers counts with one worker as in plain torch."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import Job, Returned, assert_same, check, run_cluster, weights
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD, Adam
from torch.optim.swa_utils import AveragedModel, update_bn
from toy import batch, gradients

pytestmark = pytest.mark.filterwarnings("error")
STEPS = 6


def model_of() -> Any:
    return nn.Sequential(nn.Linear(37, 29), nn.BatchNorm1d(29), nn.Tanh(), nn.Linear(29, 3))


After = Callable[[int], None]


def in_post_hook(model: Any, optimizer: Any) -> After:
    optimizer.register_step_post_hook(lambda *_: [p.data.clamp_(-0.05, 0.05) for p in model.parameters()])
    return lambda step: None


def from_a_vector(model: Any, optimizer: Any) -> After:
    def after(step: int) -> None:
        vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 0.9, model.parameters())

    return after


def averages_swapped_in(model: Any, optimizer: Any) -> After:
    """Evaluate with the averages and go on with one's own; at the end the averages are the model."""
    averaged = AveragedModel(model)

    def after(step: int) -> None:
        averaged.update_parameters(model)
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(averaged.module.state_dict())
        update_bn([batch(0, number) for number in range(3)], model)
        if step < STEPS - 1:
            model.load_state_dict(own)

    return after


WAYS = [in_post_hook, from_a_vector, averages_swapped_in]


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_write_with_one_worker(way: Callable[[Any, Any], After], tmp_path: Path) -> None:
    def recipe(job: Job) -> Returned:
        model = job.make(model_of)
        model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.05))
        after, seen = way(model, optimizer), []
        for step in range(STEPS):
            gradients(model, batch(0, step))
            optimizer.step()
            after(step)
            seen.append(weights(model))
        return {"seen": seen, "model": seen[-1]}

    check(recipe, tmp_path, ps=2)


@pytest.mark.parametrize("way", WAYS)
def test_in_mode_local_a_write_is_a_part_of_the_delta(way: Callable[[Any, Any], After]) -> None:
    """Three steps of its own, and what was written after each; then w - (w - v) of the outer SGD."""

    def recipe(job: Job) -> Returned:
        model = job.make(model_of)
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.05))
        after = way(model, optimizer)
        origin = [p.detach().clone() for p in model.parameters()]
        for step in range(STEPS - 1):
            gradients(model, batch(0, step))
            optimizer.step()
            if job.ctx is None and step % 3 == 2:
                with torch.no_grad():
                    for parameter, first in zip(model.parameters(), origin, strict=True):
                        parameter.copy_(first - (first - parameter))
                        first.copy_(parameter)
            if step % 3 == 0:
                after(step)
        return weights(model)

    options: dict[str, Any] = {"local_steps": 3, "outer_lr": 1.0, "outer_momentum": 0.0, "save_every": "none"}
    (got,), _ = run_cluster(recipe, mode="local", ps=2, **options)
    assert_same(recipe(Job(0, 1)), got, "local")


def moved(model: Any, factor: float) -> None:
    """Other values in other memory."""
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * factor, model.parameters())


def test_values_in_other_memory_are_seen_between_steps() -> None:
    """By pull(), by the final checkpoint after a cast for export, and by assign() of several workers."""

    def one(job: Job) -> Returned:
        model = job.make(model_of)
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.05))
        gradients(model, batch(0, 0))
        optimizer.step()
        moved(model, 0.5)
        written = weights(model)
        job.ctx.pull()
        assert_same(written, weights(model), "after pull()")
        model.half()  # for export
        return {}

    def two(job: Job) -> Returned:
        model = job.make(model_of)
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.0))
        with job.ctx.assign():
            moved(model, 2.0 + job.index)
        gradients(model, batch(0, 0))
        optimizer.step()
        return {n: v for n, v in weights(model).items() if n.endswith("weight")}

    run_cluster(one, save_every="none")
    (chief, other), _ = run_cluster(two, 2, mode="sync", ps=2, save_every="none")
    assert_same(chief, other, "inside assign()")
