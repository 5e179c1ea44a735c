"""Find what a script writes into the parameters: weight clipping, noise, averages that are swapped in.

Used by worker/training_step, which sends such writes to the ps or refuses them: the next pull would overwrite them. The
bytes are compared, by digests, because a write through `.data` or numpy leaves no other trace. No framework here.
"""

from collections.abc import Sequence
from typing import Protocol

from xxhash import xxh3_64_intdigest


class Writes(Protocol):
    """Tells whether the parameters are still what was pulled."""

    def remember(self) -> None:
        """Take the values that lie there now for those of the ps."""
        ...

    def found(self) -> Sequence[int]:
        """Return the indices of the trained tensors that were written since `remember`."""
        ...


class Unwatched:
    """Parameters that the worker trains by itself (mode local): every step writes them."""

    def remember(self) -> None:
        """Do nothing."""

    def found(self) -> Sequence[int]:
        """Return no tensor."""
        return ()


class MemoryWrites:
    """Digests of the memory of each tensor.

    >>> memory = bytearray(8)
    >>> writes = MemoryWrites([memoryview(memory)[:4], memoryview(memory)[4:]])
    >>> memory[5] = 1
    >>> writes.found()
    [1]
    """

    def __init__(self, tensors: Sequence[memoryview]) -> None:
        self._tensors = tensors
        self.remember()

    def remember(self) -> None:
        self._digests = [xxh3_64_intdigest(tensor) for tensor in self._tensors]

    def found(self) -> Sequence[int]:
        digests = [xxh3_64_intdigest(tensor) for tensor in self._tensors]
        if digests == self._digests:
            return ()
        return [index for index, (now, then) in enumerate(zip(digests, self._digests, strict=True)) if now != then]
