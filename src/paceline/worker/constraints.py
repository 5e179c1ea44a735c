"""Mark parameters with a constraint that the ps keeps after every update: paceline.constrain.

Imports no framework itself; frameworks/torch/constraints and frameworks/keras/constraints know the parameters.
"""

from typing import Any

from paceline.errors import UsageError
from paceline.params.constraint import Constraint
from paceline.worker.framework import is_of_keras, keras_module, torch_module
from paceline.worker.script import script_line


def constrain(
    parameters: Any, min: float | None = None, max: float | None = None, max_norm: float | None = None
) -> None:
    """Have these parameters constrained after every update, from the first one on. Call it before ctx.prepare().

    `parameters`: a parameter, or several (`model.critic.parameters()`); in Keras, variables. `min`, `max`: as
    `p.data.clamp_(min, max)`. `max_norm`: as `p.data.renorm_(2, 0, max_norm)`, which scales each row (each index of
    dimension 0) whose L2 norm is larger; p has at least two dimensions. With bounds too, elements are clamped first.

    On a cluster the ps does this in every mode; in mode local each worker does it after every step of its own, too.
    Without a cluster it is done at the end of optimizer.step(). Only the parameter itself is marked: a copy of the
    model, or a parameter that is made anew, has no constraint.
    """
    constraint = Constraint(_number("min", min), _number("max", max), _number("max_norm", max_norm))
    found = [parameters] if hasattr(parameters, "dtype") else _several(parameters)
    module = keras_module if is_of_keras(type(found[0])) else torch_module
    module("constraints").mark(found, constraint)


def _several(parameters: Any) -> list[Any]:
    try:
        found = list(parameters)
    except TypeError:
        found = []
    if not found:
        given = type(parameters).__name__
        raise UsageError(f"constrain() takes a parameter, or several of them, and {given} has none{script_line()}")
    return found


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"constrain({name}={value!r}): {name} is a number{script_line()}") from None


def check(what: str, constraint: Constraint, dtype: str, dimensions: int, before: object, is_prepared: bool) -> None:
    """Refuse a constraint that the named parameter cannot satisfy, that differs from the one it had `before`, or that
    comes after prepare()."""
    problem = constraint.problem(dtype, dimensions)
    if before not in (None, constraint):
        problem = problem or f"it has a constraint already ({before}), so say all of it in one call"
    if before is None and is_prepared:
        late = "this comes after prepare(), when the ps have laid out what they keep: call it before prepare()"
        problem = problem or late
    if problem:
        raise UsageError(f"constrain() of {what}: {problem}{script_line()}")
