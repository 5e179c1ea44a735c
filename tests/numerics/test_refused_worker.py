"""What one worker does wrong is refused to that worker alone: the ps and the other worker go on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from alike import Job
from torch import nn
from torch.optim import Adam, RMSprop

import paceline
from paceline.errors import PacelineError

STEPS = 6


def train(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(job.randn(4, 3)).square().mean().backward()
        optimizer.step()


def capturable(job: Job, model: nn.Module) -> None:
    train(job, *job.prepare(model, Adam(model.parameters(), lr=0.1, capturable=job.index == 1)))


def lazy(job: Job, model: nn.Module) -> None:
    if job.index == 1:
        model = nn.Sequential(nn.LazyLinear(2))
    train(job, *job.prepare(model, Adam(model.parameters(), lr=0.1)))


def another_optimizer(job: Job, model: nn.Module) -> None:
    kind = RMSprop if job.index == 1 else Adam
    train(job, *job.prepare(model, kind(model.parameters(), lr=0.1)))


def what_torch_refuses(job: Job, model: nn.Module) -> None:
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.1))
    train(job, model, optimizer)
    if job.index == 1:
        optimizer.param_groups[0]["amsgrad"] = True
    train(job, model, optimizer)


def rates_out_of_range(job: Job, model: nn.Module) -> None:
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.1))
    train(job, model, optimizer)
    if job.index == 1:
        optimizer.param_groups[0]["betas"] = (0.9, 2.0)
    train(job, model, optimizer)


def not_a_number(job: Job, model: nn.Module) -> None:
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.1))
    train(job, model, optimizer)
    if job.index == 1:
        optimizer.param_groups[0]["lr"] = None
    train(job, model, optimizer)


def sparse(job: Job, model: nn.Module) -> None:
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.1))
    train(job, model, optimizer)
    if job.index == 1:
        model[0].weight.grad = torch.ones(2, 3).to_sparse()
        optimizer.step()
    train(job, model, optimizer)


WRONG = {
    "capturable": capturable,
    "LazyLinear": lazy,
    "RMSprop": another_optimizer,
    "max_exp_avg_sq": what_torch_refuses,
    "options that cannot be used|cannot make an update": rates_out_of_range,
    "lr was 0.1 and is None": not_a_number,
    "is sparse": sparse,
}


@pytest.mark.parametrize(("ps", "lane"), [(1, "shm"), (2, "tcp")])
@pytest.mark.parametrize("words", WRONG)
def test_only_that_worker_ends(words: str, ps: int, lane: str) -> None:
    wrong: Callable[[Job, nn.Module], None] = WRONG[words]
    went_on = []

    def work(ctx: Any) -> None:
        torch.set_num_threads(1)
        job = Job(ctx.worker_index, ctx.num_workers, ctx)
        wrong(job, job.make(lambda: nn.Sequential(nn.Linear(3, 2))))
        went_on.append(job.index)

    with pytest.raises(PacelineError, match=words) as raised:
        paceline.launch(work, workers=2, ps=ps, lane=lane, mode="async")
    if wrong is another_optimizer and "worker:0 failed" in str(raised.value):
        return  # the ps run the optimizer of the first worker to join; without the chief there is no training
    assert "worker:1" in str(raised.value)
    assert went_on == [0], "the other worker"
