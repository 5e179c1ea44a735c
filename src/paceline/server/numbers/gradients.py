"""Gradients of workers: the slot of each, the sum where several of one worker count in a round, and their mean.

Used by shard.py. Slots and sums are seen block by block and run by run.

INVARIANT I4: sums in worker order, a true division by the count. With weights: (w0 g0 + w1 g1 + …) / (w0 + w1 + …),
every product rounded before it is added; equal or unknown weights take the unweighted formula.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.params.arena import Arena
from paceline.params.recast import Recast
from paceline.server.memory import Memory
from paceline.server.numbers.blocks import Block
from paceline.views import NAMES, flat
from paceline.wire.frames import SEGMENT_HEAD_BYTES
from paceline.wire.messages import Options


class Vector:
    """One gradient, or a sum of `count` gradients: a flat tensor per block, and its parts per run."""

    def __init__(self, flats: list[torch.Tensor], blocks: Sequence[Block]) -> None:
        self.flats = flats
        self.runs = [b.views(f) for f, b in zip(flats, blocks, strict=True)]
        self.is_exact = all(NAMES[f.dtype] == b.dtype for f, b in zip(flats, blocks, strict=True))  # needs no cast
        self.mask = b""  # a bit a trained tensor that has a gradient; empty: all have
        self.count = 1
        self.weight = 0.0  # samples that a gradient is the mean of; 0: unknown
        self.is_weighted = False  # a sum of gradients times their weights; `weight` is the sum of those

    def has(self, tensor: int) -> bool:
        """Tell whether this trained tensor has a gradient here."""
        return not self.mask or bool(self.mask[tensor >> 3] >> (tensor & 7) & 1)

    @property
    def total_weight(self) -> float:
        return self.weight if self.is_weighted else self.weight * self.count

    @property
    def plain_factor(self) -> float:
        """The factor of a weighted sum when another worker's weight is unknown: its mean counts `count` times."""
        return self.count / self.weight


class Adding(NamedTuple):
    """How a gradient is added to a sum. `before`: factor of the sum (None: start a new one), `weight`: factor of the
    gradient (None: 1); the rest are the attributes of the sum afterwards."""

    before: float | None
    weight: float | None
    mask: bytes
    gradients: int
    total_weight: float
    is_weighted: bool


class Slot(Vector):
    """One worker's gradient in shared memory. Parameters are copied there, too, when a worker cannot read in place."""

    def __init__(
        self,
        blocks: Sequence[Block],
        size_bytes: int,
        wire: Recast,
        master: Recast,
        memory: Memory | None = None,
        name: str = "",
    ) -> None:
        self._kept, self._name = memory or Memory(), name
        self.arena = self._kept.arena(f"slot.{name}", SEGMENT_HEAD_BYTES + max(size_bytes, wire.size_bytes))
        self.bell = self.arena.memory[:SEGMENT_HEAD_BYTES].cast("Q")
        body = self.arena.memory[SEGMENT_HEAD_BYTES:]
        self.memory = body[: wire.size_bytes]
        self.parameters = body[:size_bytes]
        self.options: list[Options] = []
        self.sum: Vector | None = None
        self._blocks = blocks
        self._master = master
        flats = [flat(self.memory, wire.dtype(b.model_dtype), wire.offset(b.model_offset), b.numel) for b in blocks]
        super().__init__(flats, blocks)

    def start_sum(self) -> Vector:
        """Return the sum of this worker's gradients, as an earlier process left it, if one did."""
        if self.sum is None:
            memory = self._kept.own(f"sum.{self._name}", self._master.size_bytes)
            offsets = [self._master.offset(b.model_offset) for b in self._blocks]
            flats = [flat(memory, b.dtype, o, b.numel) for b, o in zip(self._blocks, offsets, strict=True)]
            self.sum = Vector(flats, self._blocks)
        return self.sum

    def adding(self, is_first: bool) -> "Adding":
        """Return how to add this gradient to the sum."""
        total = self.start_sum()
        if self.mask:
            self._clear_gaps()
        if is_first:
            return Adding(None, None, self.mask, 1, self.weight, False)
        mask = bytes(a | b for a, b in zip(total.mask, self.mask, strict=True)) if total.mask and self.mask else b""
        count = total.count + 1
        if self.weight == 0 or total.weight == 0:
            return Adding(total.plain_factor if total.is_weighted else 1.0, None, mask, count, 0.0, False)
        if not total.is_weighted and total.weight == self.weight:
            return Adding(1.0, None, mask, count, total.weight, False)
        before = 1.0 if total.is_weighted else total.weight
        return Adding(before, self.weight, mask, count, total.total_weight + self.weight, True)

    def add_block(self, index: int, adding: "Adding") -> None:
        """Add one block of the gradient to the sum."""
        assert self.sum is not None
        into, one = self.sum.flats[index], self.flats[index]
        if adding.before is None:
            into.copy_(one)
            return
        if adding.before != 1.0:
            into.mul_(adding.before)
        into.add_(one if adding.weight is None else one.to(into.dtype) * adding.weight)

    def added(self, adding: "Adding") -> None:
        """Set the attributes of the sum, when all blocks are added."""
        assert self.sum is not None
        total = self.sum
        total.mask, total.count = adding.mask, adding.gradients
        total.weight, total.is_weighted = adding.total_weight, adding.is_weighted

    def free(self) -> None:
        """Free the memory of the slot and of its sum."""
        self.arena.close()
        for name in (f"slot.{self._name}", f"sum.{self._name}"):
            self._kept.free(name)

    def _clear_gaps(self) -> None:
        """Zero the tensors without a gradient, which hold an older one's bytes: they add nothing."""
        for block, vector in zip(self._blocks, self.flats, strict=True):
            for piece, start in block.places():
                if not self.has(piece.tensor):
                    vector[start : start + piece.numel].zero_()


class Scratch:
    """Memory for the mean of one block at a time, and for one product."""

    def __init__(self, blocks: Sequence[Block], widest_bytes: int) -> None:
        sums, products = Arena.private(widest_bytes).memory, Arena.private(widest_bytes).memory
        self.sums = [flat(sums, b.dtype, 0, b.numel) for b in blocks]
        self._products = [flat(products, b.dtype, 0, b.numel) for b in blocks]
        self.split_again(blocks)

    def split_again(self, blocks: Sequence[Block]) -> None:
        """Follow blocks whose runs have changed."""
        self.runs = [b.views(s) for s, b in zip(self.sums, blocks, strict=True)]
        self._product_runs = [b.views(s) for s, b in zip(self._products, blocks, strict=True)]

    def mean(self, index: int, vectors: Sequence[Vector]) -> Sequence[torch.Tensor]:
        """Return the mean gradient of each run of a block."""
        flats = [v.flats[index] for v in vectors]
        _mean(self.sums[index], self._products[index], vectors, flats, vectors)
        return self.runs[index]

    def mean_masked(self, index: int, block: Block, vectors: Sequence[Vector]) -> list[torch.Tensor | None]:
        """Return the mean of each run; None where no worker has a gradient, so that the optimizer leaves it alone."""
        means: list[torch.Tensor | None] = []
        for number, run in enumerate(block.runs):
            present = [v for v in vectors if v.has(run.pieces[0].tensor)]
            total = self.runs[index][number] if present else None
            if total is not None:
                parts = [v.runs[index][number] for v in present]
                _mean(total, self._product_runs[index][number], present, parts, vectors)
            means.append(total)
        return means


def _mean(
    total: torch.Tensor,
    product: torch.Tensor,
    present: Sequence[Vector],
    parts: Sequence[torch.Tensor],
    vectors: Sequence[Vector],
) -> None:
    """Write into `total` the mean of the parts, over all vectors, also those that lack this part."""
    is_plain = are_alike(vectors)
    if is_plain and not any(v.is_weighted for v in vectors):
        if len(parts) > 1 and parts[0].dtype == total.dtype:
            torch.add(parts[0], parts[1], out=total)
            rest = parts[2:]
        else:
            total.copy_(parts[0])
            rest = parts[1:]
        for part in rest:
            total.add_(part)
        _divide(total, sum(v.count for v in vectors))
        return
    for number, (vector, part) in enumerate(zip(present, parts, strict=True)):
        into = product if number else total
        into.copy_(part)
        if is_plain and vector.is_weighted:
            into.mul_(vector.plain_factor)
        elif not is_plain and not vector.is_weighted:
            into.mul_(vector.weight)
        if number:
            total.add_(product)
    if is_plain:
        _divide(total, sum(v.count for v in vectors))
    else:
        total.div_(sum(v.total_weight for v in vectors))


def are_alike(vectors: Sequence[Vector]) -> bool:
    """Tell whether to use the unweighted formula: all weights are equal, or one is unknown."""
    first = vectors[0].weight
    if all(v.weight == first and not v.is_weighted for v in vectors):
        return True
    return any(v.weight == 0 for v in vectors)


def _divide(total: torch.Tensor, count: int) -> None:
    """Divide exactly. For a power of two multiply instead: the same bits in half the time."""
    if count > 1:
        if count & (count - 1) == 0:
            total.mul_(1 / count)
        else:
            total.div_(count)
