"""Optimizer state in memory that outlives the ps: one piece of memory per kind of state.

Used by shard.py when its memory is kept. torch makes state when it first needs it, in memory of its own: right after
that step it is copied here, and torch goes on with views. Which pieces have state is kept too: no state is not zeros.

    memory "state.<number>.<name>.<tensor|float32|float64>":  a byte per piece of the shard: has it this state? |
    the values: laid out as the parameters are kept, or, of a state that is one number, 8 bytes per piece
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from paceline.params.layout import ITEM_BYTES, align
from paceline.params.recast import Recast
from paceline.server.memory import Memory
from paceline.server.numbers.blocks import Block, Run
from paceline.views import NAMES, flat

CELL_BYTES = 8
PREFIX = "state."


class Kind(NamedTuple):
    """One kind of state: momentum_buffer, step. `dtype` is empty if it has the shape and dtype of its parameter."""

    name: str
    dtype: str
    values: memoryview
    present: torch.Tensor  # a byte per piece


class OptimizerMemory:
    """All optimizer state of a shard."""

    def __init__(self, memory: Memory, blocks: Sequence[Block], master: Recast) -> None:
        self._memory = memory
        self._blocks = blocks
        self._master = master
        counts = [sum(len(run.pieces) for run in block.runs) for block in blocks]
        self._first = [sum(counts[:index]) for index in range(len(blocks))]  # number of each block's first piece
        self._counts = counts
        self._numbers = [self._numbered(index, block) for index, block in enumerate(blocks)]
        self._adopted = [0] * len(blocks)
        self._lock = threading.Lock()  # several cores may update blocks
        self._kinds: dict[tuple[str, str], Kind] = {}
        for name in sorted((n for n in memory.names() if n.startswith(PREFIX)), key=_number):
            _, _, kind, dtype = name.split(".")
            self._open(name, kind, "" if dtype == "tensor" else dtype)

    def _numbered(self, index: int, block: Block) -> dict[tuple[int, int], int]:
        pieces = [piece for run in block.runs for piece in run.pieces]
        return {(p.tensor, p.start): self._first[index] + n for n, p in enumerate(pieces)}

    # --- after a step -----------------------------------------------------------------------------------------

    def adopt(self, index: int) -> bool:
        """Move state that torch has made in a block into this memory; return whether there is a new kind of state."""
        block = self._blocks[index]
        state = block.optimizer.state
        count = 0
        for parameter in block.parameters:
            if parameter in state:
                count += len(state[parameter])
        if count == self._adopted[index]:
            return False
        with self._lock:
            before = len(self._kinds)
            for run, parameter in zip(block.runs, block.parameters, strict=True):
                for name, value in state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        state[parameter][name] = self._taken(index, run, name, value)
            self._adopted[index] = count
            return len(self._kinds) > before

    def spread(self, index: int) -> None:
        """Follow a block that was split: each piece has the state that its run had."""
        self._adopted[index] = 0
        self.adopt(index)

    def replace(self, index: int) -> bool:
        """Do as adopt, when all state of a block has been replaced from outside."""
        for kind in self._kinds.values():
            kind.present[self._first[index] : self._first[index] + self._counts[index]] = 0
        self._adopted[index] = 0
        return self.adopt(index)

    def _taken(self, index: int, run: Run, name: str, value: torch.Tensor) -> torch.Tensor:
        kind = self._kind(name, NAMES[value.dtype] if value.dim() == 0 else "")
        view = self._view(kind, index, run)
        if view.data_ptr() != value.data_ptr():
            view.copy_(value)
        for piece in run.pieces:
            kind.present[self._numbers[index][piece.tensor, piece.start]] = 1
        return view

    def _kind(self, name: str, dtype: str) -> Kind:
        known = self._kinds.get((name, dtype))
        if known is None:
            known = self._open(f"{PREFIX}{len(self._kinds)}.{name}.{dtype or 'tensor'}", name, dtype)
        return known

    def _open(self, piece: str, name: str, dtype: str) -> Kind:
        total = sum(self._counts)
        values = total * CELL_BYTES if dtype else self._master.size_bytes
        memory = self._memory.own(piece, align(total) + values)
        kind = self._kinds[name, dtype] = Kind(name, dtype, memory[align(total) :], flat(memory, "uint8", 0, total))
        return kind

    def _view(self, kind: Kind, index: int, run: Run) -> torch.Tensor:
        if kind.dtype:
            first = run.pieces[0]
            number = self._numbers[index][first.tensor, first.start]
            return flat(kind.values, kind.dtype, number * CELL_BYTES, 1).reshape(())
        block = self._blocks[index]
        start = self._master.offset(block.model_offset) + run.start * ITEM_BYTES[block.dtype]
        return flat(kind.values, block.dtype, start, run.numel)

    # --- undo, and after a death ------------------------------------------------------------------------------

    def regions(self, index: int) -> list[torch.Tensor]:
        """Return, as bytes, what an update of a block changes here: two regions per kind, oldest kind first."""
        block, first, count = self._blocks[index], self._first[index], self._counts[index]
        found = []
        with self._lock:
            kinds = list(self._kinds.values())
        for kind in kinds:
            if kind.dtype:
                values = flat(kind.values, "uint8", first * CELL_BYTES, count * CELL_BYTES)
            else:
                start = self._master.offset(block.model_offset)
                values = flat(kind.values, "uint8", start, block.numel * ITEM_BYTES[block.dtype])
            found += [kind.present[first : first + count], values]
        return found

    def forget(self, index: int, kinds: int) -> None:
        """Forget the state of a block of all but the first so many kinds."""
        for kind in list(self._kinds.values())[kinds:]:
            kind.present[self._first[index] : self._first[index] + self._counts[index]] = 0

    def attach(self, index: int) -> None:
        """Give a block's optimizer the state that is here, and no other."""
        block = self._blocks[index]
        state = block.optimizer.state
        count = 0
        for run, parameter in zip(block.runs, block.parameters, strict=True):
            first = run.pieces[0]
            number = self._numbers[index][first.tensor, first.start]
            held = [k for k in self._kinds.values() if int(k.present[number])]
            state.pop(parameter, None)
            if held:
                state[parameter] = {kind.name: self._view(kind, index, run) for kind in held}
                count += len(held)
        self._adopted[index] = count


def _number(name: str) -> int:
    return int(name.split(".")[1])
