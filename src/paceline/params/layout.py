"""WHAT is trained? All tensors of a model by name, shape, stride and dtype; *trained* or only *carried*.

Made by a framework's worker file, sent once at join, compared by every ps. Must never import a framework.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal

import msgspec

from paceline.params.constraint import Constraint

ALIGN_BYTES = 64  # every tensor starts, and every tensor is cut, at a multiple of this

MAX_NUMEL = 1 << 48  # elements of one tensor: more than any memory

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor. `group` is the index of its optimizer parameter group (-1 when it is only carried); `constraint` is
    what the ps makes it satisfy after every update. `buffer`: "" for a parameter; of a buffer, whether it is a running
    statistic of a norm layer or a plain one. Each worker goes on with buffers of its own."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    group: int = -1
    constraint: Constraint | None = None
    buffer: Literal["", "plain", "statistic"] = ""

    @property
    def is_trained(self) -> bool:
        return self.group >= 0

    @property
    def numel(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def size_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def cut_every(self) -> int:
        """Return at multiples of how many elements the tensor may be cut."""
        return self.constraint.cut_every(self.shape, self.stride) if self.constraint is not None else 1


class Layout(msgspec.Struct, frozen=True, dict=True):
    """Every parameter and persistent buffer of one model, in the model's order.

    >>> layout = Layout((TensorSpec("w", (2, 3), (3, 1), "float32", 0),))
    >>> layout.trained[0].size_bytes
    24
    """

    tensors: tuple[TensorSpec, ...]

    @cached_property
    def trained(self) -> tuple[TensorSpec, ...]:
        return tuple(t for t in self.tensors if t.is_trained)

    @cached_property
    def carried(self) -> tuple[TensorSpec, ...]:
        return tuple(t for t in self.tensors if not t.is_trained)

    @cached_property
    def carried_offsets(self) -> tuple[int, ...]:
        """Byte offset of each carried tensor in the block that holds them all."""
        return tuple(offsets_of(self.carried))

    @cached_property
    def carried_bytes(self) -> int:
        return total_bytes(self.carried)

    @cached_property
    def own(self) -> tuple[TensorSpec, ...]:
        """Return the buffers, of which each worker has its own values."""
        return tuple(t for t in self.carried if t.buffer)

    @cached_property
    def own_offsets(self) -> tuple[int, ...]:
        """Byte offset of each buffer in the block that holds one worker's."""
        return tuple(offsets_of(self.own))

    @cached_property
    def own_bytes(self) -> int:
        return total_bytes(self.own)

    def own_of(self, carried: bytes | bytearray) -> bytes:
        """Cut the block of buffers out of the block of all carried tensors."""
        block = bytearray(self.own_bytes)
        for (start, at), spec in zip(self._own_places, self.own, strict=True):
            block[at : at + spec.size_bytes] = memoryview(carried)[start : start + spec.size_bytes]
        return bytes(block)

    def with_own(self, carried: bytes | bytearray, own: bytes | memoryview) -> bytearray:
        """Lay a block of buffers over those in the block of all carried tensors."""
        block = bytearray(carried)
        for (start, at), spec in zip(self._own_places, self.own, strict=True):
            block[start : start + spec.size_bytes] = memoryview(own)[at : at + spec.size_bytes]
        return block

    @cached_property
    def _own_places(self) -> tuple[tuple[int, int], ...]:
        starts = [o for o, t in zip(self.carried_offsets, self.carried, strict=True) if t.buffer]
        return tuple(zip(starts, self.own_offsets, strict=True))

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).hexdigest()


def align(size_bytes: int) -> int:
    """The next multiple of ALIGN_BYTES."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def widest_first(specs: Iterable[TensorSpec]) -> Layout:
    """Return the layout of these tensors, in which the flat memory holds one run of each dtype."""
    return Layout(tuple(sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype])))


def offsets_of(tensors: Sequence[TensorSpec]) -> list[int]:
    """Where each tensor starts when they are laid out one after the other."""
    offsets, position = [], 0
    for tensor in tensors:
        offsets.append(position)
        position += align(tensor.size_bytes)
    return offsets


def total_bytes(tensors: Sequence[TensorSpec]) -> int:
    return sum(align(t.size_bytes) for t in tensors)


def problems(layout: Layout) -> list[str]:
    """What no framework would say of its tensors, a line each; empty for a layout that can be believed.

    >>> problems(Layout((TensorSpec("w", (2, -1), (1, 1), "float33", 0),)))
    ["w: float33[2, -1] stride [1, 1] trained is no tensor's"]
    """
    lines = [f"{t.name}: {_describe(t)} is no tensor's" for t in layout.tensors if not _is_possible(t)]
    counts = Counter(t.name for t in layout.tensors)
    return lines + [f"{name}: {count} times" for name, count in counts.items() if count > 1]


def _is_possible(t: TensorSpec) -> bool:
    """A dtype that we know, a size that an address can count, and all elements within its own bytes."""
    if t.dtype not in ITEM_BYTES or len(t.shape) != len(t.stride) or t.group < -1:
        return False
    if t.buffer and t.is_trained:
        return False
    if min(t.shape, default=0) < 0 or min(t.stride, default=0) < 0 or t.numel > MAX_NUMEL:
        return False
    if t.constraint is not None and (not t.is_trained or t.constraint.problem(t.dtype, len(t.shape))):
        return False
    last = sum((extent - 1) * step for extent, step in zip(t.shape, t.stride, strict=True))
    return t.numel == 0 or last < t.numel


def difference(ours: Layout, theirs: Layout) -> list[str]:
    """What differs, a line a tensor; empty when the two are the same."""
    mine = {t.name: t for t in ours.tensors}
    other = {t.name: t for t in theirs.tensors}
    lines = [f"- {name}: only here" for name in mine if name not in other]
    lines += [f"+ {name}: only there" for name in other if name not in mine]
    for name in mine.keys() & other.keys():
        a, b = mine[name], other[name]
        if a != b:
            lines.append(f"~ {name}: here {_describe(a)}, there {_describe(b)}")
    if not lines and [t.name for t in ours.tensors] != [t.name for t in theirs.tensors]:
        lines.append("~ the same tensors in a different order")
    return sorted(lines)


def _describe(t: TensorSpec) -> str:
    use = "carried" if not t.is_trained else f"trained in group {t.group}" if t.group else "trained"
    use += {"": "", "plain": " as a buffer", "statistic": " as a running statistic"}[t.buffer]
    held = f" with {t.constraint}" if t.constraint is not None else ""
    return f"{t.dtype}{list(t.shape)} stride {list(t.stride)} {use}{held}"
