"""Cases of gradients: clipped, accumulated, scaled, set by hand, left out."""

import warnings

import torch
from alike import Job, Returned, weights
from table import STEPS, Different, Refused, case, loss_of, small, train
from torch import nn
from torch.optim import SGD, Adam, AdamW

TOPIC = "Gradients"


@case(TOPIC, "clip_grad_norm_")
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


@case(TOPIC, "accumulation")
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


case(TOPIC, "set_to_none=True")(lambda job: zeroed(job, True))


case(TOPIC, "set_to_none=False")(lambda job: zeroed(job, False))


@case(TOPIC, "gradients set by hand")
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


case(TOPIC, "GradScaler")(lambda job: scaled(job, False))


case(TOPIC, "GradScaler fused")(lambda job: scaled(job, True))


@case(TOPIC, "GradScaler overflow")
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


@case(TOPIC, "clip_grad_value_")
def clipped_by_value(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.5))
    for _ in range(STEPS):
        optimizer.zero_grad()
        (loss_of(job, model) * 100).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
    return {"model": weights(model)}


def add_a_tenth(parameter: torch.Tensor) -> None:
    parameter.grad.add_(0.1)


@case(TOPIC, "hooks on parameters that change gradients")
def gradient_hooks(job: Job) -> Returned:
    model = job.make(small)
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    model[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model[2].bias.register_post_accumulate_grad_hook(add_a_tenth)
    return {"losses": train(job, model, optimizer), "model": weights(model)}


@case(TOPIC, "gradients cleared by hand (p.grad = None; p.grad.zero_())")
def cleared_by_hand(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(STEPS):
        loss_of(job, model).backward()
        optimizer.step()
        for parameter in model.parameters():
            if step % 2:
                parameter.grad = None
            else:
                parameter.grad.zero_()
    return {"model": weights(model)}


@case(TOPIC, "a gradient penalty (create_graph=True)")
def gradient_penalty(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.01))
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = job.randn(5, 7).requires_grad_()
        out = model(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + (slope.norm() - 1).square()).backward()
        optimizer.step()
    return {"model": weights(model)}


@case(TOPIC, "gradients of torch.autograd.grad assigned to p.grad")
def grad_assigned(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    for _ in range(STEPS):
        gradients = torch.autograd.grad(loss_of(job, model), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return {"model": weights(model)}


@case(TOPIC, "per-sample gradients (torch.func.vmap), clipped and summed")
def per_sample(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x[None],)).square().mean()

    for _ in range(STEPS):
        named = {name: p.detach() for name, p in model.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(named, job.randn(5, 7))
        for name, parameter in model.named_parameters():
            parameter.grad = each[name].clamp(-0.1, 0.1).sum(0)
        optimizer.step()
    return {"model": weights(model)}


@case(TOPIC, "two backward passes for one step (retain_graph=True)")
def backward_twice(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        out = model(job.randn(5, 7))
        out.square().mean().backward(retain_graph=True)
        (out.abs().mean() * 0.1).backward()
        optimizer.step()
    return {"model": weights(model)}


@case(TOPIC, "accumulation under bfloat16 autocast, clipped")
def accumulated_autocast(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, AdamW(model.parameters(), lr=0.01))
    for number in range(2 * STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(job, model) / 2
        loss.backward()
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return {"model": weights(model)}


@case(TOPIC, "a step left out by the script (loss not finite, continue)")
def left_out(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(job, model)
        if step == 4:
            continue
        loss.backward()
        optimizer.step()
    return {"model": weights(model)}


@case(TOPIC, "an error in the middle that the script catches")
def caught(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        optimizer.zero_grad()
        try:
            if step == 4:
                raise RuntimeError("out of memory, says the script")
            loss_of(job, model).backward()
        except RuntimeError:
            continue
        optimizer.step()
    return {"model": weights(model)}


@case(
    TOPIC, "a gradient that is not finite", one=Different(), two=Different(),
    note="Plain PyTorch makes the model NaN. Here such a gradient is discarded, "
    "counted and named; ten in a row end the run.",
)  # fmt: skip
def not_finite(job: Job) -> Returned:
    model = job.make(small)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss_of(job, model) * (float("nan") if step == 4 else 1.0)).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says which step was discarded
            optimizer.step()
    return {"model": weights(model)}


@case(
    TOPIC, "gradients of another dtype (p.grad_dtype)", one=Refused("float32"), two=Refused("float32"),
    note="Leave `grad_dtype` as it is. `--master` says in which precision a ps keeps a half-precision model.",
)  # fmt: skip
def grad_dtype(job: Job) -> Returned:
    model = job.make(lambda: nn.Linear(7, 3, dtype=torch.bfloat16))
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.ones(parameter.shape, dtype=torch.float32)
        optimizer.step()
    return {"model": weights(model)}


@case(
    TOPIC, "sparse gradients (nn.Embedding(sparse=True))", one=Refused("sparse"), two=Refused("sparse"),
    note="Use `sparse=False`. `--mode local`, where the optimizer runs on the worker, takes "
    "them where torch's optimizer does.",
)  # fmt: skip
def sparse(job: Job) -> Returned:
    model = job.make(lambda: nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Flatten(), nn.Linear(24, 3)))
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randint(0, 20, (8, 4), generator=job.rng)).square().mean().backward()
        optimizer.step()
    return {"model": weights(model)}


@case(
    TOPIC, "an optimizer for each parameter, stepped during backward", one=Refused("one pair"), two=Refused("one pair"),
    note="Step one optimizer after `backward()`; the ps holds the optimizer's memory, so nothing is saved by it here.",
)  # fmt: skip
def step_in_backward(job: Job) -> Returned:
    model = job.make(small)
    optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}
    model, _ = job.prepare(model, optimizers[model[0].weight])
    for parameter, optimizer in list(optimizers.items())[1:]:
        _, optimizers[parameter] = job.prepare(model, optimizer)

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(STEPS):
        loss_of(job, model).backward()
    return {"model": weights(model)}
