"""WHICH running statistics does a model file hold when each worker has its own? Their mean, weighted by samples.

Used by worker/saving. Pure: values in, values out. The mean goes into files only; no worker ever trains with it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.checkpoint.tensors import Entry, values

HALF = 0x7FFF  # what rounds a float32 to bfloat16, beside the last bit that stays


def weights_of(told: Mapping[int, tuple[int, float | None]]) -> Mapping[int, float]:
    """How much each worker's statistics count: by the samples that it had pushed when it told them; by steps, where the
    samples of one are not known. Workers that had made none are left out.

    >>> weights_of({0: (2, 10.0), 1: (3, 30.0), 2: (0, 0.0)})
    {0: 10.0, 1: 30.0}
    >>> weights_of({0: (2, 10.0), 1: (3, None)})
    {0: 2.0, 1: 3.0}
    """
    samples = {worker: pushed for worker, (_, pushed) in told.items()}
    if any(each is None for each in samples.values()) or not any(samples.values()):
        samples = {worker: float(steps) for worker, (steps, _) in told.items()}
    return {worker: each for worker, each in samples.items() if each}


def mean(entries: Sequence[Entry], weights: Sequence[float]) -> Entry:
    """The weighted mean, computed in float64. Where all have the same value, that value.

    >>> values(mean([Entry("float32", (1,), np.float32(x).tobytes()) for x in (1, 5)], [30.0, 10.0]))
    array([2.], dtype=float32)
    """
    first, parts = entries[0], [values(entry).astype(np.float64) for entry in entries]
    total = sum(weight * part for weight, part in zip(weights, parts, strict=True)) / sum(weights)
    is_same = np.all([part == parts[0] for part in parts], axis=0)
    return Entry(first.dtype, first.shape, _encoded(np.where(is_same, parts[0], total), first.dtype))


def _encoded(numbers: "np.ndarray[Any, Any]", dtype: str) -> bytes:
    if dtype != "bfloat16":
        return numbers.astype(dtype).tobytes()
    wide = numbers.astype(np.float32).view(np.uint32)
    rounded = ((wide + HALF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded).astype(np.uint16).tobytes()
