"""Cases of loops: closures, two models, evaluation in between, threads, averages."""

import copy
import threading
from typing import Any

import torch
from alike import Job, Returned, weights
from table import STEPS, Refused, case, loss_of, small, train, trained
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.swa_utils import AveragedModel

TOPIC = "Loops"


@case(TOPIC, "hooks")
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
    train(job, model, optimizer)
    return {"model": weights(model), "seen": seen}


@case(TOPIC, "closure")
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


case(TOPIC, "model.forward(x)")(lambda job: without_call(job, "forward"))


case(TOPIC, "model.encoder(x)")(lambda job: without_call(job, "parts"))


case(TOPIC, "model.loss(x)")(lambda job: without_call(job, "method"))


case(TOPIC, "model.loss(x) and model(x)")(lambda job: without_call(job, "method, evaluated by call"))


case(TOPIC, "model.loss(x) and model(x) once")(lambda job: without_call(job, "method, evaluated once"))


def model_values(job: Job, model: nn.Module) -> dict[str, torch.Tensor]:
    if job.ctx is not None:
        job.ctx.pull()
    return weights(model)


@case(TOPIC, "read between steps")
def read_between(job: Job) -> Returned:
    """What state_dict and state_dict of the optimizer say between the steps is up to date."""
    model = job.make(small)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.1))
    seen: list[Any] = []
    for _ in trained(job, model, optimizer):
        seen.append(weights(model))
        seen.append(copy.deepcopy(optimizer.state_dict()))
    return {"model": weights(model), "seen": seen}


@case(TOPIC, "AveragedModel")
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


@case(TOPIC, "two optimizer steps for one forward pass")
def two_steps(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step, _ in enumerate(trained(job, model, optimizer)):
        if step in (0, 5):
            optimizer.step()
    return {"model": weights(model)}


class Module(nn.Module):
    """What Lightning calls a LightningModule, in small."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small()

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


@case(TOPIC, "a loop like Lightning's: training_step() inside a closure")
def like_lightning(job: Job) -> Returned:
    model = job.make(Module)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.1))

    def closure() -> torch.Tensor:
        loss = model.training_step(job.randn(5, 7))
        optimizer.zero_grad()
        loss.backward()
        return loss

    losses = [optimizer.step(closure=closure).detach() for _ in range(STEPS)]
    return {"losses": losses, "model": weights(model)}


@case(TOPIC, "a loop like accelerate's: the optimizer in a wrapper, gradients accumulated")
def wrapped(job: Job) -> Returned:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

        @property
        def param_groups(self) -> Any:
            return self.inner.param_groups

        def step(self, closure: Any = None) -> None:
            self.inner.step(closure)

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.inner.zero_grad(set_to_none)

    model = job.make(small)
    model, inner = job.prepare(model, Adam(model.parameters(), lr=0.1))
    optimizer = Wrapper(inner)
    for number in range(2 * STEPS):
        (loss_of(job, model) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return {"model": weights(model)}


@case(TOPIC, "evaluation between steps: eval(), no_grad, inference_mode, train()")
def evaluated(job: Job) -> Returned:
    model = job.make(lambda: nn.Sequential(nn.Linear(7, 9), nn.Dropout(0.0), nn.Linear(9, 3)))
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    seen = []
    for step, _ in enumerate(trained(job, model, optimizer)):
        model.eval()
        with torch.no_grad() if step % 2 else torch.inference_mode():
            seen.append(model(torch.ones(1, 7)).clone())
        model.train()
    return {"model": weights(model), "seen": [value.clone() for value in seen]}


@case(TOPIC, "a GAN in one optimizer: generator and discriminator frozen in turn")
def gan_in_turn(job: Job) -> Returned:
    model = job.make(lambda: nn.ModuleDict({"g": nn.Linear(7, 6), "d": nn.Linear(6, 1)}))
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.05))
    for step in range(STEPS):
        model["g"].requires_grad_(bool(step % 2))
        model["d"].requires_grad_(not step % 2)
        optimizer.zero_grad()
        score = model["d"](model["g"](job.randn(5, 7))).mean()
        (score if step % 2 else -score).backward()
        optimizer.step()
    return {"model": weights(model)}


@case(
    TOPIC, "a GAN with two pairs of model and optimizer", one=Refused("one pair"), two=Refused("one pair"),
    note="Put both models into one `nn.ModuleDict` with one optimizer, and freeze them in turn (the row above).",
)  # fmt: skip
def gan_of_two_pairs(job: Job) -> Returned:
    generator, critic = job.make(small), job.make(lambda: nn.Linear(3, 1), seed=1)
    generator, first = job.prepare(generator, Adam(generator.parameters(), lr=0.1))
    critic, second = job.prepare(critic, Adam(critic.parameters(), lr=0.1))
    for _ in range(STEPS):
        second.zero_grad()
        critic(generator(job.randn(5, 7)).detach()).mean().backward()
        second.step()
        first.zero_grad()
        (-critic(generator(job.randn(5, 7)))).mean().backward()
        first.step()
    return {"model": weights(generator)}


@case(
    TOPIC, "a perturbation and a second backward for each step (SAM by hand)",
    note="The perturbation is taken back before `step()`. Undone in other bits, it counts as a write (above).",
)  # fmt: skip
def sharpness_aware(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    for _ in range(STEPS):
        x = job.randn(5, 7)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            moves = [0.05 * p.grad / p.grad.norm() for p in model.parameters()]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.copy_(value)
        optimizer.step()
    return {"model": weights(model)}


@case(TOPIC, "the same by torch.func.functional_call on a copy")
def sharpness_aware_on_a_copy(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    for _ in range(STEPS):
        x, named = job.randn(5, 7), dict(model.named_parameters())
        slopes = torch.autograd.grad(model(x).square().mean(), list(named.values()))
        moved = {
            name: (p + 0.05 * g / g.norm()).detach().requires_grad_()
            for (name, p), g in zip(named.items(), slopes, strict=True)
        }
        torch.func.functional_call(model, moved, (x,)).square().mean().backward()
        for name, parameter in named.items():
            parameter.grad = moved[name].grad
        optimizer.step()
    return {"model": weights(model)}


@case(TOPIC, "an average kept by hand beside the model, evaluated as a copy")
def average_beside(job: Job) -> Returned:
    model = job.make(small)
    average = copy.deepcopy(model)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.5))
    seen = []
    for _ in trained(job, model, optimizer):
        with torch.no_grad():
            for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(parameter, 0.1)
            seen.append(average(torch.ones(1, 7)))
    return {"model": weights(model), "average": weights(average), "seen": seen}


@case(TOPIC, "a student that learns from a deepcopy of itself (mean teacher)")
def mean_teacher(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    teacher = copy.deepcopy(model).requires_grad_(False)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = job.randn(5, 7)
        ((model(x) - teacher(x)).square().mean() + model(x).square().mean()).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
    return {"model": weights(model), "teacher": weights(teacher)}


@case(TOPIC, "another model with an optimizer of its own, trained beside, never prepared")
def trained_beside(job: Job) -> Returned:
    model, own = job.make(small), job.make(small, seed=3)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    beside = SGD(own.parameters(), lr=0.1)
    for _ in trained(job, model, optimizer):
        beside.zero_grad()
        own(torch.ones(2, 7)).square().mean().backward()
        beside.step()
    return {"model": weights(model), "own": weights(own)}


@case(TOPIC, "data loaded by another thread")
def other_thread(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    batches: list[torch.Tensor] = []
    loader = threading.Thread(target=lambda: batches.extend(job.randn(5, 7) for _ in range(STEPS)))
    loader.start()
    loader.join(60)
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return {"model": weights(model)}


@case(TOPIC, "the whole loop in another thread")
def trained_by_a_thread(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    losses: list[torch.Tensor] = []

    def work() -> None:
        torch.set_num_threads(1)  # a thread's own
        losses.extend(train(job, model, optimizer))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    return {"losses": losses, "model": weights(model)}


@case(TOPIC, "early stopping after some steps, and reading the model at the end")
def stopped_early(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    for step, _ in enumerate(trained(job, model, optimizer)):
        if step == 4:
            break
    return {"model": weights(model)}
