"""WHAT can a network learn without a download? Ten kinds of shapes, drawn by a seed in any colours, place and size.

Called by datasets/cifar10. Must never make a class that a mirror image, a crop or another colour would change.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Field = npt.NDArray[np.float64]
Shape = Callable[[Field, Field], npt.NDArray[np.bool_]]

# By label: whether a point belongs to the shape; x and y are 0 in its middle, and 1 at its edge.
SHAPES: tuple[tuple[str, Shape], ...] = (
    ("disc", lambda x, y: x**2 + y**2 < 0.8),
    ("ring", lambda x, y: (x**2 + y**2 < 1.0) & (x**2 + y**2 > 0.4)),
    ("square", lambda x, y: (abs(x) < 0.8) & (abs(y) < 0.8)),
    ("frame", lambda x, y: (abs(x) < 0.9) & (abs(y) < 0.9) & ((abs(x) > 0.5) | (abs(y) > 0.5))),
    ("plus", lambda x, y: ((abs(x) < 0.25) | (abs(y) < 0.25)) & (abs(x) < 1) & (abs(y) < 1)),
    ("cross", lambda x, y: ((abs(x - y) < 0.35) | (abs(x + y) < 0.35)) & (abs(x) < 0.9) & (abs(y) < 0.9)),
    ("bars lying", lambda x, y: (np.floor(2.5 * y + 0.5) % 2 == 0) & (abs(x) < 1) & (abs(y) < 1)),
    ("bars standing", lambda x, y: (np.floor(2.5 * x + 0.5) % 2 == 0) & (abs(x) < 1) & (abs(y) < 1)),
    ("triangle", lambda x, y: (y < 0.8) & (y > 2 * abs(x) - 0.9)),
    ("hourglass", lambda x, y: (abs(x) < abs(y) + 0.1) & (abs(y) < 0.9)),
)
NOISE = 24.0  # of 255, a pixel
BLOCK = 512  # images drawn at once: keeps the memory small


def draw(labels: npt.NDArray[np.integer], side: int, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    """One image a label, (number, 3, side, side): shape and ground in two random colours, with noise over both.

    >>> draw(np.array([0, 1]), 32, np.random.default_rng(0)).shape
    (2, 3, 32, 32)
    """
    blocks = [labels[begin : begin + BLOCK] for begin in range(0, len(labels), BLOCK)]
    return np.concatenate([_draw(block, side, generator) for block in blocks])


def _draw(labels: npt.NDArray[np.integer], side: int, generator: np.random.Generator) -> npt.NDArray[np.uint8]:
    count = len(labels)
    radius = generator.uniform(0.28, 0.42, (count, 1, 1)) * side
    middle = side / 2 + generator.uniform(-0.12, 0.12, (2, count, 1, 1)) * side
    rows, columns = np.mgrid[0:side, 0:side][:, None] + 0.5
    y, x = (rows - middle[0]) / radius, (columns - middle[1]) / radius
    is_shape = np.empty((count, side, side), bool)
    for label, (_, belongs) in enumerate(SHAPES):
        chosen = labels == label
        is_shape[chosen] = belongs(x[chosen], y[chosen])
    shape, ground = _two_colours(count, generator)
    image = np.where(is_shape[:, None], shape, ground) + generator.normal(0, NOISE, (count, 3, side, side))
    return image.clip(0, 255).astype(np.uint8)


def _two_colours(count: int, generator: np.random.Generator) -> tuple[Field, Field]:
    """Far enough apart in at least one channel that the shape can be seen."""
    ground = generator.uniform(0, 255, (count, 3, 1, 1))
    step = generator.uniform(60, 127, (count, 3, 1, 1))
    return np.where(ground < 127.5, ground + step, ground - step), ground
