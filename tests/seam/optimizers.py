"""Cases of optimizers, their options and state, and schedulers."""

import copy
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from alike import Job, Returned, weights
from table import STEPS, Different, Refused, case, loss_of, small, train, trained
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)


@case("Optimizers and schedulers", "momentum")
def momentum(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses = train(job, model, optimizer)
    return {"model": weights(model), "losses": losses, "optimizer": optimizer.state_dict()}


@case("Optimizers and schedulers", "Adam")
def adam(job: Job) -> Returned:
    model = job.make(small)
    optimizer, model = job.prepare(Adam(model.parameters(), lr=0.01), model)
    losses = train(job, model, optimizer)
    return {"model": weights(model), "losses": losses, "optimizer": optimizer.state_dict()}


@case("Optimizers and schedulers", "AdamW")
def adamw(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, AdamW(model.parameters(), lr=0.01, weight_decay=0.2))
    losses = train(job, model, optimizer)
    return {"model": weights(model), "losses": losses, "optimizer": optimizer.state_dict()}


@case("Optimizers and schedulers", "groups with their own options")
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
    losses = train(job, model, optimizer)
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


case("Optimizers and schedulers", "StepLR made before")(lambda job: step_lr(job, True))


case("Optimizers and schedulers", "StepLR made after")(lambda job: step_lr(job, False))


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


case("Optimizers and schedulers", "OneCycleLR made before")(lambda job: one_cycle(job, True))


case("Optimizers and schedulers", "OneCycleLR made after")(lambda job: one_cycle(job, False))


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


case("Optimizers and schedulers", "ReduceLROnPlateau made before")(lambda job: plateau(job, True))


case("Optimizers and schedulers", "ReduceLROnPlateau made after")(lambda job: plateau(job, False))


@case("Optimizers and schedulers", "numpy's numbers as options")
def own_schedule(job: Job) -> Returned:
    """Rates computed with numpy are numpy's numbers."""
    import numpy as np

    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=np.float64(0.1), momentum=0.9))
    for step, _ in enumerate(trained(job, model, optimizer)):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 + np.cos(step / STEPS))
        optimizer.param_groups[0]["momentum"] = np.float32(0.5)
    return {"model": weights(model)}


@case("Optimizers and schedulers", "steps before prepare")
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
    losses = train(job, model, optimizer)
    return {"model": weights(model), "losses": losses, "optimizer": optimizer.state_dict()}


@case("Optimizers and schedulers", "a tensor as rate")
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


MADE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with Nesterov momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD with dampening": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD that maximizes": lambda p: SGD(p, lr=0.01, maximize=True),
    "Adam with amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "Adam foreach": lambda p: Adam(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop, centered": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def made(job: Job, make: Callable[[Any], torch.optim.Optimizer]) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, make(model.parameters()))
    losses = train(job, model, optimizer)
    return {"model": weights(model), "losses": losses, "optimizer": optimizer.state_dict()}


for _name, _make in MADE.items():
    case("Optimizers and schedulers", _name)(partial(made, make=_make))


@case("Optimizers and schedulers", "options changed by the script in the middle")
def changed_options(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    for step, _ in enumerate(trained(job, model, optimizer)):
        if step == 2:
            optimizer.param_groups[0].update(momentum=0.9, nesterov=True)
        if step == 4:
            optimizer.param_groups[0]["weight_decay"] = 0.1
        if step == 6:
            optimizer.param_groups[0]["lr"] = 0.0
    return {"model": weights(model), "optimizer": optimizer.state_dict()}


@case("Optimizers and schedulers", "SequentialLR of warm-up and cosine")
def sequential_lr(job: Job) -> Returned:
    model = job.make(small)
    optimizer = Adam(model.parameters(), lr=0.1)
    warm, cosine = LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 5)
    scheduler = SequentialLR(optimizer, [warm, cosine], [3])
    model, optimizer, scheduler = job.prepare(model, optimizer, scheduler)
    for _ in trained(job, model, optimizer):
        scheduler.step()
    return {"model": weights(model), "rates": scheduler.get_last_lr()}


@case("Optimizers and schedulers", "LambdaLR with a rate for each group")
def lambda_lr(job: Job) -> Returned:
    model = job.make(small)
    optimizer = SGD([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.3}], lr=0.1)
    model, optimizer = job.prepare(model, optimizer)
    scheduler = LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1 / (1 + step)])
    for _ in trained(job, model, optimizer):
        scheduler.step()
    return {"model": weights(model), "rates": scheduler.get_last_lr()}


@case("Optimizers and schedulers", "CyclicLR, which cycles the momentum")
def cyclic_lr(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    scheduler = CyclicLR(optimizer, 0.01, 0.2, step_size_up=3)
    for _ in trained(job, model, optimizer):
        scheduler.step()
    return {"model": weights(model), "momentum": optimizer.param_groups[0]["momentum"]}


@case("Optimizers and schedulers", "optimizer.state_dict() saved and loaded before prepare()")
def loaded_before(job: Job) -> Returned:
    model = job.make(small)
    optimizer = Adam(model.parameters(), lr=0.01)
    own = torch.Generator().manual_seed(5)  # the same on all workers
    model(torch.randn(5, 7, generator=own)).square().mean().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    again = Adam(model.parameters(), lr=0.5)
    again.load_state_dict(saved)
    model, again = job.prepare(model, again)
    train(job, model, again)
    return {"model": weights(model), "optimizer": again.state_dict()}


@case(
    "Optimizers and schedulers", "model and optimizer loaded in the middle (rolled back)", two=Refused("ctx.assign"),
    note="With several workers: on all of them inside `with ctx.assign():`.",
)  # fmt: skip
def rolled_back(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.01))
    train(job, model, optimizer, 3)
    saved = weights(model), copy.deepcopy(optimizer.state_dict())
    train(job, model, optimizer, 3)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(job, model, optimizer, 3)
    return {"model": weights(model), "optimizer": optimizer.state_dict()}


@case("Optimizers and schedulers", "rolled back inside ctx.assign()")
def rolled_back_together(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.01))
    train(job, model, optimizer, 3)
    saved = weights(model), copy.deepcopy(optimizer.state_dict())
    train(job, model, optimizer, 3)
    with job.ctx.assign() if job.ctx is not None else nullcontext():
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    train(job, model, optimizer, 3)
    return {"model": weights(model), "optimizer": optimizer.state_dict()}


@case(
    "Optimizers and schedulers",
    "optimizer.state read between steps",
    note="A copy of that moment: read it anew after each step.",
)
def state_read(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.01))
    seen = []
    for _ in trained(job, model, optimizer):
        state = optimizer.state[model[0].weight]
        seen.append([state["step"].clone(), state["exp_avg"].clone()])
    return {"model": weights(model), "seen": seen}


@case(
    "Optimizers and schedulers", "optimizer.state.clear() in the middle", two=Refused("state"),
    note="With several workers: on all of them inside `with ctx.assign():`.",
)  # fmt: skip
def state_cleared(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step, _ in enumerate(trained(job, model, optimizer)):
        if step == 4:
            optimizer.state.clear()
    return {"model": weights(model)}


@case(
    "Optimizers and schedulers", "a momentum buffer changed in place", two=Refused("state"),
    note="With several workers: on all of them inside `with ctx.assign():`.",
)  # fmt: skip
def state_changed(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step, _ in enumerate(trained(job, model, optimizer)):
        if step == 4:
            optimizer.state[model[0].weight]["momentum_buffer"].mul_(0.5)
    return {"model": weights(model)}


@case("Optimizers and schedulers", "optimizer.state replaced, and parts of it deleted, inside ctx.assign()")
def state_assigned(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.1))
    for step, _ in enumerate(trained(job, model, optimizer)):
        with job.ctx.assign() if job.ctx is not None else nullcontext():
            if step == 2:
                del optimizer.state[model[0].weight]
            if step == 4:
                optimizer.state = defaultdict(dict)
            if step == 6:
                optimizer.state[model[2].weight]["exp_avg"].mul_(0.5)
    return {"model": weights(model), "optimizer": optimizer.state_dict()}


@case("Optimizers and schedulers", "a copy of the optimizer (copy.deepcopy) that steps by itself")
def copied_optimizer(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.1))
    train(job, model, optimizer, 3)
    own, its = copy.deepcopy((model, optimizer))
    train(job, own, its, 2)
    copied = weights(own)
    train(job, model, optimizer, 3)
    return {"model": weights(model), "copied": copied, "state": optimizer.state_dict()}


@case(
    "Optimizers and schedulers", "an optimizer of another kind (LBFGS)", one=Refused("SGD"), two=Refused("SGD"),
    note="The refusal lists the optimizers that a ps runs. `--mode local` takes any optimizer: it runs on the worker.",
)  # fmt: skip
def lbfgs(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.1))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(5, 7)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    return {"model": weights(model)}


@case(
    "Optimizers and schedulers", "capturable=True", one=Refused("capturable"), two=Refused("capturable"),
    note="It is for CUDA graphs of the optimizer; the ps here runs on a CPU.",
)  # fmt: skip
def capturable(job: Job) -> Returned:
    model = job.make(small)
    model, _ = job.prepare(model, Adam(model.parameters(), lr=0.01, capturable=True))  # a step: torch refuses it
    return {"model": weights(model)}


@case(
    "Optimizers and schedulers", "add_param_group() after prepare()", one=Refused("group"), two=Refused("group"),
    note="Give all groups before `prepare()`; a group that shall wait is frozen until then (`requires_grad_(False)`).",
)  # fmt: skip
def added_group(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model[0].parameters(), lr=0.1))
    train(job, model, optimizer, 2)
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.3})
    train(job, model, optimizer)
    return {"model": weights(model)}


@case(
    "Optimizers and schedulers", "parameters taken out of param_groups, or groups put into another order",
    one=Refused("param_groups"), two=Refused("param_groups"),
    note="To leave a parameter out for a while: `requires_grad_(False)`, and its `.grad` to None.",
)  # fmt: skip
def changed_groups(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(
        model, SGD([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.3}], lr=0.1)
    )
    train(job, model, optimizer, 2)
    optimizer.param_groups.reverse()
    try:
        train(job, model, optimizer, 2)
    finally:
        optimizer.param_groups.reverse()
        del optimizer.param_groups[0]["params"][0]
    train(job, model, optimizer, 2)
    return {"model": weights(model)}


@case(
    "Optimizers and schedulers", "amsgrad=True set in the middle", one=Refused("max_exp_avg_sq"),
    two=Refused("max_exp_avg_sq"), note="torch's own optimizer raises KeyError there, too.",
)  # fmt: skip
def amsgrad_later(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.1))
    train(job, model, optimizer, 2)
    optimizer.param_groups[0]["amsgrad"] = True
    if job.ctx is not None:
        train(job, model, optimizer, 2)
    return {"model": weights(model)}


@case(
    "Optimizers and schedulers", "optimizer.step replaced by a function of the script before prepare()",
    one=Refused("replaced"), two=Refused("replaced"), note="Replace it after `prepare()`, or use a step hook.",
)  # fmt: skip
def replaced_step(job: Job) -> Returned:
    model = job.make(small)
    optimizer = SGD(model.parameters(), lr=0.1)
    own = optimizer.step

    def step() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.sign_()
        own()

    optimizer.step = step  # type: ignore[method-assign,assignment]
    model, optimizer = job.prepare(model, optimizer)
    train(job, model, optimizer)
    return {"model": weights(model)}


@case("Optimizers and schedulers", "optimizer.step wrapped by the script after prepare()")
def wrapped_step(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    own, steps = optimizer.step, []

    def step() -> None:
        steps.append(1)
        own()

    optimizer.step = step
    train(job, model, optimizer)
    return {"model": weights(model), "steps": steps}


@case(
    "Optimizers and schedulers", "Adam with a tensor as rate", one=Different(everywhere=False),
    two=Different(everywhere=False), note="torch computes in float32 with a rate that is a tensor; the ps takes it as "
    "a number, in double precision: other last bits.",
)  # fmt: skip
def adam_tensor_rate(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=torch.tensor(0.1)))
    train(job, model, optimizer)
    return {"model": weights(model)}


@case(
    "Optimizers and schedulers", "a second optimizer that was not prepared", two=Refused("prepared optimizer"),
    note="With several workers: train both parts with one optimizer's groups.",
)  # fmt: skip
def unprepared(job: Job) -> Returned:
    model = job.make(small)
    first, second = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)
    model, first = job.prepare(model, first)
    for _ in range(STEPS):
        model.zero_grad()
        loss_of(job, model).backward()
        first.step()
        second.step()
    return {"model": weights(model)}
