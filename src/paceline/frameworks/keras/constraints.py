"""Say what Keras's constraints of variables are on a ps, and give variables those of paceline.constrain.

Keras calls `variable.constraint` after each update of its optimizer. That stays so without a cluster and in mode local;
on a cluster the ps does it in the update, and here it is replaced by one that changes nothing. Keras itself is
imported only where a constraint is called.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.errors import UsageError
from paceline.params.constraint import Constraint, NormRange
from paceline.worker.constraints import check
from paceline.worker.framework import is_of_keras
from paceline.worker.script import script_line

OF_NORMS = ("MaxNorm", "MinMaxNorm", "UnitNorm")


class Bounds:
    """A Keras constraint made by paceline.constrain."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint

    def __call__(self, values: Any) -> Any:
        from keras import ops

        bounds = self.constraint
        if bounds.min is not None:
            values = ops.maximum(values, bounds.min)
        if bounds.max is not None:
            values = ops.minimum(values, bounds.max)
        if bounds.max_norm is None:
            return values
        axes = tuple(range(1, len(values.shape)))
        norms = ops.sqrt(ops.sum(ops.square(values), axis=axes, keepdims=True))
        return values * ops.where(norms > bounds.max_norm, bounds.max_norm / (norms + 1e-7), 1.0)  # as torch.renorm


class Kept:
    """Stands for a constraint that the ps keeps: what comes from there is left as it is."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __call__(self, values: Any) -> Any:
        return values


def mark(variables: Sequence[Any], constraint: Constraint) -> None:
    """Give the constraint to all these variables, or to none."""
    for variable in variables:
        if not is_of_keras(type(variable)) or not hasattr(variable, "constraint"):
            raise UsageError(f"constrain() takes variables, not a {type(variable).__name__}{script_line()}")
        own = _original(variable)
        before = own.constraint if isinstance(own, Bounds) else None if own is None else type(own).__name__
        is_prepared = getattr(variable, "is_prepared_by_paceline", False)
        check(variable.path, constraint, variable.dtype, len(variable.shape), before, is_prepared)
    for variable in variables:
        if _original(variable) is None:
            variable.constraint = Bounds(constraint)


def bind(variables: Iterable[Any], is_kept: bool) -> None:
    """Close these variables to further constraints; `is_kept`: a ps keeps those that they have."""
    for variable in variables:
        variable.is_prepared_by_paceline = True
        if is_kept and variable.constraint is not None:
            variable.constraint = Kept(_original(variable))


def release(variables: Iterable[Any]) -> None:
    """Give variables back their own constraints, after a run."""
    for variable in variables:
        variable.constraint = _original(variable)


def constraint_of(name: str, variable: Any, axes: Sequence[int], is_local: bool) -> Constraint | None:
    """Return a variable's constraint as a ps keeps it, with its axes as in the layout. One that a ps does not know is
    left to the optimizer where that runs here (`is_local`), else refused."""
    said = _original(variable)
    if said is None:
        return None
    if isinstance(said, Bounds):
        if said.constraint.max_norm is not None and axes[:1] != (0,):
            raise UsageError(
                f"names: {name} has a max_norm= of its rows, so its axis 0 is the first in the layout, too"
            )
        return said.constraint
    kind = type(said).__name__
    if type(said).__module__.startswith("keras."):
        if kind == "NonNeg":
            return Constraint(min=0.0)
        if kind in OF_NORMS:
            return Constraint(norm=_range(said, [axes.index(axis) for axis in _axes(said, len(axes))]))
    if is_local:
        return None
    raise UsageError(
        f"{name} has the constraint {kind}, which a ps does not know: use NonNeg, {', '.join(OF_NORMS)} of Keras, or "
        "paceline.constrain(variable, min=…, max=…, max_norm=…) before prepare() (`--mode local` takes any: there the "
        "optimizer runs on the worker)"
    )


def _original(variable: Any) -> Any:
    said = variable.constraint
    return said.of if isinstance(said, Kept) else said


def _axes(said: Any, dimensions: int) -> list[int]:
    given = [said.axis] if isinstance(said.axis, int) else said.axis
    axes = range(dimensions) if given is None else [int(axis) for axis in given]
    return [axis % dimensions for axis in axes]


def _range(said: Any, axes: Sequence[int]) -> NormRange:
    from keras import backend

    low = {"UnitNorm": 1.0, "MaxNorm": 0.0}.get(type(said).__name__, getattr(said, "min_value", 0.0))
    high = getattr(said, "max_value", 1.0)
    rate = getattr(said, "rate", 1.0)
    return NormRange(float(low), float(high), float(rate), tuple(sorted(axes)), float(backend.epsilon()))
