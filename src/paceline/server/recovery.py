"""Recover a ps from the memory that an earlier process of it left: all that it decided and acknowledged.

Used by server/core. server/journal has the records, server/numbers/shard the numbers.

INVARIANT I2, I5: what was acknowledged is applied, once: an update that was under way when the ps died is done to its
end before anything else happens.
"""

from typing import TYPE_CHECKING, Any

import msgspec

from paceline.server.control.actions import Add, Apply, Part
from paceline.server.control.control import Model
from paceline.server.control.kept import counters
from paceline.server.journal import (
    BUFFERS,
    CARRIED,
    COUNTED_FIELDS,
    KNOWN_FIELDS,
    MODEL,
    NOTHING,
    SHORT,
    UNSAVED,
    Buffers,
    Durable,
    Job,
    SlotMeta,
)
from paceline.wire.messages import Options

if TYPE_CHECKING:
    from paceline.server.core import Core


def _decoder(*types: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(tuple[types], dec_hook=counters)  # type: ignore[valid-type]


_READ = _decoder(KNOWN_FIELDS.type, list[SlotMeta], list[Job], int)
_READ_COUNTS = _decoder(COUNTED_FIELDS.type, float, int, int)


def ledger_position(durable: Durable) -> int | None:
    """Return how far the ledger is true. It is written first, so what lies behind that was never decided; an
    update that is done to its end now is in it already."""
    found = durable.journal.read()
    if found is None:
        return None
    if found[1] is not None:
        return int(SHORT.unpack_from(found[1])[2])
    return int(_READ.decode(found[0])[3])


def recover(core: "Core", durable: Durable) -> bool:
    """Take up what an earlier process left; False: it left nothing that could be used, and that is freed."""
    found = durable.journal.read()
    if found is None:
        for name in core.memory.names():
            if name != "journal":
                core.memory.free(name)
        return False
    known, slots, jobs, _ = _READ.decode(found[0])
    control = core.control
    KNOWN_FIELDS.take(control, known)
    control.recall(core.now_s())
    if found[1] is not None:
        jobs = _recall_push(core, durable, found[1], slots)
    if core.ledger is not None:
        core.ledger.lineage = control.lineage
    carried, unsaved = core.memory.found(CARRIED), core.memory.found(UNSAVED)
    core.carried = bytearray(carried.memory) if carried is not None else bytearray()
    core.unsaved = bytes(unsaved.memory) if unsaved is not None else b""
    model = core.memory.found(MODEL)
    if model is not None:
        control.model = msgspec.msgpack.decode(model.memory, type=Model)
        _recall_shard(core, durable, control.model, slots, jobs)
    _recall_counts(core, durable)
    core.free_unused()
    return True


def _recall_push(core: "Core", durable: Durable, short: bytes, slots: list[SlotMeta]) -> list[Job]:
    """Set what the last push changed after the last whole value; return its job."""
    state = core.control.state
    state.version, state.floor, _, worker, incarnation, push_id, divisor, weight, mask_bytes = SHORT.unpack_from(short)
    rows = durable.rows.unpack_from(short, SHORT.size)
    places = range(0, len(rows), 3)
    state.applied = {n // 3: (rows[n], rows[n + 1]) for n in places if rows[n : n + 2] != NOTHING}
    state.clocks = {n // 3: rows[n + 2] for n in places if rows[n + 2]}
    start = SHORT.size + durable.rows.size
    for meta in slots:
        if meta.key == (worker, incarnation):
            meta.mask, meta.weight = short[start : start + mask_bytes], weight
    return [Job((Part((worker, incarnation), push_id),), divisor)]


def _recall_shard(core: "Core", durable: Durable, model: Model, slots: list[SlotMeta], jobs: list[Job]) -> None:
    """Take the numbers as they are, and do the update that was under way to its end."""
    shard = core.make_shard(model.layout, model.optimizer)
    for meta in slots:
        slot = core.slots[meta.key] = core.new_slot(meta.key)
        slot.mask, slot.weight = meta.mask, meta.weight
        slot.options = msgspec.msgpack.decode(meta.options, type=list[Options])
        if meta.sum is not None:
            total = slot.start_sum()
            total.mask, total.count = meta.sum.mask, meta.sum.count
            total.weight, total.is_weighted = meta.sum.weight, meta.sum.is_weighted
    pending = durable.journal.pending
    if pending:
        made = [_made(job) for job in jobs]
        core.do_jobs(made, pending, durable.journal.jobs_done)
        durable.fulfil(made)
    shard.set_version(core.control.state.version)


def _recall_counts(core: "Core", durable: Durable) -> None:
    data = durable.counted.read()
    saving, buffers = core.control.saving, core.memory.found(BUFFERS)
    if buffers is not None:
        known = msgspec.msgpack.decode(buffers.memory, type=Buffers)
        core.buffers, saving.told, saving.has_buffers = known.blocks, known.told, set(known.blocks)
    if data is not None:
        counts, core.apply_s, core.bytes_in, core.bytes_out = _READ_COUNTS.decode(data)
        COUNTED_FIELDS.take(core.control, counts)
        if saving.policy is not None:
            saving.policy.last_s = saving.saved_s


def _made(job: Job) -> Apply | Add:
    if job.first < 0:
        return Apply(job.parts, job.divisor, job.round)
    return Add(job.parts[0].key, bool(job.first), job.parts[0].push_id)
