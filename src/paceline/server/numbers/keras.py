"""Keras's optimizers as torch optimizers, where Keras's formulas are not torch's.

They differ in epsilon inside or outside the root, lr inside the momentum, and bias corrections in the parameter's own
precision. Used by optimizers.py for models that train in Keras. The arithmetic is torch's, in Keras's order of
operations, so that the bits are plain Keras's. It is elementwise, so a vector may be cut anywhere. Never imports Keras.

A formula with the step's number uses one count for all parameters, as Keras's `iterations` does: a tensor that had no
gradient in a step is left alone, but its `step` counts.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch

State = dict[str, Any]
Group = dict[str, Any]


class KerasOptimizer(torch.optim.Optimizer):
    """Base of all: pick the parameters with a gradient, count steps, and decay weights before the update."""

    options: ClassVar[Group] = {}  # those of its own, with Keras's defaults
    counts: ClassVar[bool] = False  # whether its formula has the number of the step in it

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.001, "weight_decay": 0.0, **self.options, **options})
        for group in self.param_groups:
            for name, value in group.items():
                if name != "params" and not isinstance(value, int | float):
                    raise ValueError(f"{name} is {value!r}, which is no number")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # nobody has a closure here
        """Update every parameter that has a gradient."""
        for parameter, gradient, state, group in self._due():
            if group["weight_decay"]:
                parameter.sub_((parameter * group["weight_decay"]).mul_(group["lr"]))
            self.update(parameter, gradient, state, group)

    def _due(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, State, Group]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    if self.counts:
                        state["step"] = torch.tensor(0.0)
                    for name, value in self.first(group).items():
                        state[name] = torch.full_like(parameter, value)
                if self.counts:
                    state["step"] += 1
                if parameter.grad is not None:
                    yield parameter, parameter.grad, state, group

    def first(self, group: Group) -> dict[str, float]:
        """Return the names of a parameter's state and its first values."""
        return {}

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, group: Group) -> None:
        """Update one parameter in place."""
        raise NotImplementedError


class SGD(KerasOptimizer):
    """Momentum holds lr times gradients, so a new lr counts from the next gradient on (in torch: at once)."""

    options: ClassVar[Group] = {"momentum": 0.0, "nesterov": False}

    def first(self, group: Group) -> dict[str, float]:
        return {"momentum": 0.0} if group["momentum"] else {}

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, group: Group) -> None:
        step = gradient * group["lr"]
        if not group["momentum"]:
            parameter.sub_(step)
            return
        momentum = state["momentum"].mul_(group["momentum"]).sub_(step)
        if group["nesterov"]:
            parameter.add_((momentum * group["momentum"]).sub_(step))
        else:
            parameter.add_(momentum)


class Adam(KerasOptimizer):
    """epsilon is added to the root of what is not corrected yet ("epsilon hat" of the paper)."""

    options: ClassVar[Group] = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False}
    counts: ClassVar[bool] = True

    def first(self, group: Group) -> dict[str, float]:
        hat = {"velocity_hat": 0.0} if group["amsgrad"] else {}
        return {"momentum": 0.0, "velocity": 0.0, **hat}

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, group: Group) -> None:
        alpha = _corrected(group, state["step"].item(), parameter.dtype)
        momentum, velocity = state["momentum"], state["velocity"]
        momentum.add_((gradient - momentum).mul_(1 - group["beta_1"]))
        velocity.add_((gradient * gradient).sub_(velocity).mul_(1 - group["beta_2"]))
        if group["amsgrad"]:
            velocity = torch.maximum(state["velocity_hat"], velocity, out=state["velocity_hat"])
        parameter.sub_((momentum * alpha).div_(velocity.sqrt().add_(group["epsilon"])))


def _corrected(group: Group, step: float, dtype: torch.dtype) -> float:
    """Return lr with both bias corrections, rounded at every operation as Keras rounds it."""
    kind: Any = np.float64 if dtype == torch.float64 else np.float32
    one, count = kind(1), kind(step)
    first, second = kind(group["beta_1"]) ** count, kind(group["beta_2"]) ** count
    return float(kind(group["lr"]) * np.sqrt(one - second) / (one - first))


class Adagrad(KerasOptimizer):
    """epsilon is added inside the root."""

    options: ClassVar[Group] = {"initial_accumulator_value": 0.1, "epsilon": 1e-7}

    def first(self, group: Group) -> dict[str, float]:
        return {"accumulator": group["initial_accumulator_value"]}

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, group: Group) -> None:
        accumulator = state["accumulator"].add_(gradient * gradient)
        parameter.sub_((gradient * group["lr"]).div_((accumulator + group["epsilon"]).sqrt_()))


class RMSprop(KerasOptimizer):
    """epsilon is added inside the root; momentum is of increments, lr in them."""

    options: ClassVar[Group] = {"rho": 0.9, "momentum": 0.0, "epsilon": 1e-7, "centered": False}

    def first(self, group: Group) -> dict[str, float]:
        momentum = {"momentum": 0.0} if group["momentum"] > 0 else {}
        return {"velocity": 0.0, **momentum, **({"average_gradient": 0.0} if group["centered"] else {})}

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: State, group: Group) -> None:
        rho = group["rho"]
        velocity = state["velocity"].mul_(rho).add_((gradient * gradient).mul_(1 - rho))
        if group["centered"]:
            average = state["average_gradient"].mul_(rho).add_(gradient * (1 - rho))
            root = (velocity - average * average).add_(group["epsilon"]).sqrt_()
        else:
            root = (velocity + group["epsilon"]).sqrt_()
        increment = (gradient * group["lr"]).div_(root)
        if group["momentum"] > 0:
            increment = state["momentum"].mul_(group["momentum"]).add_(increment)
        parameter.sub_(increment)
