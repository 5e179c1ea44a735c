"""Parameters, gradient slots and optimizer state of one ps, and the updates of them.

Driven by server/core; decides nothing. The arithmetic is torch's own (blocks.py), block by block, on one core or, in a
round, on all cores, because the workers then wait.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from paceline.cluster.cores import usable_cores
from paceline.errors import Refused
from paceline.params.layout import ITEM_BYTES, Layout
from paceline.params.placement import Piece, Plan
from paceline.params.recast import Recast, master_casts, wire_casts
from paceline.server.memory import Memory
from paceline.server.numbers.blocks import Memories, State, StateNames, cut, update_error
from paceline.server.numbers.gradients import Scratch, Slot, Vector
from paceline.server.numbers.optimizer_memory import OptimizerMemory
from paceline.server.numbers.optimizers import OPTIMIZERS, raw_step
from paceline.server.numbers.undo import Undo
from paceline.views import NAMES, as_bytes, flat
from paceline.wire.frames import ASSIGNMENT, SEGMENT_HEAD_BYTES
from paceline.wire.messages import MASTER, WIDE_AVERAGE, OptimizerSpec, Options, SlotEntry

MIN_BLOCKS = 4  # fewer are updated before other threads have woken up


class Shard:
    """The slices that one ps owns (there may be none), with their optimizer state.

    `memory` is what workers read, in the model's dtypes. Updates change it in place, unless half-precision parameters
    have wider masters here: then the masters are updated, and copied there.
    """

    def __init__(
        self,
        layout: Layout,
        plan: Plan,
        index: int,
        optimizer: OptimizerSpec,
        wire: str = "float32",
        master: str = "float32",
        ema: float | None = None,
        memory: Memory | None = None,
    ) -> None:
        if optimizer.name not in OPTIMIZERS:
            raise Refused(f"a ps cannot run the optimizer {optimizer.name}: it runs {', '.join(OPTIMIZERS)}")
        self.layout = layout
        self.optimizer_name = optimizer.name
        self.options = optimizer.groups
        self.size_bytes = plan.shard_bytes[index]
        self._kept = memory or Memory()
        self.arena = self._kept.arena("parameters", SEGMENT_HEAD_BYTES + self.size_bytes)
        self.memory = self.arena.memory[SEGMENT_HEAD_BYTES:]
        self._sequence = self.arena.memory[:8].cast("Q")
        self.pieces = plan.shards[index]
        self._wire = Recast(layout, self.pieces, self.size_bytes, wire_casts(wire))
        self._master = Recast(layout, self.pieces, self.size_bytes, master_casts(master))
        masters = self.memory if self._master.is_same else self._kept.own("masters", self._master.size_bytes)
        self.blocks = cut(layout, self.pieces, Memories(self.memory, masters), self._master, optimizer)
        if wrong := self.refusal_of(optimizer.groups):
            raise Refused(f"a ps cannot make an update with this optimizer: {wrong}")
        self._seen = [flat(self.memory, b.model_dtype, b.model_offset, b.numel) for b in self.blocks]
        self._decay = ema
        self._shadows = self._make_shadows() if ema is not None else []
        self._step = raw_step(optimizer.name)
        self._scratch = [self._new_scratch()]
        self._pool: ThreadPoolExecutor | None = None
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._undo: Undo | None = None  # and `_held`, the optimizer state, if the memory outlives the process
        self._unsettled = set(range(len(self.blocks)))  # blocks whose optimizer may make more state
        if self._kept.is_kept:
            self._survive()

    def _make_shadows(self) -> list[torch.Tensor]:
        memory = self._kept.own("averages", self._master.size_bytes)
        return [flat(memory, b.dtype, self._master.offset(b.model_offset), b.numel) for b in self.blocks]

    def _survive(self) -> None:
        """Lay all that an update changes into memory that outlives the process; take what an earlier one left there."""
        count = len(self.blocks)
        is_new = self._kept.found("splits") is None
        self._held = OptimizerMemory(self._kept, self.blocks, self._master)
        self._splits = self._kept.own("splits", max(1, count))
        self._undo = Undo(self._kept, count, self._regions, self._forget_states)
        self._undo.make_areas(1)
        for index, block in enumerate(self.blocks):
            if is_new:
                self._held.adopt(index)  # state that an optimizer makes before its first step
                continue
            if self._splits[index]:
                block.split(OptimizerSpec(self.optimizer_name, self.options))
            self._held.attach(index)
        for scratch in self._scratch:
            scratch.split_again(self.blocks)

    def _regions(self, index: int) -> list[torch.Tensor]:
        """Return, as bytes, what an update of a block changes. The copy of masters that workers read is not needed."""
        fixed = [self.blocks[index].vector, *self._shadows[index : index + 1]]
        return [each.view(torch.uint8) for each in fixed] + self._held.regions(index)

    def _forget_states(self, index: int, regions: int) -> None:
        self._held.forget(index, (regions - 1 - bool(self._shadows)) // 2)

    def _new_scratch(self) -> Scratch:
        return Scratch(self.blocks, max((b.numel * ITEM_BYTES[b.dtype] for b in self.blocks), default=0))

    def new_slot(self, name: str = "") -> Slot:
        """Make a slot for a worker's gradients, or take the one that an earlier process left under this name."""
        slot = Slot(self.blocks, self.size_bytes, self._wire, self._master, self._kept, name)
        slot.options = self.options
        self._slots.add(slot)
        return slot

    def close(self) -> None:
        """Close the descriptor and end the threads. Mapped memory stays as long as it is used."""
        self.arena.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def choose_threads(self) -> None:
        """Have torch update a small shard on one thread: waking others takes longer than the update, and their cores
        run the workers. Call this before the first update; it sets the threads of the whole process."""
        if len(self.blocks) < MIN_BLOCKS:
            torch.set_num_threads(1)

    # --- an update --------------------------------------------------------------------------------------------

    def apply(
        self,
        parts: Sequence[tuple[Slot, bool, bool]],
        divisor: int = 1,
        is_waited_for: bool = False,
        job: int = 0,
        is_again: bool = False,
    ) -> None:
        """Update all blocks by the mean of these (slot, whether its sum counts, whether its own gradient counts), with
        the options of the first slot and lr divided by `divisor`. `is_waited_for`: the workers wait, so their cores are
        free. `job`: number of this update in the undo log; `is_again`: an earlier process may have done part of it."""
        options = parts[0][0].options
        if options is not self.options:
            self._set_options(options)
        vectors: list[Vector] = []
        has_gaps = False
        for slot, has_sum, has_slot in parts:
            if has_sum:
                assert slot.sum is not None
                vectors.append(slot.sum)
                has_gaps = has_gaps or bool(slot.sum.mask)
            if has_slot:
                vectors.append(slot)
                has_gaps = has_gaps or bool(slot.mask)
        blocks = self._put_back(job) if is_again else range(len(self.blocks))
        if has_gaps:
            self._split_where_torn(vectors)
        self._sequence[0] |= 1
        try:
            if divisor > 1:
                self._divide_lr(divisor)
            if is_waited_for and len(blocks) >= MIN_BLOCKS:
                self._update_on_all_cores(blocks, vectors, has_gaps, job)
            else:
                self._update(blocks, 0, vectors, has_gaps, job)
        finally:
            if divisor > 1:
                self._divide_lr(1)
            self._sequence[0] += 1

    def prepare_next(self) -> None:
        """Do now, while no worker waits, what the next update would have to do first."""
        if self._undo is not None:
            self._undo.save_ahead()

    def _changed(self) -> None:
        if self._undo is not None:
            self._undo.changed()

    def add_up(self, slot: Slot, is_first: bool, job: int = 0, is_again: bool = False) -> None:
        """Add the gradient in this slot to the slot's sum, so that the slot is free for the next one."""
        adding, undo = slot.adding(is_first), self._undo
        blocks: Sequence[int] = range(len(self.blocks))
        sums = [each.view(torch.uint8) for each in slot.start_sum().flats]
        if undo is not None and is_again:
            blocks = undo.remaining(len(self.blocks), job, lambda index: [sums[index]])
        for index in blocks:
            if undo is not None:
                undo.save(0, index, job, [sums[index]])
            slot.add_block(index, adding)
            if undo is not None:
                undo.done(index, job)
        slot.added(adding)

    def _put_back(self, job: int) -> Sequence[int]:
        """Restore the blocks that an update had begun when the ps died; return all that are still to be done."""
        assert self._undo is not None
        left = self._undo.remaining(len(self.blocks), job)
        for index in range(len(self.blocks)):
            self._held.attach(index)
        return left

    def set_version(self, version: int) -> None:
        """Set the version that workers read with the parameters."""
        self._sequence[0] = self._sequence[0] // ASSIGNMENT * ASSIGNMENT + 2 * version

    def _update(self, indices: Iterable[int], core: int, vectors: list[Vector], has_gaps: bool, job: int) -> None:
        """Update these blocks on one core, each with its gradients' mean; a single gradient is used where it lies."""
        scratch, undo = self._scratch[core], self._undo
        first = vectors[0]
        is_single = len(vectors) == 1 and first.count == 1 and first.is_exact
        was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # what torch.no_grad() does, at a tenth of its price
        try:
            for index in indices:
                block = self.blocks[index]
                gradients: Sequence[torch.Tensor | None]
                if has_gaps:
                    gradients = scratch.mean_masked(index, block, vectors)
                elif is_single:
                    gradients = first.runs[index]
                else:
                    gradients = scratch.mean(index, vectors)
                if undo is not None:
                    undo.save(core, index, job)
                for parameter, gradient in zip(block.parameters, gradients, strict=True):
                    parameter.grad = gradient
                self._step(block.optimizer)
                for values, constraint in block.constrained:
                    constraint.hold(values)
                if block.dtype != block.model_dtype:
                    self._seen[index].copy_(block.vector)
                if self._decay is not None:
                    self._shadows[index].mul_(self._decay).add_(block.vector * (1 - self._decay))
                if undo is not None:
                    if has_gaps or index in self._unsettled:
                        self._adopt(index, has_gaps)
                    undo.done(index, job)
        finally:
            torch._C._set_grad_enabled(was_enabled)

    def _adopt(self, index: int, has_gaps: bool) -> None:
        """Move the state that torch made in a block's update into memory that outlives us. Torch makes all of it in the
        first step with a gradient, so a step without gaps is the last one that makes any, until options change."""
        assert self._undo is not None
        if self._held.adopt(index):
            self._undo.grown()
        if not has_gaps:
            self._unsettled.discard(index)

    def _update_on_all_cores(self, blocks: Sequence[int], vectors: list[Vector], has_gaps: bool, job: int) -> None:
        """Spread the blocks over all cores. They are independent, so the bits are the same whichever does which."""
        if self._pool is None:
            count = usable_cores()
            self._pool = ThreadPoolExecutor(
                max(count - 1, 1), "apply", initializer=torch.set_num_threads, initargs=(1,)
            )
            self._scratch += [self._new_scratch() for _ in range(count - 1)]
            if self._undo is not None:
                self._undo.make_areas(count)
        indices = iter(blocks)
        others = [
            self._pool.submit(self._update, indices, core, vectors, has_gaps, job)
            for core in range(1, len(self._scratch))
        ]
        self._update(indices, 0, vectors, has_gaps, job)
        for other in others:
            other.result()

    def _divide_lr(self, divisor: int) -> None:
        """Divide the learning rate of the options; 1 restores it."""
        for block in self.blocks:
            for group, options in zip(block.optimizer.param_groups, self.options, strict=True):
                lr = options["lr"]
                assert isinstance(lr, int | float)
                group["lr"] = lr if divisor == 1 else lr / divisor

    def _split_where_torn(self, vectors: Sequence[Vector]) -> None:
        """Split the blocks in which one tensor of a run has a gradient and another has none."""
        for index, block in enumerate(self.blocks):
            for vector in vectors:
                if any(len({vector.has(p.tensor) for p in run.pieces}) > 1 for run in block.runs):
                    self._split(index)
                    break

    def _split(self, index: int) -> None:
        block = self.blocks[index]
        if all(len(run.pieces) == 1 for run in block.runs):
            return
        block.split(OptimizerSpec(self.optimizer_name, self.options))
        for scratch in self._scratch:
            scratch.split_again(self.blocks)
        self._unsettled.add(index)
        if self._undo is not None:
            self._held.spread(index)
            self._undo.grown()
            self._splits[index] = 1
        for slot in list(self._slots):
            slot.runs[index] = block.views(slot.flats[index])
            if slot.sum is not None:
                slot.sum.runs[index] = block.views(slot.sum.flats[index])

    def _set_options(self, options: list[Options]) -> None:
        if options != self.options:
            for block in self.blocks:
                block.set_options(options)
            self._unsettled.update(range(len(self.blocks)))
        self.options = options

    def refusal_of(self, options: Sequence[Options]) -> str:
        """Return why no update can be made with these options; empty if one can."""
        kept: set[StateNames] = set()
        for block in self.blocks:
            states = {piece.tensor: _names(state) for piece, state in block.states()}
            kept |= {(self.layout.trained[piece.tensor].group, states.get(piece.tensor)) for piece, _ in block.places()}
        return self._update_error(options, kept)

    def _update_error(self, options: Sequence[Options], kept: set[StateNames]) -> str:
        dtypes = {block.dtype for block in self.blocks if "float" in block.dtype}  # no other ever has a gradient
        return update_error(OptimizerSpec(self.optimizer_name, list(options)), dtypes, kept)

    # --- from and to outside ----------------------------------------------------------------------------------

    def copy_of(self, tensor: int | None, is_averaged: bool = False) -> bytes:
        """Return the bytes of one tensor's slice or of the whole shard, or of their averages."""
        memory = memoryview(self.averages()) if is_averaged else self.memory
        if tensor is None:
            return bytes(memory)
        item = ITEM_BYTES[self.layout.trained[tensor].dtype]
        mine = [p for p in self.pieces if p.tensor == tensor]
        return b"".join(bytes(memory[p.offset : p.offset + p.numel * item]) for p in mine)

    def averages(self) -> bytearray:
        """Return the averaged parameters, laid out as the parameters are."""
        if self._decay is None:
            raise Refused("the ps keep no averaged parameters: start the run with --ema 0.999, say")
        copy = bytearray(self.size_bytes)
        for block, shadow in zip(self.blocks, self._shadows, strict=True):
            flat(memoryview(copy), block.model_dtype, block.model_offset, block.numel).copy_(shadow)
        return copy

    def load_averages(self, values: memoryview) -> None:
        """Take averages from outside, in the model's dtypes."""
        self._changed()
        for block, shadow in zip(self.blocks, self._shadows, strict=bool(self._shadows)):
            shadow.copy_(flat(values, block.model_dtype, block.model_offset, block.numel))

    def fill(self, values: memoryview) -> None:
        """Take parameters from outside; masters and averages start from them."""
        self._changed()
        self.memory[:] = values
        for index, block in enumerate(self.blocks):
            if block.dtype != block.model_dtype:
                block.vector.copy_(self._seen[index])
            if self._decay is not None:
                self._shadows[index].copy_(block.vector)

    def _write(self, values: memoryview) -> None:
        """Take parameters that a script has changed in training; keep averages, and masters of unchanged elements."""
        for block, seen in zip(self.blocks, self._seen, strict=True):
            new = flat(values, block.model_dtype, block.model_offset, block.numel)
            if block.dtype != block.model_dtype:
                torch.where(new == seen, block.vector, new.to(block.vector.dtype), out=block.vector)
        self.memory[:] = values

    def assign(self, values: memoryview, is_written: bool = False) -> None:
        """Call fill (or _write) while workers may read: the sequence number moves, so that a reader in the middle reads
        again."""
        self._changed()
        sequence = self._sequence[0]
        self._sequence[0] = sequence + 1
        (self._write if is_written else self.fill)(values)
        self._sequence[0] = (sequence + ASSIGNMENT) % (1 << 64)

    def slots(self) -> tuple[list[SlotEntry], list[memoryview]]:
        """Return all optimizer state and all masters: their descriptions, and their bytes in the same order."""
        entries: list[SlotEntry] = []
        data: list[memoryview] = []
        offset = 0
        for piece, name, value in self._states():
            raw = as_bytes(value.detach().contiguous())
            span = (piece.tensor, piece.start, piece.stop)
            entries.append(SlotEntry(*span, name, NAMES[value.dtype], value.dim() == 0, offset, raw.nbytes))
            data.append(raw)
            offset += raw.nbytes
        return entries, data

    def _states(self) -> Iterator[tuple[Piece, str, torch.Tensor]]:
        for index, block in enumerate(self.blocks):
            for piece, state in block.states():
                for name, value in state.items():
                    yield piece, name, value
            if block.dtype != block.model_dtype:
                for piece, start in block.places():
                    yield piece, MASTER, block.vector[start : start + piece.numel]
                    if self._shadows:
                        yield piece, WIDE_AVERAGE, self._shadows[index][start : start + piece.numel]

    def load_slots(self, entries: Sequence[SlotEntry], data: memoryview) -> None:
        """Take optimizer state from outside; every entry must cover a piece as it was cut here."""
        of: dict[int, list[SlotEntry]] = {}
        for entry in entries:
            of.setdefault(entry.tensor, []).append(entry)
        kept: set[StateNames] = set()
        for tensor in {piece.tensor for piece in self.pieces}:
            names = {(e.slot, e.is_scalar) for e in of.get(tensor, ()) if e.slot not in (MASTER, WIDE_AVERAGE)}
            kept.add((self.layout.trained[tensor].group, frozenset(names)))
        if wrong := self._update_error(self.options, kept):
            raise Refused(f"this state of the optimizer cannot be used: {wrong}")
        for index, block in enumerate(self.blocks):
            states = {}
            for piece, start in block.places():
                mine = [e for e in of.get(piece.tensor, ()) if e.start <= piece.start and piece.stop <= e.stop]
                state = {e.slot: _cut(e, piece, data) for e in mine}
                wide = state.pop(WIDE_AVERAGE, None)
                if wide is not None and self._shadows:
                    self._shadows[index][start : start + piece.numel].copy_(wide)
                master = state.pop(MASTER, None)
                if master is not None and block.dtype != block.model_dtype:
                    block.vector[start : start + piece.numel].copy_(master)
                # torch has cast what it loaded to the model's dtype; here it is kept in the masters'.
                dtype = block.vector.dtype
                states[piece] = {n: v if v.dim() == 0 else v.to(dtype) for n, v in state.items()}
            if not block.load_together(states):
                self._split(index)
                for piece, state in states.items():
                    block.load(piece, state)
            self._unsettled.add(index)
            if self._undo is not None:
                self._held.replace(index)
                self._undo.grown()


def _names(state: State) -> frozenset[tuple[str, bool]]:
    return frozenset((name, value.dim() == 0) for name, value in state.items())


def _cut(entry: SlotEntry, piece: Piece, data: memoryview) -> torch.Tensor:
    if entry.is_scalar:
        return flat(data, entry.dtype, entry.offset, 1).clone().reshape(())
    item = ITEM_BYTES[entry.dtype]
    return flat(data, entry.dtype, entry.offset + (piece.start - entry.start) * item, piece.numel).clone()
