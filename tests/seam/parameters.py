"""Cases of parameters: frozen, tied, unused, of odd shapes and dtypes."""

import torch
from alike import Job, Returned, weights
from table import STEPS, Refused, case, loss_of, small, train
from torch import nn
from torch.optim import SGD, Adam, AdamW


@case("Parameters", "frozen")
def frozen(job: Job) -> Returned:
    model = job.make(small)
    model[0].requires_grad_(False)
    model, optimizer = job.prepare(model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    train(job, model, optimizer)
    return {"model": weights(model)}


@case("Parameters", "frozen inside the optimizer")
def frozen_inside(job: Job) -> Returned:
    """In the optimizer, with weight decay: without a gradient it must not move."""
    model = job.make(small)
    model[2].weight.requires_grad_(False)
    model, optimizer = job.prepare(model, AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    train(job, model, optimizer)
    return {"model": weights(model), "optimizer": optimizer.state_dict()}


@case("Parameters", "unfrozen later")
def unfrozen_later(job: Job) -> Returned:
    model = job.make(small)
    model[0].requires_grad_(False)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.1))
    train(job, model, optimizer, 4)
    model[0].requires_grad_(True)
    train(job, model, optimizer, 5)
    model[2].requires_grad_(False)
    train(job, model, optimizer, 3)
    return {"model": weights(model), "optimizer": optimizer.state_dict()}


@case("Parameters", "tied")
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
    train(job, model, optimizer)
    assert model.decoder.weight is model.encoder.weight
    return {"model": weights(model)}


@case("Parameters", "sometimes without a gradient")
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


@case("Parameters", "no gradient at all")
def no_gradient_at_all(job: Job) -> Returned:
    """A step without any gradient is still a step."""
    model = job.make(small)
    model, optimizer = job.prepare(model, AdamW(model.parameters(), lr=0.1))
    train(job, model, optimizer, 2)
    optimizer.zero_grad()
    optimizer.step()
    train(job, model, optimizer, 2)
    return {"model": weights(model)}


@case("Parameters", "loose parameter")
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


@case("Parameters", "not dense")
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
    train(job, model, optimizer)
    return {"model": weights(model)}


@case("Parameters", "frozen layers that are unfrozen one after the other")
def unfrozen_in_turn(job: Job) -> Returned:
    model = job.make(small)
    model.requires_grad_(False)
    model[2].bias.requires_grad_(True)
    model, optimizer = job.prepare(model, AdamW(model.parameters(), lr=0.01, weight_decay=0.1))
    for part in (model[2].weight, model[0].weight, model[0].bias):
        train(job, model, optimizer, 2)
        part.requires_grad_(True)
    train(job, model, optimizer, 2)
    return {"model": weights(model)}


@case("Parameters", "parametrizations: weight_norm and spectral_norm")
def parametrized(job: Job) -> Returned:
    def build() -> nn.Module:
        utils = nn.utils.parametrizations
        return nn.Sequential(utils.weight_norm(nn.Linear(7, 9)), nn.Tanh(), utils.weight_norm(nn.Linear(9, 3)))

    model = job.make(build)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.01))
    return {"losses": train(job, model, optimizer), "model": weights(model)}


@case(
    "Parameters", "complex parameters", one=Refused("complex64"), two=Refused("complex64"),
    note="Keep real and imaginary part as two parameters (`torch.view_as_real`).",
)  # fmt: skip
def complex_parameters(job: Job) -> Returned:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, 3, dtype=torch.complex64))
            self.bias = nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(torch.complex64) @ self.weight).abs() + self.bias

    model = job.make(Complex)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    return {"losses": train(job, model, optimizer), "model": weights(model)}


@case("Parameters", "parameters without elements")
def without_elements(job: Job) -> Returned:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.none, self.nothing = (
                small(),
                nn.Parameter(torch.zeros(0)),
                nn.Parameter(torch.zeros(0, 3)),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x) + x[:, :0] @ self.nothing + self.none.sum()

    model = job.make(Empty)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.1))
    return {"losses": train(job, model, optimizer), "model": weights(model)}


@case("Parameters", "float64 and a parameter without dimensions")
def double(job: Job) -> Returned:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 3, dtype=torch.float64)
            self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.double()) * self.scale

    model = job.make(Scaled)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.1))
    return {"losses": train(job, model, optimizer), "model": weights(model)}


@case("Parameters", "frozen parameters of whole numbers and of bool")
def whole_numbers(job: Job) -> Returned:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 3)
            self.code = nn.Parameter(torch.arange(5), requires_grad=False)
            self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.mask

    model = job.make(Masked)
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.1))
    return {"losses": train(job, model, optimizer), "model": weights(model)}


@case("Parameters", "large tensors, cut over three ps", ps=3)
def large(job: Job) -> Returned:
    model = job.make(lambda: nn.Sequential(nn.Linear(7, 900), nn.Linear(900, 700), nn.Linear(700, 3)))
    model, optimizer = job.prepare(model, Adam(model.parameters(), lr=0.01))
    return {"losses": train(job, model, optimizer, 3), "model": weights(model)}


@case(
    "Parameters", "lazy layers that have not seen a batch (nn.LazyLinear)", one=Refused("LazyLinear"),
    two=Refused("LazyLinear"), note="Run one batch through the model before `prepare()`.",
)  # fmt: skip
def lazy(job: Job) -> Returned:
    model = job.make(lambda: nn.Sequential(nn.LazyLinear(9), nn.Tanh(), nn.LazyLinear(3)))
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    return {"losses": train(job, model, optimizer), "model": weights(model)}


@case("Parameters", "lazy layers that have seen one")
def lazy_made(job: Job) -> Returned:
    def build() -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(9), nn.Tanh(), nn.LazyLinear(3))
        model(torch.zeros(1, 7))
        return model

    model = job.make(build)
    model, optimizer = job.prepare(model, SGD(model.parameters(), lr=0.1))
    return {"losses": train(job, model, optimizer), "model": weights(model)}
