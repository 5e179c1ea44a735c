"""Cases of scripts that write into parameters, move, cast or replace them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from alike import Job, Returned, weights
from table import STEPS, Different, Refused, case, loss_of, small, train, trained
from torch import nn
from torch.nn.utils import prune
from torch.optim import SGD, Adam
from torch.optim.swa_utils import AveragedModel, update_bn

import paceline

TOPIC = "Writing into parameters"
MOVING = "Moving, casting and replacing"
OTHERS = "With several workers: `paceline.constrain`, or on all of them inside `with ctx.assign():`."
FIRST = "With several workers: before `prepare()`, where the chief's values count."
BEFORE = "Call it before `prepare()`."

Change = Callable[[nn.Sequential], Any]


def after_each(job: Job, write: Change) -> Returned:
    """Train, and write into the parameters after each step."""
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.5, momentum=0.9))
    losses = []
    for loss in trained(job, model, optimizer):
        losses.append(loss)
        write(model)
    return {"model": weights(model), "losses": losses}


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def shrink(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def through_numpy(model: nn.Sequential) -> None:
    model[0].bias.detach().numpy()[:3] = 0.25


def by_index(model: nn.Sequential) -> None:
    model[2].weight.data[1, 2:5] = 0.125


def renormalized(model: nn.Sequential) -> None:
    model[0].weight.data.copy_(model[0].weight.data.renorm(2, 0, 0.5))


def by_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()) * 0.5
    nn.utils.vector_to_parameters(vector, model.parameters())


AFTER_EACH: dict[str, Change] = {
    "weights clipped after each step (WGAN: p.data.clamp_)": clamp,
    "parameters shrunk under no_grad": shrink,
    "a parameter written through numpy()": through_numpy,
    "some elements of a parameter assigned": by_index,
    "rows renormalized (renorm)": renormalized,
    "vector_to_parameters": by_vector,
}
for _name, _write in AFTER_EACH.items():
    case(TOPIC, _name, two=Refused("written"), note=OTHERS)(partial(after_each, write=_write))


@case(TOPIC, "weights clipped in a step post hook", two=Refused("written"), note=OTHERS)
def clamp_in_post_hook(job: Job) -> Returned:
    model = job.make(small)
    optimizer = SGD(model.parameters(), lr=0.5)
    model, optimizer = job.prepare(model, optimizer)
    optimizer.register_step_post_hook(lambda *_: clamp(model))
    return {"losses": train(job, model, optimizer), "model": weights(model)}


@case(TOPIC, "nn.Embedding(max_norm=…)", two=Refused("written"), note=OTHERS)
def embedding_max_norm(job: Job) -> Returned:
    model = job.make(lambda: nn.Sequential(nn.Embedding(20, 6, max_norm=0.5), nn.Flatten(), nn.Linear(24, 3)))
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        words = torch.randint(0, 20, (8, 4), generator=job.rng)
        model(words).square().mean().backward()
        optimizer.step()
    return {"model": weights(model)}


def constrained(job: Job, write: Change, **bounds: float) -> Returned:
    """Give the ps a constraint; plain PyTorch writes it after each step."""
    model = job.make(lambda: nn.Sequential(nn.Linear(7, 19, bias=False), nn.Tanh(), nn.Linear(19, 3, bias=False)))
    if job.ctx is not None:
        paceline.constrain(model.parameters(), **bounds)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.5, momentum=0.9))
    losses = []
    for loss in trained(job, model, optimizer):
        losses.append(loss)
        if job.ctx is None:
            write(model)
    return {"model": weights(model), "losses": losses}


def renormalize(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.renorm_(2, 0, 0.5)


case(TOPIC, "weights clipped by the ps: paceline.constrain(p, min=…, max=…)")(
    partial(constrained, write=clamp, min=-0.05, max=0.05)
)
case(TOPIC, "rows renormalized by the ps: paceline.constrain(p, max_norm=…)")(
    partial(constrained, write=renormalize, max_norm=0.5)
)


def rewritten_first(job: Job, write: Change) -> Returned:
    """Write into the parameters between prepare() and the first step."""
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    write(model)
    return {"losses": train(job, model, optimizer), "model": weights(model)}


def fill(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.1)


def load_other(model: nn.Module) -> None:
    """Values not made of the model's own: those may be of prepare(), or what the chief has loaded."""
    model.load_state_dict({k: torch.linspace(-0.5, 0.5, v.numel()).view_as(v) for k, v in weights(model).items()})


case(TOPIC, "parameters initialized anew after prepare()", two=Refused("written"), note=FIRST)(
    partial(rewritten_first, write=fill)
)
case(TOPIC, "model.load_state_dict() after prepare()")(partial(rewritten_first, write=load_other))
case(TOPIC, "load_state_dict() of a part after prepare()")(
    partial(
        rewritten_first,
        write=lambda model: model[0].load_state_dict({"weight": torch.full((19, 7), 0.3), "bias": torch.zeros(19)}),
    )
)


@case(TOPIC, "averages kept by hand and copied into the model at the end", two=Refused("written"), note=OTHERS)
def averages_swapped_in(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.5))
    average = [p.detach().clone() for p in model.parameters()]
    for _ in trained(job, model, optimizer):
        for kept, parameter in zip(average, model.parameters(), strict=True):
            kept.mul_(0.5).add_(parameter.detach(), alpha=0.5)
    with torch.no_grad():
        for kept, parameter in zip(average, model.parameters(), strict=True):
            parameter.copy_(kept)
    return {"model": weights(model)}


@case(TOPIC, "the best weights put back at the end", two=Refused("ctx.assign"), note=OTHERS)
def best_put_back(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.5))
    best = {}
    for step, _ in enumerate(trained(job, model, optimizer)):
        if step == 3:
            best = weights(model)
    model.load_state_dict(best)
    return {"model": weights(model)}


@case(TOPIC, "torch.optim.swa_utils: AveragedModel and update_bn", buffers="chief")
def swa(job: Job) -> Returned:
    model = job.make(lambda: nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)))
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.3))
    average = AveragedModel(model)
    for _ in trained(job, model, optimizer):
        average.update_parameters(model)
    update_bn([job.randn(5, 7) for _ in range(3)], average)
    return {"model": weights(model), "average": weights(average)}


# --- moved, cast, replaced ------------------------------------------------------------------------------------------


def changed(job: Job, change: Change, at: int = 3) -> Returned:
    """Change the model between two steps, and train on."""
    model = job.make(lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(96, 4), nn.Linear(4, 4)))
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(STEPS):
        if step == at:
            change(model)
        optimizer.zero_grad()
        model(job.randn(5, 3, 6, 6)).square().mean().backward()
        optimizer.step()
    return {"model": {name: value.contiguous() for name, value in weights(model).items()}}


def same_values(model: nn.Sequential) -> None:
    model[2].weight.data = model[2].weight.data.clone()


def other_values(model: nn.Sequential) -> None:
    model[2].weight.data = model[2].weight.data * 0.5


def replace_layer(model: nn.Sequential) -> None:
    model[3] = nn.Linear(4, 4)


def other_format(model: nn.Sequential) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


MOVED: dict[str, Change] = {
    "model.to() of the device and dtype that it has": lambda model: model.to("cpu", torch.float32),
    "a parameter's .data replaced by an equal copy": same_values,
    "model.share_memory()": lambda model: model.share_memory(),
}
for _name, _change in MOVED.items():
    case(MOVING, _name)(partial(changed, change=_change))
case(
    MOVING, "model.to(memory_format=torch.channels_last) after prepare()", one=Different(everywhere=False),
    two=Different(everywhere=False), note="It keeps the format that it had at `prepare()`: the same values, other last "
    "bits where torch then computes in another order.",
)(partial(changed, change=other_format))  # fmt: skip
case(MOVING, "a parameter's .data replaced by other values", two=Refused("written"), note=OTHERS)(
    partial(changed, change=other_values)
)


@case(
    MOVING, "a middle layer cast to bfloat16 after prepare()", one=Refused("bfloat16"),
    two=Refused("bfloat16"), note=BEFORE,
)  # fmt: skip
def half_in_the_middle(job: Job) -> Returned:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.middle(self.first(x).to(self.middle.weight.dtype)).float())

    model = job.make(Cast)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    train(job, model, optimizer, 2)
    model.middle.to(torch.bfloat16)
    return {"losses": train(job, model, optimizer), "model": weights(model)}


@case(
    MOVING, "the whole model cast to double after prepare()", one=Refused("float64"),
    two=Refused("float64"), note=BEFORE,
)  # fmt: skip
def double_after(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    model.double()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(job.randn(5, 7).double()).square().mean().backward()
        optimizer.step()
    return {"model": weights(model)}


case(MOVING, "a layer replaced by a new one", one=Refused("no longer"), two=Refused("no longer"), note=BEFORE)(
    partial(changed, change=replace_layer)
)


@case(
    MOVING, "two layers tied by storage (b.weight.data = a.weight.data)",
    one=Refused("share memory"), two=Refused("share memory"), note="Tie them as torch does: `b.weight = a.weight`.",
)  # fmt: skip
def tied_by_storage(job: Job) -> Returned:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(7, 7, bias=False), nn.Linear(7, 7, bias=False)
            self.b.weight.data = self.a.weight.data

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)))

    model = job.make(Tied)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    return {"losses": train(job, model, optimizer), "model": weights(model)}


@case(
    MOVING, "parameters that are views of one flat buffer", one=Refused("views"),
    two=Refused("views"), note="Clone them before `prepare()`; make such a buffer after it.",
)  # fmt: skip
def flat_views(job: Job) -> Returned:
    model = job.make(small)
    buffer = torch.cat([p.data.flatten() for p in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = buffer[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    for _ in trained(job, model, optimizer):
        buffer.mul_(0.9)
    return {"model": weights(model)}


@case(MOVING, "an LSTM, whose weights cuDNN flattens, evaluated and trained in turn")
def lstm(job: Job) -> Returned:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(7, 6, num_layers=2, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(x)[0])

    model = job.make(Sequence)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.01))
    for _ in range(STEPS):
        model.lstm.flatten_parameters()
        optimizer.zero_grad()
        model(job.randn(4, 5, 7)).square().mean().backward()
        optimizer.step()
    return {"model": weights(model)}


@case(MOVING, "torch.nn.utils.prune before prepare()")
def pruned(job: Job) -> Returned:
    model = job.make(small)
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    return {"losses": train(job, model, optimizer), "model": weights(model)}


@case(
    MOVING, "torch.nn.utils.prune in the middle",
    note="Checkpoints go on calling the parameter by its name at `prepare()`, and do not hold the mask: prune before.",
)  # fmt: skip
def pruned_later(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    train(job, model, optimizer, 2)
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    return {"losses": train(job, model, optimizer), "at the end": weights(model)}


@case(
    MOVING, "a parameter deleted from the model in the middle", one=Refused("no longer"),
    two=Refused("no longer"), note=BEFORE,
)  # fmt: skip
def deleted(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    train(job, model, optimizer, 2)
    model[2].bias = None
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(job, model).backward()
        optimizer.step()
    return {"model": weights(model)}
