"""Count how many samples each batch of a torch DataLoader has, by the indices that its sampler gave.

Used by frameworks/torch/data where several workers train. A shape says nothing certain: torch's own pad_sequence puts
the time into dimension 0. Where no index says how many samples a batch has, the count is None.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset


class SizedIndices:
    """A sampler of indices that notes how many each batch has. A loader that prefetches is ahead of the batches that it
    gives, which come in the same order."""

    def __init__(self, indices: Iterable[Any], is_batched: bool) -> None:
        self._indices = indices
        self._is_batched = is_batched
        self._sizes: deque[int | None] = deque()

    def __len__(self) -> int:
        return len(self._indices)  # type: ignore[arg-type]  # raises what the sampler's own raises

    def __iter__(self) -> Iterator[Any]:
        self._sizes = deque()
        return self._noted(iter(self._indices), self._sizes)

    def _noted(self, indices: Iterator[Any], sizes: deque[int | None]) -> Iterator[Any]:
        for each in indices:
            sizes.append(size_of(each, self._is_batched))
            yield each

    def take(self) -> int | None:
        """Return the size of the next batch that the loader gives; call it once for each."""
        return self._sizes.popleft() if self._sizes else None


def size_of(indices: Any, is_batched: bool) -> int | None:
    """Return how many samples are taken by what a sampler gave. A loader that is not batched may be given lists; else
    an index may be a sample or a whole batch.

    >>> size_of([4, 7], True), size_of((4, 7), True), size_of([4, 7], False), size_of((4, 7), False), size_of(4, False)
    (2, 2, 2, None, None)
    """
    if is_batched or isinstance(indices, list):
        try:
            return len(indices)
        except TypeError:
            return None
    return None


def sized_indices(base: type[DataLoader[Any]]) -> property:
    """Make the property of a subclass of `base` that torch's iterators take their indices from."""

    def get(self: DataLoader[Any]) -> Any:
        indices = base._index_sampler.fget(self)  # type: ignore[attr-defined]
        is_ordered = self.in_order or self.num_workers < 2
        if isinstance(self.dataset, IterableDataset) or not is_ordered:
            return indices
        return SizedIndices(indices, self.batch_sampler is not None)

    return property(get)


def sizes_of(batches: Any) -> SizedIndices | None:
    """Return what knows the sizes of an iterator's batches; None for a stream, and for an iterator not torch's own."""
    sizes = getattr(batches, "_index_sampler", None)
    return sizes if isinstance(sizes, SizedIndices) else None
