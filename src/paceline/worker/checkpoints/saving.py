"""Assemble a checkpoint from all ps: parameters, carried tensors, optimizer state, and where each worker was.

Called by worker/checkpoints/saver with the connections that fetch the copies. No framework: bytes from the ps go into
files.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from paceline.checkpoint.state import ShardState, State
from paceline.checkpoint.store import write
from paceline.checkpoint.tensors import Entry, in_c_order
from paceline.modes.spec import ModeSpec
from paceline.params.arena import Arena
from paceline.params.layout import Layout
from paceline.params.placement import Plan
from paceline.version import VERSION
from paceline.wire import messages as m
from paceline.worker.checkpoints.connection import Connection, CopyGone
from paceline.worker.checkpoints.restoring import buffer_name, worker_states
from paceline.worker.checkpoints.statistics import mean, weights_of
from paceline.worker.step.optimizer_state import assemble, limit_of


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is not written yet."""

    model: dict[str, Entry]
    optimizer: dict[str, Entry]
    state: State
    averages: dict[str, Entry] | None
    workers: dict[str, Entry] | None

    @property
    def size_bytes(self) -> int:
        """Return the size of its tensors, without those that each worker has of its own."""
        tensors = [*self.model.values(), *self.optimizer.values(), *(self.averages or {}).values()]
        return sum(tensor.size_bytes for tensor in tensors)

    def write(self, folder: Path) -> Path:
        """Write it into a checkpoints/ folder; CheckpointError if that fails."""
        return write(folder, self.model, self.optimizer, self.state, self.averages, self.workers)


def fetched(
    sources: Sequence[Connection], layout: Layout, plan: Plan, copies: Sequence[m.Copied], run_id: str,
    num_workers: int, has_means: bool = True,
) -> Content:  # fmt: skip
    """Fetch the copies of all ps. `has_means`: put the mean of the workers' running statistics into the model, and the
    chief's own among those of the workers."""
    model = _fetch(sources, layout, plan, copies, "parameters")
    averages = _fetch(sources, layout, plan, copies, "ema") if copies[0].has_averages else None
    _, carried = _part(sources[0], copies[0], "carried", layout.carried_bytes)
    for spec, offset in zip(layout.carried, layout.carried_offsets, strict=True):
        model[spec.name] = in_c_order(spec, memoryview(carried)[offset:])
    states, own = worker_states(copies[0].positions)
    others = [worker for worker in copies[0].buffers_of if worker]
    for worker in others:
        _, block = _part(sources[0], copies[0], "carried", layout.own_bytes, worker)
        for spec, offset in zip(layout.own, layout.own_offsets, strict=True):
            own[buffer_name(worker, spec.name)] = in_c_order(spec, memoryview(block)[offset:])
    if has_means and others:
        for spec in (each for each in layout.own if each.buffer == "statistic"):
            own[buffer_name(0, spec.name)] = model[spec.name]
            model[spec.name] = _mean(spec.name, weights_of(copies[0].buffers_of), own)
    optimizer = _optimizer(sources, layout, plan, copies)
    first = copies[0]
    assert first.optimizer is not None
    state = State(
        run_id=run_id,
        global_step=first.round,
        mode=first.spec or ModeSpec(),
        optimizer=first.optimizer.name,
        groups=[dict(group) for group in first.optimizer.groups],
        paceline=VERSION,
        turn=first.turn,
        lineage=max(copy.lineage for copy in copies),  # a shard may have gone back alone
        seed=first.seed,
        num_ps=plan.num_ps,
        num_workers=num_workers,
        shards=[ShardState(index=i, version=c.version, applied=c.applied) for i, c in enumerate(copies)],
        workers=states,
    )
    return Content(model=model, optimizer=optimizer, state=state, averages=averages, workers=own or None)


def _mean(name: str, weights: Mapping[int, float], own: Mapping[str, Entry]) -> Entry:
    """Average one running statistic over all workers that have made steps; of a single worker, return its bits."""
    entries = [own[buffer_name(worker, name)] for worker in weights or (0,)]
    return mean(entries, list(weights.values())) if len(entries) > 1 else entries[0]


def _optimizer(
    sources: Sequence[Connection], layout: Layout, plan: Plan, copies: Sequence[m.Copied]
) -> dict[str, Entry]:  # fmt: skip
    """Fetch the optimizer state of all ps; return it by the parameters' names."""
    fetched = [
        _part(source, copy, "slots", limit_of(plan.shard_bytes[source.index]))
        for source, copy in zip(sources, copies, strict=True)
    ]
    optimizer = {}
    for tensor, named in sorted(assemble(fetched, layout).items()):
        spec = layout.trained[tensor]
        for slot, whole in named.items():
            entry = Entry(whole.dtype, (), bytes(whole.data))
            if not whole.is_scalar:
                entry = in_c_order(msgspec.structs.replace(spec, dtype=whole.dtype), memoryview(whole.data))
            optimizer[f"{spec.name}.{slot}"] = entry
    return optimizer


def _fetch(
    sources: Sequence[Connection], layout: Layout, plan: Plan, copies: Sequence[m.Copied], what: str
) -> dict[str, Entry]:  # fmt: skip
    """Fetch all trained tensors, or their averages."""
    arena = Arena.private(plan.total_bytes).memory
    for source, copy in zip(sources, copies, strict=True):
        base, size = plan.base(source.index), plan.shard_bytes[source.index]
        _, block = _part(source, copy, what, size)
        arena[base : base + size] = block
    offsets = plan.tensor_offsets()
    return {s.name: in_c_order(s, arena[offsets.get(i, 0) :]) for i, s in enumerate(layout.trained)}


def _part(
    source: Connection, copy: m.Copied, what: str, limit_bytes: int, worker: int | None = None
) -> tuple[m.Fetched, bytearray]:
    """Fetch a part of this very copy; CopyGone if the ps has another one, which would mix two versions."""
    told, block = source.fetch(what, limit_bytes, copy, worker)
    if told.version != copy.version:
        raise CopyGone(f"ps:{source.index} sent {what} of version {told.version}, its copy is of {copy.version}")
    return told, block
