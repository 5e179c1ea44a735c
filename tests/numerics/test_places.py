"""Parameters and gradients that a script casts, moves or replaces after prepare(): right, or refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from alike import Job, Returned, assert_same, check, run_cluster, run_plain, weights
from torch import nn
from torch.optim import SGD

from paceline.errors import TrainingFailed

STEPS = 4
Change = Callable[[nn.Sequential], None]


def convolution() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(96, 4), nn.Tanh(), nn.Linear(4, 4))


def train(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(job.randn(5, 3, 6, 6)).square().mean().backward()
    optimizer.step()


def changed_after(change: Change, steps: int) -> Callable[[Job], Returned]:
    """A recipe that changes its model after so many steps, and trains on."""

    def recipe(job: Job) -> Returned:
        model = job.make(convolution)
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.5, momentum=0.9))
        for step in range(STEPS):
            if step == steps:
                change(model)
            train(job, model, optimizer)
        return {"model": weights(model)}

    return recipe


def assign_data(model: nn.Sequential) -> None:
    model[2].weight.data = model[2].weight.data * 0.5


def transpose(model: nn.Sequential) -> None:
    """The same memory and shape, with other strides."""
    model[4].weight.data = model[4].weight.data.t()


def shift(model: nn.Sequential) -> None:
    """A view of its own memory."""
    model[4].weight.data = model[4].weight.data.flip(0)


LAID_BACK: dict[str, Change] = {
    "channels last": lambda model: model.to(memory_format=torch.channels_last) and None,
    "data assigned": assign_data,
    "data transposed": transpose,
    "data flipped": shift,
    "shared with other processes": lambda model: model.share_memory() and None,
    "the same dtype": lambda model: model.float() and None,
    "wrapped by torch.compile": lambda model: model.__setitem__(2, torch.compile(model[2], backend="eager")),
}


OTHER_STRIDES = {"channels last", "data transposed"}  # plain PyTorch computes with them: other last bits


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", LAID_BACK)
def test_parameters_with_other_memory_train_on(name: str, steps: int) -> None:
    recipe = changed_after(LAID_BACK[name], steps)
    torch._dynamo.reset()
    plain, ours = run_plain(recipe, 1)[0], run_cluster(recipe, 1, ps=2)[0]
    if name in OTHER_STRIDES:
        torch.testing.assert_close(plain[0]["model"], ours[0]["model"], rtol=1e-5, atol=1e-6)
    else:
        assert_same(plain, ours, name)
    torch._dynamo.reset()


def test_a_parameter_with_other_memory_is_saved_with_its_last_values(tmp_path: Path) -> None:
    def recipe(job: Job) -> Returned:
        model = job.make(convolution)
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.5))
        train(job, model, optimizer)
        assign_data(model)
        return {"model": weights(model)}

    check(recipe, tmp_path, 1, ps=2)


def cast(dtype: torch.dtype) -> Change:
    return lambda model: model[2].to(dtype) and None


def replace_parameter(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(torch.zeros(4, 96))


def replace_layer(model: nn.Sequential) -> None:
    model[2] = nn.Linear(96, 4)


def larger(model: nn.Sequential) -> None:
    model[4].weight.data = torch.zeros(4, 8)


def normalise(model: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(model[2])


REFUSED: dict[str, tuple[Change, str]] = {
    "bfloat16": (cast(torch.bfloat16), "2.weight is bfloat16"),
    "float64": (cast(torch.float64), "2.weight is float64"),
    "another parameter": (replace_parameter, "2.weight is no longer in the model"),
    "another layer": (replace_layer, "2.weight is no longer in the model"),
    "another shape": (larger, "4.weight is float32[4, 8]"),
    "a parametrization": (normalise, "2.weight is no longer in the model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_ps_cannot_follow_is_refused_by_name(name: str) -> None:
    change, reason = REFUSED[name]

    def recipe(job: Job) -> Returned:
        model = job.make(convolution)
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.5))
        train(job, model, optimizer)
        change(model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return {}

    with pytest.raises(TrainingFailed) as caught:
        run_cluster(recipe, 1, ps=1)
    assert reason in str(caught.value) and "test_places.py, line" in str(caught.value)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype")
@pytest.mark.parametrize("lane", ["shm", "tcp"])
def test_a_gradient_of_another_dtype_is_refused(lane: str) -> None:
    def recipe(job: Job) -> Returned:
        model = job.make(lambda: nn.Linear(6, 3, dtype=torch.bfloat16))
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
        model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
        for parameter in model.parameters():
            parameter.grad = torch.ones(parameter.shape, dtype=torch.float32)
        optimizer.step()
        return {}

    with pytest.raises(TrainingFailed, match=r"the gradient of weight is float32\[3, 6\]"):
        run_cluster(recipe, 1, ps=1, lane=lane)
