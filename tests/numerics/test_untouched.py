"""Design 2.2: what must work untouched, trained on a cluster and compared bit for bit with plain PyTorch.

Every recipe is an ordinary training loop. `alike.check` runs it plain and on a cluster, compares everything it
returns, and makes sure that the ps applied every one of its steps.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from alike import Job, Returned, check, weights
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel

pytestmark = pytest.mark.filterwarnings("error")

STEPS = 8


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 19), nn.Tanh(), nn.Linear(19, 3))


def loss_of(job: Job, model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return model(job.randn(5, 7)).square().mean()


def trained(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> Iterator[torch.Tensor]:
    """The plain loop; what comes in between is the caller's."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(job, model)
        loss.backward()
        optimizer.step()
        yield loss.detach()


# --- optimizers, groups, schedulers ---------------------------------------------------------------------------------


def momentum(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses = list(trained(job, model, optimizer))
    return {"model": weights(model), "losses": losses, "optimizer": optimizer.state_dict()}


def adam(job: Job) -> Returned:
    model = job.make(small)
    optimizer, model = job.prepare(Adam(model.parameters(), lr=0.01), model)
    losses = list(trained(job, model, optimizer))
    return {"model": weights(model), "losses": losses, "optimizer": optimizer.state_dict()}


def adamw(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, AdamW(model.parameters(), lr=0.01, weight_decay=0.2))
    losses = list(trained(job, model, optimizer))
    return {"model": weights(model), "losses": losses, "optimizer": optimizer.state_dict()}


def groups(job: Job) -> Returned:
    model = job.make(small)
    optimizer = AdamW(
        [
            {"params": [model[0].weight, model[2].bias], "lr": 0.1, "weight_decay": 0.3, "betas": (0.5, 0.7)},
            {"params": [model[2].weight]},
            {"params": [model[0].bias], "weight_decay": 0.0, "lr": 0.001},
        ],
        lr=0.01,
        weight_decay=0.05,
    )
    model, optimizer = job.prepare(model, optimizer)
    losses = list(trained(job, model, optimizer))
    return {"model": weights(model), "losses": losses, "optimizer": optimizer.state_dict()}


def step_lr(job: Job, is_before: bool) -> Returned:
    model = job.make(small)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = StepLR(optimizer, 2, 0.5) if is_before else None
    if scheduler is None:
        model, optimizer = job.prepare(model, optimizer)
        scheduler = StepLR(optimizer, 2, 0.5)
    else:
        model, optimizer, scheduler = job.prepare(model, optimizer, scheduler)
    rates = []
    for _ in trained(job, model, optimizer):
        rates.append(scheduler.get_last_lr())
        scheduler.step()
    return {"model": weights(model), "rates": rates, "scheduler": scheduler.state_dict()}


def one_cycle(job: Job, is_before: bool) -> Returned:
    """Cycles the momentum too: every step has other options."""
    model = job.make(small)
    optimizer = AdamW(model.parameters(), lr=0.1) if job.num_workers > 1 else SGD(model.parameters(), 0.1, 0.9)
    scheduler = OneCycleLR(optimizer, 0.2, total_steps=STEPS + 1) if is_before else None
    model, optimizer = job.prepare(model, optimizer)
    scheduler = scheduler or OneCycleLR(optimizer, 0.2, total_steps=STEPS + 1)
    for _ in trained(job, model, optimizer):
        scheduler.step()
    return {"model": weights(model), "optimizer": optimizer.state_dict()}


def plateau(job: Job, is_before: bool) -> Returned:
    model = job.make(small)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, patience=1, factor=0.3) if is_before else None
    model, optimizer = job.prepare(model, optimizer)
    scheduler = scheduler or ReduceLROnPlateau(optimizer, patience=1, factor=0.3)
    for _ in trained(job, model, optimizer):
        scheduler.step(1.0)  # never better, and the same on every worker
    assert optimizer.param_groups[0]["lr"] < 0.01
    return {"model": weights(model), "rate": optimizer.param_groups[0]["lr"]}


def own_schedule(job: Job) -> Returned:
    """Rates computed with numpy are numpy's numbers."""
    import numpy as np

    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=np.float64(0.1), momentum=0.9))
    for step, _ in enumerate(trained(job, model, optimizer)):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + np.cos(step / STEPS))
        optimizer.param_groups[0]["momentum"] = np.float32(0.5)
    return {"model": weights(model)}


def warm_state(job: Job) -> Returned:
    """A few plain steps before prepare: what the optimizer remembers of them comes along."""
    model = job.make(small)
    optimizer = Adam(model.parameters(), lr=0.01, amsgrad=True)
    own = torch.Generator().manual_seed(5)  # the same on all workers
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 7, generator=own)).square().mean().backward()
        optimizer.step()
    model, optimizer = job.prepare(model, optimizer)
    losses = list(trained(job, model, optimizer))
    return {"model": weights(model), "losses": losses, "optimizer": optimizer.state_dict()}


# --- parameters -----------------------------------------------------------------------------------------------------


def frozen(job: Job) -> Returned:
    model = job.make(small)
    model[0].requires_grad_(False)
    model, optimizer = job.prepare(model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    list(trained(job, model, optimizer))
    return {"model": weights(model)}


def frozen_inside(job: Job) -> Returned:
    """In the optimizer, with weight decay: without a gradient it must not move."""
    model = job.make(small)
    model[2].weight.requires_grad_(False)
    model, optimizer = job.prepare(model, AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    list(trained(job, model, optimizer))
    return {"model": weights(model), "optimizer": optimizer.state_dict()}


def unfrozen_later(job: Job) -> Returned:
    model = job.make(small)
    model[0].requires_grad_(False)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.1))
    list(trained(job, model, optimizer, 4))
    model[0].requires_grad_(True)
    list(trained(job, model, optimizer, 5))
    model[2].requires_grad_(False)
    list(trained(job, model, optimizer, 3))
    return {"model": weights(model), "optimizer": optimizer.state_dict()}


def tied(job: Job) -> Returned:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(7, 7, bias=False)
            self.decoder = nn.Linear(7, 7)
            self.decoder.weight = self.encoder.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.decoder(torch.tanh(self.encoder(x)))

    model = job.make(Tied)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    list(trained(job, model, optimizer))
    assert model.decoder.weight is model.encoder.weight
    return {"model": weights(model)}


def sometimes_unused(job: Job) -> Returned:
    """A branch that has no gradient in some steps, and on some workers, is not a branch with a zero gradient."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(7, 3), nn.Linear(7, 3)

        def forward(self, x: torch.Tensor, is_left: bool) -> torch.Tensor:
            return self.left(x) if is_left else self.right(x)

    model = job.make(Branches)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.1))
    for step in range(STEPS):
        optimizer.zero_grad()
        model(job.randn(5, 7), (step + job.index) % 3 == 0).square().mean().backward()
        optimizer.step()
    return {"model": weights(model), "optimizer": optimizer.state_dict()}


def no_gradient_at_all(job: Job) -> Returned:
    """A step without any gradient is still a step."""
    model = job.make(small)
    model, optimizer = job.prepare(model, AdamW(model.parameters(), lr=0.1))
    list(trained(job, model, optimizer, 2))
    optimizer.zero_grad()
    optimizer.step()
    list(trained(job, model, optimizer, 2))
    return {"model": weights(model)}


def loose_parameter(job: Job) -> Returned:
    """A parameter that only the optimizer knows, and a number without dimensions."""
    model = job.make(small)
    scale = nn.Parameter(torch.tensor(1.5))
    model, optimizer = job.prepare(model, SGD([*model.parameters(), scale], lr=0.1, momentum=0.5))
    for _ in range(STEPS):
        optimizer.zero_grad()
        (loss_of(job, model) * scale).backward()
        optimizer.step()
    if job.ctx is not None:
        job.ctx.pull()
    return {"model": {**weights(model), "optimizer.4": scale.detach().clone()}}


# --- gradients ------------------------------------------------------------------------------------------------------


def clipped(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.5, momentum=0.9))
    norms = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        (loss_of(job, model) * 100).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.7))
        optimizer.step()
    return {"model": weights(model), "norms": norms}


def accumulated(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.01))
    for number in range(3 * STEPS):
        (loss_of(job, model) / 3).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return {"model": weights(model)}


def zeroed(job: Job, set_to_none: bool) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(job, model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)  # at once, while the answer may still be on its way
        model.zero_grad(set_to_none=set_to_none)
    return {"model": weights(model)}


def own_gradient(job: Job) -> Returned:
    """Gradients that the script sets itself, with strides of their own."""
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    for _ in range(STEPS):
        loss_of(job, model)
        for parameter in model.parameters():
            value = job.randn(*reversed(parameter.shape))
            parameter.grad = value.t() if value.dim() == 2 else value[:1].expand(parameter.shape)
        optimizer.step()
    return {"model": weights(model)}


def scaled(job: Job, is_fused: bool) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9, fused=is_fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(job, model)
        scaler.scale(loss.float()).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
    return {"model": weights(model), "scale": scaler.get_scale()}


def overflowed(job: Job) -> Returned:
    """The scaler leaves out the step whose gradient overflowed; it is no update anywhere."""
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(job, model) * (float("inf") if step == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"model": weights(model), "scale": scaler.get_scale()}


# --- models ---------------------------------------------------------------------------------------------------------


def batch_norm(job: Job) -> Returned:
    model = job.make(lambda: nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)))
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    losses = list(trained(job, model, optimizer))
    model.eval()
    losses.append(loss_of(job, model).detach())
    return {"model": weights(model), "losses": losses}


def channels_last(job: Job) -> Returned:
    def build() -> nn.Module:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(64, 2))
        return net.to(memory_format=torch.channels_last)

    model = job.make(build)
    before = model[0].weight.stride()
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.01))
    for _ in range(STEPS):
        optimizer.zero_grad()
        images = job.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
        model(images).square().mean().backward()
        optimizer.step()
    assert model[0].weight.stride() == before != (27, 9, 3, 1)
    return {"model": weights(model), "optimizer": optimizer.state_dict()}


def bfloat16(job: Job) -> Returned:
    model = job.make(lambda: small().to(torch.bfloat16))
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.01))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(job.randn(5, 7, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
    return {"model": weights(model), "optimizer": optimizer.state_dict()}


class Mixed(nn.Module):
    """Four dtypes, not in the order of their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Linear(7, 5, dtype=torch.bfloat16)
        self.single = nn.Linear(5, 5)
        self.long = nn.Linear(5, 5, dtype=torch.float64)
        self.half_float = nn.Linear(5, 3, dtype=torch.float16)
        self.last = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.short(x.to(torch.bfloat16))
        x = self.long(self.single(x.float()).double())
        return self.last(self.half_float(x.half()).to(torch.bfloat16)).float()


def mixed_dtypes(job: Job) -> Returned:
    model = job.make(Mixed)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    list(trained(job, model, optimizer))
    return {"model": weights(model)}


def not_dense(job: Job) -> Returned:
    """Parameters that are cut out of something larger, or lie transposed, or hold nothing."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.thin = nn.Parameter(torch.randn(7, 6)[:, ::2])
            self.turned = nn.Parameter(torch.randn(3, 7).t())
            self.empty = nn.Parameter(torch.empty(0, 7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.thin + x @ self.turned + (x @ self.empty.t()).sum()

    model = job.make(Odd)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    list(trained(job, model, optimizer))
    return {"model": weights(model)}


def copied(job: Job) -> Returned:
    """A deepcopy is a model of its own: it trains, moves and evaluates without a word to the ps."""
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    twins = []
    for number, _ in enumerate(trained(job, model, optimizer)):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin(torch.ones(1, 7))
        if number == 4:
            apart = copy.deepcopy(model)
            own = SGD(apart.parameters(), lr=10.0)
            apart(torch.ones(1, 7)).sum().backward()
            own.step()
            twins.append(weights(apart))
        twins.append(weights(twin))
    return {"model": weights(model), "twins": twins}


# --- the loop itself ------------------------------------------------------------------------------------------------


def hooks(job: Job) -> Returned:
    """Each hook once a step, those made before prepare and those made after; they may change things."""
    model = job.make(small)
    optimizer = SGD(model.parameters(), lr=0.1)
    seen: list[str] = []

    def halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.append("pre")
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    if job.num_workers == 1:  # the plain run averages in a hook of its own, after which halving is no more the same
        optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    model, optimizer = job.prepare(model, optimizer)
    optimizer.register_step_pre_hook(lambda *_: seen.append("late pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("late post"))
    list(trained(job, model, optimizer))
    return {"model": weights(model), "seen": seen}


def with_closure(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(job, model)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).detach() for _ in range(STEPS)]
    return {"model": weights(model), "losses": losses}


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(7, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.encoder(x)))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x).square().mean()


def without_call(job: Job, how: str) -> Returned:
    """Loops that never call the model itself must not train on old weights (traps 7)."""
    model = job.make(Parts)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.3, momentum=0.9))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = job.randn(5, 7)
        if how == "forward":
            loss = model.forward(x).square().mean()
        elif how == "parts":
            loss = model.head(torch.tanh(model.encoder(x))).square().mean()
        else:
            loss = model.loss(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if how == "method, evaluated by call" or (how == "method, evaluated once" and step == 0):
            with torch.no_grad():
                losses.append(model(torch.ones(1, 7)))
    return {"model": model_values(job, model), "losses": losses}


def model_values(job: Job, model: nn.Module) -> dict[str, torch.Tensor]:
    if job.ctx is not None:
        job.ctx.pull()
    return weights(model)


def read_between(job: Job) -> Returned:
    """What state_dict and state_dict of the optimizer say between the steps is up to date."""
    model = job.make(small)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.1))
    seen: list[Any] = []
    for _ in trained(job, model, optimizer):
        seen.append(weights(model))
        seen.append(copy.deepcopy(optimizer.state_dict()))
    return {"model": weights(model), "seen": seen}


def averaged(job: Job) -> Returned:
    """torch's own average of the weights, made right after each step, and a look at them through parameters()."""
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.3))
    average = AveragedModel(model, avg_fn=lambda old, new, count: 0.7 * old + 0.3 * new)
    norms = []
    for _ in trained(job, model, optimizer):
        average.update_parameters(model)
        norms.append([p.detach().norm() for p in model.parameters()])
    return {"model": weights(model), "average": weights(average), "norms": norms}


def tensor_rate(job: Job) -> Returned:
    """A rate that is a tensor changes in place; it must be noticed all the same."""
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=torch.tensor(0.5)))
    scheduler = StepLR(optimizer, 1, 0.5)
    rates = []
    for _ in trained(job, model, optimizer):
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"].clone())
    return {"model": weights(model), "rates": rates}


UNTOUCHED: dict[str, Callable[[Job], Returned]] = {
    "momentum": momentum,
    "Adam": adam,
    "AdamW": adamw,
    "groups with their own options": groups,
    "StepLR made before": lambda job: step_lr(job, True),
    "StepLR made after": lambda job: step_lr(job, False),
    "OneCycleLR made before": lambda job: one_cycle(job, True),
    "OneCycleLR made after": lambda job: one_cycle(job, False),
    "ReduceLROnPlateau made before": lambda job: plateau(job, True),
    "ReduceLROnPlateau made after": lambda job: plateau(job, False),
    "numpy's numbers as options": own_schedule,
    "steps before prepare": warm_state,
    "frozen": frozen,
    "frozen inside the optimizer": frozen_inside,
    "unfrozen later": unfrozen_later,
    "tied": tied,
    "sometimes without a gradient": sometimes_unused,
    "no gradient at all": no_gradient_at_all,
    "loose parameter": loose_parameter,
    "clip_grad_norm_": clipped,
    "accumulation": accumulated,
    "set_to_none=True": lambda job: zeroed(job, True),
    "set_to_none=False": lambda job: zeroed(job, False),
    "gradients set by hand": own_gradient,
    "GradScaler": lambda job: scaled(job, False),
    "GradScaler fused": lambda job: scaled(job, True),
    "GradScaler overflow": overflowed,
    "BatchNorm": batch_norm,
    "channels_last": channels_last,
    "bfloat16": bfloat16,
    "mixed dtypes": mixed_dtypes,
    "not dense": not_dense,
    "deepcopy": copied,
    "hooks": hooks,
    "closure": with_closure,
    "model.forward(x)": lambda job: without_call(job, "forward"),
    "model.encoder(x)": lambda job: without_call(job, "parts"),
    "model.loss(x)": lambda job: without_call(job, "method"),
    "model.loss(x) and model(x)": lambda job: without_call(job, "method, evaluated by call"),
    "model.loss(x) and model(x) once": lambda job: without_call(job, "method, evaluated once"),
    "read between steps": read_between,
    "AveragedModel": averaged,
    "a tensor as rate": tensor_rate,
}
ALONE = {"closure"}  # the plain run of two workers averages before its closure, not after
# Plain PyTorch keeps half-precision parameters in half precision; a ps does so when it is told to (test_master.py).
OPTIONS: dict[str, dict[str, Any]] = {"bfloat16": {"master": "model"}, "mixed dtypes": {"master": "model"}}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_untouched_on_1_ps_and_1_worker(name: str, tmp_path: Path) -> None:
    check(UNTOUCHED[name], tmp_path, workers=1, mode="async", ps=1, lane="inproc", **OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", [n for n in UNTOUCHED if n not in ALONE])
def test_untouched_on_2_ps_and_2_workers_in_sync(name: str, tmp_path: Path) -> None:
    lane = "tcp" if sorted(UNTOUCHED).index(name) % 2 else "shm"
    check(UNTOUCHED[name], tmp_path, workers=2, mode="sync", ps=2, lane=lane, **OPTIONS.get(name, {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in UNTOUCHED if n not in ALONE])
@pytest.mark.parametrize("lane", ["inproc", "shm", "tcp"])
@pytest.mark.parametrize("placement", ["bytes", "round_robin", "greedy"])
def test_untouched_everywhere(name: str, lane: str, placement: str, tmp_path: Path) -> None:
    options = {"lane": lane, "placement": placement, **OPTIONS.get(name, {})}
    check(UNTOUCHED[name], tmp_path, workers=3, mode="sync", ps=3, **options)


def twice(job: Job, at: tuple[int, ...]) -> Returned:
    """Two steps for one forward pass, at some of the steps."""
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(job, model).backward()
        optimizer.step()
        if step in at:
            optimizer.step()
    return {"model": weights(model)}


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("at", [(0, 5), (2, 5)])
def test_two_steps_for_one_forward_pass(at: tuple[int, ...], mode: str, tmp_path: Path) -> None:
    check(lambda job: twice(job, at), tmp_path, workers=1 if mode == "async" else 2, mode=mode, ps=2, lane="shm")


def test_the_optimizer_is_the_same_object_of_its_own_class() -> None:
    def recipe(job: Job) -> Returned:
        model = job.make(small)
        optimizer = Adagrad(model.parameters(), lr=0.1)
        scheduler = StepLR(optimizer, 1)
        given = (scheduler, optimizer, model)
        back = job.prepare(*given)
        assert all(a is b for a, b in zip(given, back, strict=True))
        assert isinstance(optimizer, Adagrad)
        assert type(optimizer).__name__ == "Adagrad"
        assert scheduler.optimizer is optimizer
        return {}

    from alike import run_cluster

    run_cluster(recipe, 1, ps=1)
