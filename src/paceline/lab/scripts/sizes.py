"""HOW large are the models of the lab? Widths of fully connected layers, by the name their size has in tables.

Used by matrices and by the scripts that train. Pure: a matrix is read without torch.
"""

from collections.abc import Sequence
from itertools import pairwise

SIZES = {"11M": (784, 3072, 2800, 10), "100M": (784, 8192, 11400, 10)}


def count_parameters(widths: Sequence[int]) -> int:
    """Weights and biases.

    >>> {size: count_parameters(widths) for size, widths in SIZES.items()}
    {'11M': 11043930, '100M': 99944930}
    """
    return sum(before * after + after for before, after in pairwise(widths))
