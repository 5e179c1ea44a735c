"""HOW do two checkpoints differ? Tensor by tensor: names, shapes, dtypes, then bits.

Called by `paceline ckpt diff`. Pure: two loaded checkpoints in, a list out. Equal means equal bits, so a NaN is equal
to itself and 0.0 is not -0.0.
"""

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from paceline.checkpoint.manifest import AVERAGES, MODEL, OPTIMIZER, WORKERS
from paceline.checkpoint.read import Loaded
from paceline.checkpoint.tensors import RAW, Entry, values
from paceline.params.layout import ITEM_BYTES


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor that is not the same in both."""

    file: str
    name: str
    what: str
    max_abs: float | None = None  # of the elements that differ; None where they cannot be compared
    first: tuple[int, ...] | None = None  # where the first of them is


def files(loaded: Loaded) -> dict[str, Mapping[str, Entry]]:
    """The tensors of a checkpoint by file."""
    optional = {AVERAGES: loaded.averages, WORKERS: loaded.workers}
    there = {name: tensors for name, tensors in optional.items() if tensors is not None}
    return {MODEL: loaded.model, OPTIMIZER: loaded.optimizer, **there}


def compare(a: Loaded, b: Loaded, is_model_only: bool = False) -> list[Difference]:
    """Every tensor that differs, in the order of the files."""
    ours, theirs = files(a), files(b)
    names = [MODEL] if is_model_only else list({**ours, **theirs})
    return [found for file in names for found in _in_file(file, ours.get(file, {}), theirs.get(file, {}))]


def _in_file(file: str, a: Mapping[str, Entry], b: Mapping[str, Entry]) -> Iterator[Difference]:
    for name in {**a, **b}:
        if name not in b:
            yield Difference(file=file, name=name, what="only in the first")
        elif name not in a:
            yield Difference(file=file, name=name, what="only in the second")
        elif (a[name].dtype, a[name].shape) != (b[name].dtype, b[name].shape):
            yield Difference(file=file, name=name, what=f"{describe(a[name])} and {describe(b[name])}")
        elif a[name].data != b[name].data:
            yield _in_values(file, name, a[name], b[name])


def _in_values(file: str, name: str, a: Entry, b: Entry) -> Difference:
    raw = RAW[ITEM_BYTES[a.dtype]]
    is_other = np.frombuffer(a.data, dtype=raw) != np.frombuffer(b.data, dtype=raw)
    places = np.flatnonzero(is_other)
    ours, theirs = (values(each).reshape(-1)[places].astype(np.longdouble) for each in (a, b))
    with np.errstate(invalid="ignore"):  # inf - inf
        max_abs = float(np.max(np.abs(ours - theirs)))
    first = tuple(int(i) for i in np.unravel_index(places[0], a.shape)) if a.shape else ()
    what = f"{len(places)} of {is_other.size} elements"
    return Difference(file=file, name=name, what=what, max_abs=max_abs, first=first)


def describe(entry: Entry) -> str:
    """A tensor's dtype and shape.

    >>> describe(Entry("float32", (2, 3), bytes(24)))
    'float32 2x3'
    """
    return f"{entry.dtype} {'x'.join(str(extent) for extent in entry.shape) or 'scalar'}"
