"""Average the running statistics of the workers, weighted by samples, for the model file.

Used by worker/checkpoints/saving. Pure: values in, values out. No worker ever trains with this mean.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.checkpoint.tensors import Entry, values

HALF = 0x7FFF  # what rounds a float32 to bfloat16, beside the last bit that stays


def weights_of(told: Mapping[int, tuple[int, float | None]]) -> Mapping[int, float]:
    """Weigh each worker's statistics by the samples that it had pushed when it sent them, or all of them by steps if
    one worker's samples are not known. Leave out workers without a step.

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
    """Compute the weighted mean in float64. Where all have the same value, return that value.

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
