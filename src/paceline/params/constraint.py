"""Describe what a parameter must satisfy after every update: bounds of its elements, a largest norm of its rows.

A part of the layout (params/layout): it travels with it, is compared by every ps, and decides where a tensor may be
cut. Must never import a framework: `hold` calls methods of the torch tensor that it is given.
"""

from collections.abc import Sequence
from math import isnan, lcm
from typing import Any

import msgspec

LONGEST_ROW = 1 << 15  # elements; torch sums up longer rows in another order when they stand alone
VECTOR = 64  # elements; cuts at multiples of it are multiples of 64 bytes, and of every vector register


class NormRange(msgspec.Struct, frozen=True):
    """Keras's MaxNorm, MinMaxNorm and UnitNorm: L2 norms along `axes` are moved towards `min`..`max`, at `rate`."""

    min: float
    max: float
    rate: float
    axes: tuple[int, ...]
    epsilon: float

    def hold(self, parameter: Any) -> None:
        """Change a torch tensor in place, by Keras's formula."""
        norms = parameter.square().sum(self.axes, keepdim=True).sqrt_()
        wanted = norms.clamp(self.min, self.max).mul_(self.rate).add_(norms * (1 - self.rate))
        parameter.mul_(wanted.div_(norms.add_(self.epsilon)))


class Constraint(msgspec.Struct, frozen=True):
    """Elements are clamped to `min`..`max`; then each row (index of dimension 0) whose L2 norm is above `max_norm` is
    scaled to it.

    >>> str(Constraint(min=-0.01, max=0.01)), str(Constraint(max_norm=1.0))
    ('min=-0.01, max=0.01', 'max_norm=1.0')
    """

    min: float | None = None
    max: float | None = None
    max_norm: float | None = None
    norm: NormRange | None = None  # in the place of max_norm

    @property
    def is_of_rows(self) -> bool:
        """Whether elements depend on each other."""
        return self.max_norm is not None or self.norm is not None

    def __str__(self) -> str:
        said = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return ", ".join(f"{name}={value}" for name, value in said if value is not None)

    def problem(self, dtype: str, dimensions: int) -> str:
        """Say why a tensor cannot satisfy this; empty if it can.

        >>> Constraint(min=1.0, max=0.0).problem("float32", 2)
        'min=1.0 is more than max=0.0'
        """
        values = [v for v in (self.min, self.max, self.max_norm) if v is not None]
        if self.norm is not None:
            values += [self.norm.min, self.norm.max, self.norm.rate, self.norm.epsilon]
            if not self.norm.axes or not all(0 <= axis < dimensions for axis in self.norm.axes):
                return f"it has {dimensions} axes, so none of norms along {list(self.norm.axes)}"
        if not values:
            return "it names none of min=, max= and max_norm="
        if any(isnan(value) for value in values):
            return "NaN is no bound"
        if self.min is not None and self.max is not None and self.min > self.max:
            return f"min={self.min} is more than max={self.max}"
        if "float" not in dtype:
            return f"its elements are {dtype}, which no gradient changes"
        return self._norm_problem(dimensions) if self.max_norm is not None else ""

    def _norm_problem(self, dimensions: int) -> str:
        if self.max_norm is not None and self.max_norm <= 0:
            return f"max_norm={self.max_norm} is not above 0"
        if dimensions < 2:
            return "max_norm= bounds each row of a matrix (each index of dimension 0), and this tensor has no rows"
        if (self.min or 0.0) > 0 or (self.max or 0.0) < 0:
            return "a row that is scaled to max_norm= may leave bounds that do not include 0"
        return ""

    def cut_every(self, shape: Sequence[int], stride: Sequence[int]) -> int:
        """Return at multiples of how many elements the tensor may be cut, in memory order: a row stays in one piece.
        Rows that are long or do not lie side by side keep the tensor whole.

        >>> bounded = Constraint(max_norm=1.0)
        >>> bounded.cut_every((1000, 10), (10, 1)), bounded.cut_every((1000, 10), (1, 1000))
        (320, 10000)
        """
        numel = 1
        for extent in shape:
            numel *= extent
        if not self.is_of_rows or not numel:
            return 1
        row = numel // shape[0] if shape else 1
        if self.norm is not None or stride[0] != row or row >= LONGEST_ROW:
            return numel
        return min(lcm(row, VECTOR), numel)

    def hold(self, parameter: Any) -> None:
        """Change a torch tensor in place, without a gradient of it, so that it satisfies this."""
        if self.min is not None or self.max is not None:
            parameter.clamp_(self.min, self.max)
        if self.max_norm is not None:
            parameter.renorm_(2, 0, self.max_norm)
        if self.norm is not None:
            self.norm.hold(parameter)
