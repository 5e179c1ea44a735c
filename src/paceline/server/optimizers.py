"""WHICH optimizers does a ps run? Torch's own and Keras's formulas, by the names under which they travel.

Used by server/shard and server/blocks. A name is looked up here and nowhere else: what is not in the table is refused.
"""

import inspect
from collections.abc import Callable

import torch

from paceline.server import keras

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
    """The optimizer's own step without the profiler and hook wrappers around it: half of its cost at MNIST size."""
    step: Callable[[torch.optim.Optimizer], object] = inspect.unwrap(OPTIMIZERS[name].step)
    return step
