"""WHAT does a worker give to an update? Its gradient in its slot, and where several count in a round, their sum.

Used by server/shard. Both are seen block by block and run by run; the arithmetic of their mean is here.

INVARIANT I4: sums in worker order, a true division by the count. With weights: (w0 g0 + w1 g1 + …) / (w0 + w1 + …),
every product rounded before it is added; equal or unknown weights take the unweighted formula.
"""

from collections.abc import Sequence

import torch

from paceline.params.arena import Arena
from paceline.params.recast import Recast
from paceline.server.blocks import Block
from paceline.views import flat
from paceline.wire.messages import Options
from paceline.wire.segments import HEADER_BYTES, Bell


class Vector:
    """One gradient, or a sum of `count` gradients: a flat tensor a block, and its parts a run."""

    def __init__(self, flats: list[torch.Tensor], blocks: Sequence[Block]) -> None:
        self.flats = flats
        self.runs = [b.views(f) for f, b in zip(flats, blocks, strict=True)]
        self.mask = b""  # a bit a trained tensor that has a gradient; empty: all have
        self.count = 1
        self.weight = 0.0  # samples that a gradient is the mean of; 0: unknown
        self.is_weighted = False  # a sum of gradients times their weights; `weight` is the sum of those

    def has(self, tensor: int) -> bool:
        return not self.mask or bool(self.mask[tensor >> 3] >> (tensor & 7) & 1)

    @property
    def total_weight(self) -> float:
        return self.weight if self.is_weighted else self.weight * self.count

    def forget_weights(self) -> None:
        """Of a sum that is added to something of unknown weight: its mean counts as so many gradients."""
        if self.is_weighted:
            for vector in self.flats:
                vector.mul_(self.count / self.weight)
        self.weight, self.is_weighted = 0.0, False


class Slot(Vector):
    """One worker's gradient as it lies in shared memory. It also takes the parameters, when those must be copied."""

    def __init__(self, blocks: Sequence[Block], size_bytes: int, wire: Recast, master: Recast) -> None:
        self.arena = Arena.shared(HEADER_BYTES + max(size_bytes, wire.size_bytes))
        self.bell = Bell(self.arena.memory)
        body = self.arena.memory[HEADER_BYTES:]
        self.memory = body[: wire.size_bytes]
        self.parameters = body[:size_bytes]
        self.options: list[Options] = []
        self.sum: Vector | None = None
        self._blocks = blocks
        self._master = master
        flats = [flat(self.memory, wire.dtype(b.model_dtype), wire.offset(b.model_offset), b.numel) for b in blocks]
        super().__init__(flats, blocks)

    def add_up(self, is_first: bool) -> None:
        """This gradient counts, and the slot is needed again: add it to the sum."""
        if self.mask:
            self._clear_gaps()
        if self.sum is None:
            memory = Arena.private(self._master.size_bytes).memory
            offsets = [self._master.offset(b.model_offset) for b in self._blocks]
            flats = [flat(memory, b.dtype, o, b.numel) for b, o in zip(self._blocks, offsets, strict=True)]
            self.sum = Vector(flats, self._blocks)
        total = self.sum
        if is_first:
            for into, one in zip(total.flats, self.flats, strict=True):
                into.copy_(one)
            total.mask, total.count, total.weight, total.is_weighted = self.mask, 1, self.weight, False
            return
        if total.mask and self.mask:
            total.mask = bytes(a | b for a, b in zip(total.mask, self.mask, strict=True))
        else:
            total.mask = b""
        self._add_to(total)

    def _add_to(self, total: Vector) -> None:
        if self.weight == 0 or total.weight == 0:
            total.forget_weights()
        if total.weight and (total.is_weighted or total.weight != self.weight):
            if not total.is_weighted:
                for into in total.flats:
                    into.mul_(total.weight)
                total.weight, total.is_weighted = total.weight * total.count, True
            for into, one in zip(total.flats, self.flats, strict=True):
                into.add_(one.to(into.dtype) * self.weight)
            total.weight += self.weight
        else:
            for into, one in zip(total.flats, self.flats, strict=True):
                into.add_(one)
        total.count += 1

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
        """The gradient of each run of a block. One alone, in the right dtype, is taken as it lies."""
        total = self.sums[index]
        if len(vectors) == 1 and vectors[0].count == 1 and vectors[0].flats[index].dtype == total.dtype:
            return vectors[0].runs[index]
        flats = [v.flats[index] for v in vectors]
        _mean(total, self._products[index], vectors, flats, vectors)
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
    if are_alike(vectors):
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
        if not vector.is_weighted:
            into.mul_(vector.weight)
        if number:
            total.add_(product)
    total.div_(sum(v.total_weight for v in vectors))


def are_alike(vectors: Sequence[Vector]) -> bool:
    """Whether every gradient weighs the same, or somebody did not say."""
    first = vectors[0].weight
    if all(v.weight == first and not v.is_weighted for v in vectors):
        return True
    return any(v.weight == 0 for v in vectors)


def forget_if_unknown(vectors: Sequence[Vector]) -> None:
    """If somebody did not say its weight, sums that were weighted already become plain ones."""
    if any(v.is_weighted for v in vectors) and any(v.weight == 0 for v in vectors):
        for vector in vectors:
            if vector.is_weighted:
                vector.forget_weights()


def _divide(total: torch.Tensor, count: int) -> None:
    """By a true division. By a power of two it is a multiplication: the same bits, and half the time."""
    if count > 1:
        if count & (count - 1) == 0:
            total.mul_(1 / count)
        else:
            total.div_(count)
