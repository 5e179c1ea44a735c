"""The optimizers that a ps runs: torch's own and Keras's formulas, by the names that workers send.

Used by shard.py and blocks.py. A name that is not in the table is refused.
"""

import inspect
from collections.abc import Callable

import torch

from paceline.server.numbers import keras

TORCH = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    **{name: getattr(torch.optim, name) for name in TORCH},
    "keras.SGD": keras.SGD,
    "keras.Adam": keras.Adam,
    "keras.AdamW": keras.Adam,  # the same: in Keras every optimizer can decay weights
    "keras.Adagrad": keras.Adagrad,
    "keras.RMSprop": keras.RMSprop,
}


def raw_step(name: str) -> Callable[[torch.optim.Optimizer], object]:
    """Return the optimizer's step without torch's profiler and hook wrappers: half of its cost at MNIST size."""
    step: Callable[[torch.optim.Optimizer], object] = inspect.unwrap(OPTIMIZERS[name].step)
    return step
