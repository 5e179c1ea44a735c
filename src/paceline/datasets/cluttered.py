"""WHICH digits are hard to find? MNIST digits somewhere on a canvas of 40 x 40, among pieces of others.

Called by the demo transformer and examples (document 003). Must never give two images for one seed.
"""

import numpy as np
import numpy.typing as npt

from paceline.datasets.mnist import Labels, Pixels

DIGIT = 28
CANVAS = 40
PIECES = 5  # pieces of other digits on each canvas
PIECE = 5  # pixels wide and high


def cluttered(digits: Pixels, labels: Labels, count: int, seed: int) -> tuple[Pixels, Labels]:
    """`count` canvases (count, 1, 40, 40), each with a digit chosen among `digits`, and their labels.

    >>> images, labels = cluttered(np.ones((3, 784), np.float32), np.array([4, 5, 6]), 2, seed=1)
    >>> images.shape, bool(set(labels.tolist()) <= {4, 5, 6})
    ((2, 1, 40, 40), True)
    """
    generator = np.random.default_rng(seed)
    squares = digits.reshape(-1, DIGIT, DIGIT)
    chosen = generator.integers(0, len(squares), count)
    canvases = np.zeros((count, CANVAS, CANVAS), np.float32)
    _clutter(canvases, squares, generator)
    top, left = generator.integers(0, CANVAS - DIGIT + 1, (2, count))
    for canvas, digit, row, column in zip(canvases, squares[chosen], top, left, strict=True):
        canvas[row : row + DIGIT, column : column + DIGIT] += digit
    return canvases.clip(0.0, 1.0)[:, None], labels[chosen]


def _clutter(
    canvases: npt.NDArray[np.float32], squares: npt.NDArray[np.float32], generator: np.random.Generator
) -> None:
    """Lay pieces on each canvas; a later one covers an earlier one."""
    shape = (PIECES, len(canvases))
    owner = generator.integers(0, len(squares), shape)
    from_row, from_column = generator.integers(0, DIGIT - PIECE + 1, (2, *shape))
    to_row, to_column = generator.integers(0, CANVAS - PIECE + 1, (2, *shape))
    for piece, number in np.ndindex(shape):
        row, column = from_row[piece, number], from_column[piece, number]
        cut = squares[owner[piece, number], row : row + PIECE, column : column + PIECE]
        row, column = to_row[piece, number], to_column[piece, number]
        canvases[number, row : row + PIECE, column : column + PIECE] = cut
