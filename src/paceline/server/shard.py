"""WHERE are the numbers, and how do they change? The parameters, gradient slots and optimizer state of one ps.

Told what to do by server/service; decides nothing. The arithmetic is torch's own, one parameter per tensor piece,
in blocks of 2^18 elements that fit a core's cache; sums in worker order, a true division by n (I4).
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.errors import ProtocolError, Refused
from paceline.params.arena import Arena
from paceline.params.layout import ITEM_BYTES, Layout
from paceline.params.placement import Piece, Plan
from paceline.views import NAMES, as_bytes, flat
from paceline.wire.messages import OptimizerSpec, Options, SlotEntry
from paceline.wire.segments import ASSIGNMENT, HEADER_BYTES, Bell

BLOCK_ELEMENTS = 1 << 18

SUPPORTED = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")


@dataclass(slots=True)
class Block:
    """A run of neighbouring pieces of one dtype, updated together."""

    dtype: str
    offset: int  # byte in the shard
    numel: int  # with the padding between its pieces
    pieces: list[Piece]
    parameters: list[torch.Tensor] = field(default_factory=list)
    optimizer: torch.optim.Optimizer | None = None


class Slot:
    """One worker's gradient as it lies in shared memory, seen block by block and piece by piece."""

    def __init__(self, blocks: Sequence[Block], size_bytes: int) -> None:
        self.arena = Arena.shared(HEADER_BYTES + size_bytes)
        self.bell = Bell(self.arena.memory)
        self.memory = self.arena.memory[HEADER_BYTES:]
        self.mask = b""  # a bit a trained tensor that has a gradient; empty: all have
        self.options: list[Options] = []
        self.flats = [flat(self.memory, b.dtype, b.offset, b.numel) for b in blocks]
        self.pieces = [_views(f, b) for f, b in zip(self.flats, blocks, strict=True)]

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
        self.blocks = _blocks(layout, self.pieces)
        self._step = _raw_step(optimizer.name)
        self._options = optimizer.groups
        for block in self.blocks:
            block.parameters = _views(flat(self.memory, block.dtype, block.offset, block.numel), block)
            block.optimizer = _make(optimizer, layout, block)
        widest = max((b.numel * ITEM_BYTES[b.dtype] for b in self.blocks), default=0)
        self._sum_memory = Arena.private(widest).memory
        self._sums = [flat(self._sum_memory, b.dtype, 0, b.numel) for b in self.blocks]
        self._sum_pieces = [_views(s, b) for s, b in zip(self._sums, self.blocks, strict=True)]

    def new_slot(self) -> Slot:
        slot = Slot(self.blocks, self.size_bytes)
        slot.options = self._options
        return slot

    def apply(self, slots: Sequence[Slot]) -> None:
        """One update from the mean of these gradients, with the options of the first of them."""
        if slots[0].options is not self._options:
            self._set_options(slots[0].options)
        self._sequence[0] += 1
        try:
            with torch.no_grad():
                for index, block in enumerate(self.blocks):
                    self._apply_block(block, self._mean(index, block, slots))
        finally:
            self._sequence[0] += 1

    def _apply_block(self, block: Block, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(block.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._step(block.optimizer)

    def _mean(self, index: int, block: Block, slots: Sequence[Slot]) -> Sequence[torch.Tensor | None]:
        """The gradient of each piece: (g0 + g1 + …) / n in worker order. One alone is taken as it lies."""
        if any(s.mask for s in slots):
            return self._mean_masked(index, block, slots)
        if len(slots) == 1:
            return slots[0].pieces[index]
        total = self._sums[index]
        torch.add(slots[0].flats[index], slots[1].flats[index], out=total)
        for slot in slots[2:]:
            total.add_(slot.flats[index])
        _divide(total, len(slots))
        return self._sum_pieces[index]

    def _mean_masked(self, index: int, block: Block, slots: Sequence[Slot]) -> list[torch.Tensor | None]:
        """No gradient is not a zero gradient: a piece that nobody has stays untouched by the optimizer."""
        means: list[torch.Tensor | None] = []
        for number, piece in enumerate(block.pieces):
            parts = [s.pieces[index][number] for s in slots if s.has(piece.tensor)]
            if not parts:
                means.append(None)
                continue
            total = self._sum_pieces[index][number]
            total.copy_(parts[0])
            for part in parts[1:]:
                total.add_(part)
            means.append(_divide(total, len(slots)))
        return means

    def _set_options(self, options: list[Options]) -> None:
        if options != self._options:
            for block in self.blocks:
                assert block.optimizer is not None
                for group, new in zip(block.optimizer.param_groups, options, strict=True):
                    group.update(_torch_options(new))
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
            assert block.optimizer is not None
            for piece, parameter in zip(block.pieces, block.parameters, strict=True):
                for name, value in block.optimizer.state.get(parameter, {}).items():
                    if not isinstance(value, torch.Tensor):
                        value = torch.tensor(value, dtype=torch.float64)
                    raw = as_bytes(value.detach().contiguous())
                    span = (piece.tensor, piece.start, piece.stop)
                    is_scalar = value.dim() == 0
                    entries.append(SlotEntry(*span, name, NAMES[value.dtype], is_scalar, offset, raw.nbytes))
                    data.append(raw)
                    offset += raw.nbytes
        return entries, data

    def load_slots(self, entries: Sequence[SlotEntry], data: memoryview) -> None:
        """Take optimizer state from outside; every entry must cover a piece as it was cut here."""
        for block in self.blocks:
            assert block.optimizer is not None
            for piece, parameter in zip(block.pieces, block.parameters, strict=True):
                block.optimizer.state.pop(parameter, None)
                for entry in entries:
                    if entry.tensor == piece.tensor and entry.start <= piece.start and piece.stop <= entry.stop:
                        block.optimizer.state[parameter][entry.slot] = _cut(entry, piece, data)


def _divide(total: torch.Tensor, count: int) -> torch.Tensor:
    """By a true division. By a power of two it is a multiplication: the same bits, and half the time."""
    return total.mul_(1 / count) if count & (count - 1) == 0 else total.div_(count)


def _cut(entry: SlotEntry, piece: Piece, data: memoryview) -> torch.Tensor:
    if entry.is_scalar:
        return flat(data, entry.dtype, entry.offset, 1).clone().reshape(())
    item = ITEM_BYTES[entry.dtype]
    return flat(data, entry.dtype, entry.offset + (piece.start - entry.start) * item, piece.numel).clone()


def _blocks(layout: Layout, pieces: Sequence[Piece]) -> list[Block]:
    """Cut long pieces at 2^18 elements and put short neighbours of one dtype together up to that size."""
    blocks: list[Block] = []
    for whole in pieces:
        dtype = layout.trained[whole.tensor].dtype
        item = ITEM_BYTES[dtype]
        for start in range(whole.start, whole.stop, BLOCK_ELEMENTS):
            stop = min(start + BLOCK_ELEMENTS, whole.stop)
            piece = Piece(whole.tensor, start, stop, whole.offset + (start - whole.start) * item)
            last = blocks[-1] if blocks else None
            end = (piece.offset - (last.offset if last else 0)) // item + piece.numel
            if last is not None and last.dtype == dtype and end <= BLOCK_ELEMENTS:
                last.pieces.append(piece)
                last.numel = end
            else:
                blocks.append(Block(dtype, piece.offset, piece.numel, [piece]))
    return blocks


def _views(vector: torch.Tensor, block: Block) -> list[torch.Tensor]:
    item = ITEM_BYTES[block.dtype]
    starts = [(p.offset - block.offset) // item for p in block.pieces]
    return [vector[a : a + p.numel] for a, p in zip(starts, block.pieces, strict=True)]


def _make(spec: OptimizerSpec, layout: Layout, block: Block) -> torch.optim.Optimizer:
    """A real torch optimizer over the pieces of a block; its groups are the user's, some may be empty here."""
    members: list[list[torch.Tensor]] = [[] for _ in spec.groups]
    for piece, parameter in zip(block.pieces, block.parameters, strict=True):
        group = layout.trained[piece.tensor].group
        if group >= len(members):
            raise ProtocolError(f"a tensor of group {group} came with {len(members)} groups")
        members[group].append(parameter)
    groups = [{"params": p, **_torch_options(o)} for p, o in zip(members, spec.groups, strict=True)]
    # Adagrad fills its first sums when it is made, from its argument and not from its groups.
    start = {n: o for n, o in spec.groups[0].items() if n == "initial_accumulator_value"}
    made: torch.optim.Optimizer = getattr(torch.optim, spec.name)(groups, **start)
    return made


def _torch_options(options: Options) -> dict[str, object]:
    """The options as torch wants them. Left open, the implementation on a CPU is the plain loop; saying so here spares
    torch to find that out every time."""
    made: dict[str, object] = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
    if made.get("foreach", True) is None and made.get("fused") is None:
        made["foreach"] = False
        if "fused" in made:
            made["fused"] = False
    return made


def _raw_step(name: str) -> Callable[[torch.optim.Optimizer | None], object]:
    """The optimizer's own step without the profiler and hook wrappers around it: half of its cost at MNIST size."""
    step: Callable[[torch.optim.Optimizer | None], object] = inspect.unwrap(getattr(torch.optim, name).step)
    return step
