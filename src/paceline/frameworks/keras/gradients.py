"""Write Keras gradients, which come as numpy arrays, into the slots that ps and worker share.

Used by frameworks/keras/training_step; worker/step/outgoing has what every framework shares.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from paceline.frameworks.keras.layout import Weight
from paceline.params.layout import Layout
from paceline.params.placement import Plan
from paceline.transport.base import Buffer
from paceline.worker.requests.link import Link
from paceline.worker.step import outgoing


def dtype_of(name: str) -> Any:
    """Return numpy's dtype of this name; bfloat16 is not numpy's own."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def vector(memory: memoryview, dtype: str, offset: int, numel: int) -> Any:
    """View `numel` numbers at byte `offset` of this memory as an array."""
    if numel == 0:
        return np.empty(0, dtype_of(dtype))
    return np.frombuffer(memory, dtype_of(dtype), numel, offset)


class Outgoing(outgoing.Outgoing):
    """Slots, seen by numpy; `weights` know in which order the layout has their axes."""

    def __init__(self, links: Sequence[Link], layout: Layout, plan: Plan, weights: Sequence[Weight], wire: str) -> None:
        self._weights = weights
        super().__init__(links, layout, plan, wire)

    def _vector(self, memory: memoryview, dtype: str, offset: int, numel: int) -> Any:
        return vector(memory, dtype, offset, numel)

    def _shaped(self, tensor: int, vector: Any) -> Any:
        weight = self._weights[tensor]
        return weight.as_own(vector.reshape(weight.spec.shape))

    def _is_finite(self, values: Any) -> bool:
        return bool(np.isfinite(values.astype(_summed(values.dtype), copy=False)).all())

    def write(
        self, gradients: outgoing.Gradients, has_gaps: bool, sent: Collection[int] = ()
    ) -> tuple[Sequence[Sequence[Buffer]], bool]:
        with np.errstate(all="ignore"):  # what overflows on a narrow wire is found by the sum
            for index, view in self._whole:
                if (gradient := gradients[index]) is not None:
                    np.copyto(view, gradient, casting="unsafe")
            for index, start, stop, part in self._cut:
                if (gradient := gradients[index]) is not None:
                    laid = self._weights[index].as_laid_out(gradient)
                    np.copyto(part, laid.reshape(-1)[start:stop], casting="unsafe")
            total = sum(float(np.add.reduce(each, dtype=_summed(each.dtype))) for each in self._sums)
        return self._payloads, math.isfinite(total)


def _summed(dtype: Any) -> Any:
    return np.float32 if dtype.itemsize < np.dtype(np.float32).itemsize else dtype
