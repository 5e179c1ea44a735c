"""Hand new values to a TensorFlow graph without one more copy: in aligned arrays that TensorFlow keeps as they are.

Used by frameworks/keras/training_step where a graph has called out. TensorFlow copies what comes back unless its
address is a multiple of 64; what it does not copy becomes the variable's own memory, until the next values are
assigned. Must never write into an array that is still read: it is taken again only when its references say that it is
ours alone.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

ALIGNMENT = 64
MOST = 4  # sets kept; more are in use only while a script keeps old values, and those are let go


class Lent:
    """Sets of arrays in the shapes of `views`, filled from them when asked."""

    def __init__(self, views: Sequence[Any]) -> None:
        self._views = views
        self._sets: list[_Set] = []

    def filled(self) -> list[Any]:
        """Copy what the views hold now into arrays that are not in use."""
        taken = next((each for each in self._sets if each.is_free()), None)
        if taken is None:
            taken = _Set(self._views)
            self._sets = [*self._sets[-(MOST - 1) :], taken]
        for array, view in zip(taken.arrays, self._views, strict=True):
            np.copyto(array, view)
        return list(taken.arrays)


class _Set:
    """One array a view. Each user of an array, or of a view of one, adds a reference to it or to its memory."""

    def __init__(self, views: Sequence[Any]) -> None:
        self._memory = [np.empty(view.nbytes + ALIGNMENT, np.uint8) for view in views]
        self.arrays = [_aligned(memory, view) for memory, view in zip(self._memory, views, strict=True)]
        self._own = self._references()

    def is_free(self) -> bool:
        return self._references() == self._own

    def _references(self) -> list[int]:
        return [sys.getrefcount(each) for each in (*self._memory, *self.arrays)]


def _aligned(memory: Any, like: Any) -> Any:
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
