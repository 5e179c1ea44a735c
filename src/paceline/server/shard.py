"""WHERE are the numbers, and how do they change? The parameters, gradient slots and optimizer state of one ps.

Told what to do by server/service; decides nothing. The arithmetic is torch's own (server/blocks), block by block;
sums in worker order, a true division by n (I4).
"""

import weakref
from collections.abc import Sequence

import torch

from paceline.errors import Refused
from paceline.params.arena import Arena
from paceline.params.layout import ITEM_BYTES, Layout
from paceline.params.placement import Piece, Plan
from paceline.server.blocks import Block, cut, raw_step
from paceline.views import NAMES, as_bytes, flat
from paceline.wire.messages import OptimizerSpec, Options, SlotEntry
from paceline.wire.segments import ASSIGNMENT, HEADER_BYTES, Bell

SUPPORTED = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")


class Slot:
    """One worker's gradient as it lies in shared memory, seen block by block and run by run."""

    def __init__(self, blocks: Sequence[Block], size_bytes: int) -> None:
        self.arena = Arena.shared(HEADER_BYTES + size_bytes)
        self.bell = Bell(self.arena.memory)
        self.memory = self.arena.memory[HEADER_BYTES:]
        self.mask = b""  # a bit a trained tensor that has a gradient; empty: all have
        self.options: list[Options] = []
        self.flats = [flat(self.memory, b.dtype, b.offset, b.numel) for b in blocks]
        self.runs = [b.views(f) for f, b in zip(self.flats, blocks, strict=True)]

    def has(self, tensor: int) -> bool:
        return not self.mask or bool(self.mask[tensor >> 3] >> (tensor & 7) & 1)


class Shard:
    """The slices that one ps owns (there may be none), with their optimizer state."""

    def __init__(self, layout: Layout, plan: Plan, index: int, optimizer: OptimizerSpec) -> None:
        if optimizer.name not in SUPPORTED:
            raise Refused(f"a ps cannot run the optimizer {optimizer.name}: it runs {', '.join(SUPPORTED)}")
        self.layout = layout
        self.size_bytes = plan.shard_bytes[index]
        self.arena = Arena.shared(HEADER_BYTES + self.size_bytes)
        self.memory = self.arena.memory[HEADER_BYTES:]
        self._sequence = self.arena.memory[:8].cast("Q")
        self.pieces = plan.shards[index]
        self.blocks = cut(layout, self.pieces, self.memory, optimizer)
        self._step = raw_step(optimizer.name)
        self._name = optimizer.name
        self._options = optimizer.groups
        widest = max((b.numel * ITEM_BYTES[b.dtype] for b in self.blocks), default=0)
        self._sum_memory = Arena.private(widest).memory
        self._sums = [flat(self._sum_memory, b.dtype, 0, b.numel) for b in self.blocks]
        self._sum_runs = [b.views(s) for s, b in zip(self._sums, self.blocks, strict=True)]
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()

    def new_slot(self) -> Slot:
        slot = Slot(self.blocks, self.size_bytes)
        slot.options = self._options
        self._slots.add(slot)
        return slot

    def apply(self, slots: Sequence[Slot]) -> None:
        """One update from the mean of these gradients, with the options of the first of them."""
        if slots[0].options is not self._options:
            self._set_options(slots[0].options)
        has_gaps = False
        for slot in slots:
            has_gaps = has_gaps or bool(slot.mask)
        if has_gaps:
            self._split_where_torn(slots)
        was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # what torch.no_grad() does, at a tenth of its price
        self._sequence[0] += 1
        try:
            for index, block in enumerate(self.blocks):
                gradients = self._mean_masked(index, block, slots) if has_gaps else self._mean(index, slots)
                for parameter, gradient in zip(block.parameters, gradients, strict=True):
                    parameter.grad = gradient
                self._step(block.optimizer)
        finally:
            self._sequence[0] += 1
            torch._C._set_grad_enabled(was_enabled)

    def _mean(self, index: int, slots: Sequence[Slot]) -> Sequence[torch.Tensor]:
        """The gradient of each run: (g0 + g1 + …) / n in worker order. One alone is taken as it lies."""
        if len(slots) == 1:
            return slots[0].runs[index]
        total = self._sums[index]
        torch.add(slots[0].flats[index], slots[1].flats[index], out=total)
        for slot in slots[2:]:
            total.add_(slot.flats[index])
        _divide(total, len(slots))
        return self._sum_runs[index]

    def _mean_masked(self, index: int, block: Block, slots: Sequence[Slot]) -> list[torch.Tensor | None]:
        """No gradient is not a zero gradient: a run that nobody has stays untouched by the optimizer."""
        means: list[torch.Tensor | None] = []
        for number, run in enumerate(block.runs):
            parts = [s.runs[index][number] for s in slots if s.has(run.pieces[0].tensor)]
            if not parts:
                means.append(None)
                continue
            total = self._sum_runs[index][number]
            total.copy_(parts[0])
            for part in parts[1:]:
                total.add_(part)
            means.append(_divide(total, len(slots)))
        return means

    def _split_where_torn(self, slots: Sequence[Slot]) -> None:
        """Split the blocks in which one tensor of a run has a gradient and another has none."""
        for index, block in enumerate(self.blocks):
            for slot in slots:
                if any(len({slot.has(p.tensor) for p in run.pieces}) > 1 for run in block.runs):
                    self._split(index)
                    break

    def _split(self, index: int) -> None:
        block = self.blocks[index]
        if all(len(run.pieces) == 1 for run in block.runs):
            return
        block.split(OptimizerSpec(self._name, self._options))
        self._sum_runs[index] = block.views(self._sums[index])
        for slot in list(self._slots):
            slot.runs[index] = block.views(slot.flats[index])

    def _set_options(self, options: list[Options]) -> None:
        if options != self._options:
            for block in self.blocks:
                block.set_options(options)
        self._options = options

    def copy_of(self, tensor: int | None) -> bytes:
        """The bytes of one tensor's slice, or of the whole shard."""
        if tensor is None:
            return bytes(self.memory)
        item = ITEM_BYTES[self.layout.trained[tensor].dtype]
        mine = [p for p in self.pieces if p.tensor == tensor]
        return b"".join(bytes(self.memory[p.offset : p.offset + p.numel * item]) for p in mine)

    def assign(self, values: memoryview) -> None:
        """Take parameters from outside. The sequence number moves, so that a reader in the middle reads again."""
        sequence = self._sequence[0]
        self._sequence[0] = sequence + 1
        self.memory[:] = values
        self._sequence[0] = (sequence + ASSIGNMENT) % (1 << 64)

    def slots(self) -> tuple[list[SlotEntry], list[memoryview]]:
        """All optimizer state, described and as bytes, in the order of the description."""
        entries: list[SlotEntry] = []
        data: list[memoryview] = []
        offset = 0
        for block in self.blocks:
            for piece, state in block.states():
                for name, value in state.items():
                    raw = as_bytes(value.detach().contiguous())
                    span = (piece.tensor, piece.start, piece.stop)
                    entries.append(SlotEntry(*span, name, NAMES[value.dtype], value.dim() == 0, offset, raw.nbytes))
                    data.append(raw)
                    offset += raw.nbytes
        return entries, data

    def load_slots(self, entries: Sequence[SlotEntry], data: memoryview) -> None:
        """Take optimizer state from outside; every entry must cover a piece as it was cut here."""
        for index, block in enumerate(self.blocks):
            self._split(index)
            for run in block.runs:
                piece = run.pieces[0]
                mine = [
                    e for e in entries if e.tensor == piece.tensor and e.start <= piece.start and piece.stop <= e.stop
                ]
                block.load(piece, {e.slot: _cut(e, piece, data) for e in mine})


def _divide(total: torch.Tensor, count: int) -> torch.Tensor:
    """By a true division. By a power of two it is a multiplication: the same bits, and half the time."""
    return total.mul_(1 / count) if count & (count - 1) == 0 else total.div_(count)


def _cut(entry: SlotEntry, piece: Piece, data: memoryview) -> torch.Tensor:
    if entry.is_scalar:
        return flat(data, entry.dtype, entry.offset, 1).clone().reshape(())
    item = ITEM_BYTES[entry.dtype]
    return flat(data, entry.dtype, entry.offset + (piece.start - entry.start) * item, piece.numel).clone()
