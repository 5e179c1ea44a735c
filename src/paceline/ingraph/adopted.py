"""WHAT does a task do with parameters that are nowhere else? It adds up their gradients and steps their optimizer.

These are ops, called by ingraph/resident and ingraph/elsewhere; ingraph/copies has the copies. An optimizer is torch's
own, by name and numbers, as on a ps. Must never let go of values unless it is asked for them, or the connection ends.
"""

from typing import Any

import torch

from paceline.errors import ProtocolError
from paceline.frameworks.torch.layout import SUPPORTED
from paceline.ingraph.copies import Copy, News, current, differentiated, held
from paceline.ingraph.op import op

OPTIMIZERS = {kind.__name__: kind for kind in SUPPORTED}
Group = dict[str, Any]  # options of one of the optimizer's groups, by name
Slots = dict[str, Any]  # what it remembers of one parameter


@op
def adopt(news: News, kind: str, groups: list[tuple[list[int], Group]]) -> None:
    """The values of these news are this copy's own from now on; `groups` are (numbers of parameters, options)."""
    copy = current(news)
    if kind not in OPTIMIZERS:
        raise ProtocolError(f"no optimizer {kind!r} runs here")
    parameters = list(copy.module.parameters())
    made = [{"params": [parameters[number] for number in numbers], **tupled(options)} for numbers, options in groups]
    copy.optimizer = OPTIMIZERS[kind](made)


@op
def accumulate(
    number: int, gradients: list[Any], is_kept: bool, zeroed: list[int], trained: list[bool]
) -> tuple[list[Any], list[int]]:
    """As backward, but the parameters' gradients stay here; which have one now is told. `trained`: as it is by now, and
    what is not drops its gradient, as in torch."""
    copy = held()
    zero(copy, zeroed)
    inputs, its = differentiated(copy, number, gradients, is_kept)
    parameters = list(copy.module.parameters())
    for at, gradient in its.items():
        if gradient is not None and trained[at]:
            mine = parameters[at].grad
            parameters[at].grad = gradient if mine is None else mine + gradient
    return inputs, [at for at, parameter in enumerate(parameters) if parameter.grad is not None]


@op
def norm(number: int, order: float) -> Any:
    """The norm of a parameter's gradient."""
    return torch.linalg.vector_norm(gradient_of(number), order)


@op
def scale(number: int, factor: Any) -> None:
    """A parameter's gradient times a number."""
    gradient_of(number).mul_(factor)


@op
def update(zeroed: list[int], options: list[Group]) -> None:
    """One step of the optimizer, with the options as they are now."""
    copy = held()
    zero(copy, zeroed)
    for group, its in zip(optimizer_of(copy).param_groups, options, strict=True):
        group.update(tupled(its))
    optimizer_of(copy).step()


@op
def fetch_values() -> list[Any]:
    """All parameters."""
    return [parameter.detach() for parameter in held().module.parameters()]


@op
def put_values(values: list[Any]) -> None:
    """All parameters from outside; what the optimizer remembers stays."""
    copy = held()
    with torch.no_grad():
        for parameter, value in zip(copy.module.parameters(), values, strict=True):
            parameter.copy_(value)


@op
def fetch_states() -> list[Slots]:
    """What the optimizer remembers of each parameter."""
    copy = held()
    states = optimizer_of(copy).state
    return [dict(states.get(parameter, {})) for parameter in copy.module.parameters()]


@op
def put_states(given: list[Slots]) -> None:
    """What the optimizer shall remember of each parameter."""
    copy = held()
    states = optimizer_of(copy).state
    for parameter, state in zip(copy.module.parameters(), given, strict=True):
        states.pop(parameter, None)
        if state:  # counters stay on the CPU, as in torch
            states[parameter] = {n: v.to(copy.device) if v.dim() else v for n, v in state.items()}


def zero(copy: Copy, zeroed: list[int]) -> None:
    parameters = list(copy.module.parameters())
    for number in zeroed:
        parameters[number].grad = None


def gradient_of(number: int) -> torch.Tensor:
    gradient = list(held().module.parameters())[number].grad
    if gradient is None:
        raise ProtocolError(f"parameter {number} of this copy has no gradient")
    return gradient


def optimizer_of(copy: Copy) -> torch.optim.Optimizer:
    if copy.optimizer is None:
        raise ProtocolError("the parameters of this copy are not its own")
    return copy.optimizer


def tupled(options: Group) -> Group:
    """Options as torch wants them: what has travelled as a list was a tuple."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
