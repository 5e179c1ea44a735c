"""WHAT does a worker give to an update? Its gradient in its slot, and where several count in a round, their sum.

Used by server/shard. Both are seen block by block and run by run; the arithmetic of their mean is here.

INVARIANT I4: sums in worker order, a true division by the count. With weights: (w0 g0 + w1 g1 + …) / (w0 + w1 + …),
every product rounded before it is added; equal or unknown weights take the unweighted formula.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.params.arena import Arena
from paceline.params.recast import Recast
from paceline.server.blocks import Block
from paceline.server.memory import Memory
from paceline.views import NAMES, flat
from paceline.wire.frames import SEGMENT_HEAD_BYTES, Bell
from paceline.wire.messages import Options


class Vector:
    """One gradient, or a sum of `count` gradients: a flat tensor a block, and its parts a run."""

    def __init__(self, flats: list[torch.Tensor], blocks: Sequence[Block]) -> None:
        self.flats = flats
        self.runs = [b.views(f) for f, b in zip(flats, blocks, strict=True)]
        self.is_exact = all(NAMES[f.dtype] == b.dtype for f, b in zip(flats, blocks, strict=True))  # needs no cast
        self.mask = b""  # a bit a trained tensor that has a gradient; empty: all have
        self.count = 1
        self.weight = 0.0  # samples that a gradient is the mean of; 0: unknown
        self.is_weighted = False  # a sum of gradients times their weights; `weight` is the sum of those

    def has(self, tensor: int) -> bool:
        return not self.mask or bool(self.mask[tensor >> 3] >> (tensor & 7) & 1)

    @property
    def total_weight(self) -> float:
        return self.weight if self.is_weighted else self.weight * self.count

    @property
    def plain_factor(self) -> float:
        """By what a weighted sum is multiplied when somebody's weight is unknown: its mean counts as so many."""
        return self.count / self.weight


class Adding(NamedTuple):
    """How a gradient is added to a sum. `before`: by what the sum is multiplied first (None: it is a new one),
    `weight`: by what the gradient is; then what holds of the sum."""

    before: float | None
    weight: float | None
    mask: bytes
    gradients: int
    total_weight: float
    is_weighted: bool


class Slot(Vector):
    """One worker's gradient as it lies in shared memory. It also takes the parameters, when those must be copied."""

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
        self.bell = Bell(self.arena.memory)
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
        """Where counted gradients are added up; what an earlier life left there, if it did."""
        if self.sum is None:
            memory = self._kept.own(f"sum.{self._name}", self._master.size_bytes)
            offsets = [self._master.offset(b.model_offset) for b in self._blocks]
            flats = [flat(memory, b.dtype, o, b.numel) for b, o in zip(self._blocks, offsets, strict=True)]
            self.sum = Vector(flats, self._blocks)
        return self.sum

    def adding(self, is_first: bool) -> "Adding":
        """This gradient counts, and the slot is needed again: what adding it to the sum means."""
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
        """One block of it."""
        assert self.sum is not None
        into, one = self.sum.flats[index], self.flats[index]
        if adding.before is None:
            into.copy_(one)
            return
        if adding.before != 1.0:
            into.mul_(adding.before)
        into.add_(one if adding.weight is None else one.to(into.dtype) * adding.weight)

    def added(self, adding: "Adding") -> None:
        """All blocks are done."""
        assert self.sum is not None
        total = self.sum
        total.mask, total.count = adding.mask, adding.gradients
        total.weight, total.is_weighted = adding.total_weight, adding.is_weighted

    def free(self) -> None:
        """Nobody will read this slot again."""
        self.arena.close()
        for name in (f"slot.{self._name}", f"sum.{self._name}"):
            self._kept.free(name)

    def _clear_gaps(self) -> None:
        """What has no gradient adds nothing; its bytes are those of some gradient before."""
        for block, vector in zip(self._blocks, self.flats, strict=True):
            for piece, start in block.places():
                if not self.has(piece.tensor):
                    vector[start : start + piece.numel].zero_()


class Scratch:
    """Room for the mean of one block at a time, and for one product."""

    def __init__(self, blocks: Sequence[Block], widest_bytes: int) -> None:
        sums, products = Arena.private(widest_bytes).memory, Arena.private(widest_bytes).memory
        self.sums = [flat(sums, b.dtype, 0, b.numel) for b in blocks]
        self._products = [flat(products, b.dtype, 0, b.numel) for b in blocks]
        self.split_again(blocks)

    def split_again(self, blocks: Sequence[Block]) -> None:
        """The runs of the blocks have changed."""
        self.runs = [b.views(s) for s, b in zip(self.sums, blocks, strict=True)]
        self._product_runs = [b.views(s) for s, b in zip(self._products, blocks, strict=True)]

    def mean(self, index: int, vectors: Sequence[Vector]) -> Sequence[torch.Tensor]:
        """Return the mean gradient of each run of a block."""
        flats = [v.flats[index] for v in vectors]
        _mean(self.sums[index], self._products[index], vectors, flats, vectors)
        return self.runs[index]

    def mean_masked(self, index: int, block: Block, vectors: Sequence[Vector]) -> list[torch.Tensor | None]:
        """No gradient is not a zero gradient: a run that nobody has stays untouched by the optimizer."""
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
    """Into `total`: the mean of the parts, over all vectors, whether they have this part or not."""
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
    """Whether every gradient weighs the same, or somebody did not say."""
    first = vectors[0].weight
    if all(v.weight == first and not v.is_weighted for v in vectors):
        return True
    return any(v.weight == 0 for v in vectors)


def _divide(total: torch.Tensor, count: int) -> None:
    """By a true division. By a power of two it is a multiplication: the same bits, and half the time."""
    if count > 1:
        if count & (count - 1) == 0:
            total.mul_(1 / count)
        else:
            total.div_(count)
