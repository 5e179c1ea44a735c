"""Lay the tensors of a checkpoint out for this model and these ps, and send them.

Called by the chief before it initialises the ps, and when a ps came back without its memory. No framework: bytes.
Independent of how many ps and workers wrote it. Refuses the checkpoint of another model, with a list of what differs.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from paceline.checkpoint.read import Loaded
from paceline.checkpoint.state import State, WorkerState
from paceline.checkpoint.tensors import RAW, Entry
from paceline.errors import UsageError
from paceline.params.arena import Arena
from paceline.params.layout import ITEM_BYTES, Layout, TensorSpec
from paceline.params.placement import Plan
from paceline.wire import messages as m
from paceline.worker.step.optimizer_state import COUNTERS, Asked, Slots, WholeSlot, scatter

NEW = WorkerState(index=-1)
SAVED = tuple(name for name in WorkerState.__struct_fields__ if name != "index")  # a Position has all of them
RNG, START = "rng", "start"  # of workers.safetensors: "<worker>.rng.torch", beside buffer_name()


class Restored:
    """One checkpoint, for this model and these ps."""

    def __init__(self, loaded: Loaded, layout: Layout, plan: Plan, optimizer: str, is_local: bool) -> None:
        self.state = loaded.state
        self.path = loaded.path
        self._loaded = loaded
        self._layout = layout
        self._plan = plan
        self._arena: memoryview | None = None
        own = {spec.name: (spec.dtype, spec.shape) for spec in layout.tensors}
        refuse_other_model(loaded.path, own, loaded.model)
        was_local = loaded.state.mode.name == "local"
        self.has_slots = was_local == is_local
        if self.has_slots and loaded.state.optimizer != optimizer:
            raise UsageError(
                f"the checkpoint {loaded.path} was written by {loaded.state.optimizer}, and this script's optimizer is "
                f"{optimizer}: their states have nothing to do with each other"
            )

    def lay_out(self, arena: memoryview) -> None:
        """Copy the trained parameters into the arena, shard after shard."""
        self._lay_out(arena, self._loaded.model)

    def _lay_out(self, arena: memoryview, tensors: dict[str, Entry]) -> None:
        offsets = self._plan.tensor_offsets()
        for index, spec in enumerate(self._layout.trained):
            if spec.numel:
                offset = offsets[index]
                arena[offset : offset + spec.size_bytes] = in_storage_order(spec, tensors[spec.name])

    def carried_block(self) -> bytes:
        """Return frozen parameters and buffers, one after the other; of buffers the chief's own, where it has any."""
        block = bytearray(self._layout.carried_bytes)
        for spec, offset in zip(self._layout.carried, self._layout.carried_offsets, strict=True):
            block[offset : offset + spec.size_bytes] = in_storage_order(spec, self._loaded.model[spec.name])
        own = self._buffers_of(0)
        return bytes(block if own is None else self._layout.with_own(block, own))

    def send_buffers(self, link: Asked, num_workers: int) -> None:
        """Send ps:0 the buffers of each worker that has its own, such as running means."""
        for worker in range(1, num_workers):
            own = self._buffers_of(worker)
            if own is not None:
                link.ask(m.Assign("carried", worker=worker), bulk=[own])

    def _buffers_of(self, worker: int) -> bytes | None:
        """Return the block of one worker's own buffers; None if the checkpoint has none of them."""
        layout, block, is_there = self._layout, bytearray(self._layout.own_bytes), False
        for spec, offset in zip(layout.own, layout.own_offsets, strict=True):
            entry = (self._loaded.workers or {}).get(buffer_name(worker, spec.name))
            if entry is None or (entry.dtype, entry.shape) != (spec.dtype, spec.shape):
                entry = self._loaded.model[spec.name]
            else:
                is_there = True
            block[offset : offset + spec.size_bytes] = in_storage_order(spec, entry)
        return bytes(block) if is_there else None

    def parameters_of(self, index: int) -> memoryview:
        """Return the parameters of one shard."""
        if self._arena is None:
            self._arena = Arena.private(self._plan.total_bytes).memory
            self.lay_out(self._arena)
        base = self._plan.base(index)
        return self._arena[base : base + self._plan.shard_bytes[index]]

    def send_rest(self, wanted: Sequence[Asked]) -> None:
        """Send what follows the parameters: averages, then optimizer state and masters."""
        if self._loaded.averages is not None:
            arena = Arena.private(self._plan.total_bytes).memory
            self._lay_out(arena, self._loaded.averages)
            for link in wanted:
                base = self._plan.base(link.index)
                part = arena[base : base + self._plan.shard_bytes[link.index]]
                link.ask(m.Assign("ema"), bulk=[part] if part.nbytes else [])
        slots = self._slots()
        if self.has_slots and slots:
            scatter(wanted, self._plan, slots)

    def _slots(self) -> Slots:
        slots: Slots = {}
        numbers = {spec.name: index for index, spec in enumerate(self._layout.trained)}
        for name, entry in self._loaded.optimizer.items():
            tensor, _, slot = name.rpartition(".")
            index = numbers.get(tensor)
            if index is None:
                continue  # it was trained, and is frozen now
            spec = self._layout.trained[index]
            is_scalar = entry.shape == () and (spec.shape != () or slot in COUNTERS)
            like = TensorSpec(spec.name, spec.shape, spec.stride, entry.dtype, spec.group)
            if not is_scalar and entry.shape != spec.shape:
                raise UsageError(
                    f"the checkpoint {self.path} has {name} as {list(entry.shape)}, not {list(spec.shape)}"
                )
            data = bytearray(entry.data) if is_scalar else bytearray(in_storage_order(like, entry))
            slots.setdefault(index, {})[slot] = WholeSlot(entry.dtype, is_scalar, data)
        return slots

    def init(self, index: int, num_workers: int) -> m.Init:
        """Return the message that comes with a ps's first values."""
        state = self.state
        first = (state.seed, positions(self._loaded, num_workers)) if index == 0 else ()
        return m.Init(state.global_step, state.lineage + 1, *first)


def buffer_name(worker: int, name: str) -> str:
    """Return the name in workers.safetensors of a worker's own value of a buffer.

    >>> buffer_name(1, "norm.running_mean")
    '1.buffers.norm.running_mean'
    """
    return f"{worker}.buffers.{name}"


def in_storage_order(spec: TensorSpec, entry: Entry) -> memoryview | bytes:
    """Return the bytes of a tensor, which a checkpoint has in C order, as its own strides lay them in memory."""
    if spec.numel == 0:
        return b""
    if spec.stride == tuple(math.prod(spec.shape[axis + 1 :]) for axis in range(len(spec.shape))):
        return memoryview(entry.data).cast("B")
    item = ITEM_BYTES[spec.dtype]
    values = np.frombuffer(entry.data, dtype=RAW[item]).reshape(spec.shape)
    flat = np.empty(spec.numel, dtype=RAW[item])
    np.lib.stride_tricks.as_strided(flat, spec.shape, tuple(s * item for s in spec.stride))[...] = values
    return flat.tobytes()


def refuse_other_model(
    path: object, own: Mapping[str, tuple[str, tuple[int, ...]]], saved: Mapping[str, Entry]
) -> None:
    """Refuse a checkpoint whose tensors are not `own`, by name, dtype and shape; list what differs."""
    lines = [f"- {name}: not in the checkpoint" for name in own if name not in saved]
    lines += [f"+ {name}: only in the checkpoint" for name in saved if name not in own]
    for name in own.keys() & saved.keys():
        (dtype, shape), entry = own[name], saved[name]
        if (entry.dtype, entry.shape) != (dtype, shape):
            here, there = f"{dtype}{list(shape)}", f"{entry.dtype}{list(entry.shape)}"
            lines.append(f"~ {name}: here {here}, in the checkpoint {there}")
    if lines:
        raise UsageError(f"the checkpoint {path} is of another model: " + "\n".join(sorted(lines)))


def positions(loaded: Loaded, num_workers: int) -> list[m.Position]:
    """Return where each worker goes on. With another number of workers, all go on in the epoch of the one that was
    least far, at the batch that makes as many batches together."""
    state = loaded.state
    if state.num_workers == num_workers:
        return [_position(worker, loaded) for worker in state.workers if worker.index < num_workers]
    return shared_out(state, num_workers)


def shared_out(state: State, num_workers: int) -> list[m.Position]:
    """Share the positions in a checkpoint out over another number of workers."""
    if not state.workers:
        return []
    behind = min(state.workers, key=lambda w: (w.epoch, w.passes, w.batch))
    same = [w for w in state.workers if (w.epoch, w.passes) == (behind.epoch, behind.passes)]
    taken = sum(w.batch for w in same) + sum(
        behind.batch for w in state.workers if (w.epoch, w.passes) != (behind.epoch, behind.passes)
    )
    steps, rest = divmod(sum(w.steps for w in state.workers), num_workers)
    chief = state.worker(0) or behind
    return [
        m.Position(
            index, 0, behind.epoch, behind.passes, taken // num_workers, steps + (index < rest),
            schedulers=chief.schedulers, groups=chief.groups, samples=(state.worker(index) or NEW).samples,
            done=behind.done, loop=chief.loop,
        )
        for index in range(num_workers)
    ]  # fmt: skip


def _position(worker: WorkerState, loaded: Loaded) -> m.Position:
    states = loaded.workers or {}

    def of(kind: str) -> dict[str, bytes]:
        prefix = f"{worker.index}.{kind}."
        return {n.removeprefix(prefix): bytes(entry.data) for n, entry in states.items() if n.startswith(prefix)}

    same = {name: getattr(worker, name) for name in SAVED}
    return m.Position(worker.index, rng=of(RNG), start=of(START), **same)


def worker_states(told: Sequence[m.Position]) -> tuple[list[WorkerState], dict[str, Entry]]:
    """Return what goes into state.json and into workers.safetensors."""
    states, tensors = [], {}
    for position in told:
        states.append(WorkerState(index=position.worker, **{name: getattr(position, name) for name in SAVED}))
        for kind, rng in ((RNG, position.rng), (START, position.start)):
            for name, state in rng.items():
                tensors[f"{position.worker}.{kind}.{name}"] = Entry("uint8", (len(state),), state)
    return states, tensors
