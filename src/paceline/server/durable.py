"""What a ps still knows after it was killed: all that it decided and acknowledged.

Used by server/core when its memory is kept. The control plane says which of its fields are written down
(control/kept): after every event and before anything is sent (server/journal). The numbers lie beside it
(server/numbers/shard). `recover` makes a core of both.

INVARIANT I2, I5: what was acknowledged is applied, once: an update that was under way when the ps died is done to its
end before anything else happens.
"""

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from paceline.server.control.actions import Add, Apply, Part
from paceline.server.control.control import Control, Model
from paceline.server.control.kept import COUNTED, KNOWN, Kept, counters
from paceline.server.journal import Journal, Twin
from paceline.server.numbers.gradients import Slot
from paceline.wire.decisions import Key
from paceline.wire.messages import Options

if TYPE_CHECKING:
    from paceline.server.core import Core

MODEL, CARRIED, UNSAVED, COUNTS, BUFFERS = (
    "model",
    "carried",
    "unsaved",
    "counts",
    "buffers",
)  # pieces of memory beside the journal and the shard's own
NOTHING = (0, 0)  # of a worker nothing was applied yet


class Buffers(msgspec.Struct, array_like=True):
    """Workers' own buffers, and the steps and samples of each worker when it sent them."""

    blocks: dict[int, bytes] = {}
    told: dict[int, tuple[int, float | None]] = {}


class SumMeta(msgspec.Struct, array_like=True):
    mask: bytes
    count: int
    weight: float
    is_weighted: bool


class SlotMeta(msgspec.Struct, array_like=True):
    """What is known of a slot beside its bytes."""

    key: Key
    mask: bytes
    weight: float
    options: msgspec.Raw
    sum: SumMeta | None


class Job(msgspec.Struct, array_like=True):
    """An Apply, or, with `first` 0 or 1, the Add of its only part: the first of its sum?"""

    parts: tuple[Part, ...]
    divisor: int = 1
    round: int | None = None
    first: int = -1


# A push that is an update at once: version, floor, ledger bytes, worker, incarnation, push id, divisor,
# weight, bytes of the mask; then (incarnation, push id, clock) of every worker, and the mask.
_SHORT = struct.Struct("<QQQQQQQdQ")


def _decoder(*types: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(tuple[types], dec_hook=counters)  # type: ignore[valid-type]


_ENCODER = msgspec.msgpack.Encoder()
_KNOWN, _COUNTED = Kept(Control, KNOWN), Kept(Control, COUNTED)
_READ = _decoder(_KNOWN.type, list[SlotMeta], list[Job], int)
_READ_COUNTS = _decoder(_COUNTED.type, float, int, int)


class Durable:
    """Writes a core down."""

    def __init__(self, core: "Core") -> None:
        self._core = core
        self.journal = Journal(core.memory)
        self._counts = Twin(core.memory, COUNTS)
        self._buffers = Buffers()
        self._raw: dict[Key, tuple[object, msgspec.Raw]] = {}  # options of each slot, encoded
        self._options: dict[Key, object] = {}  # of each slot, as they are in the last whole one
        self._rows = struct.Struct(f"<{3 * core.config.num_workers}Q")

    def write(self) -> None:
        """What the core knows holds from now on."""
        self.journal.write(self._encode([]))

    def announce_push(self, job: Apply) -> int:
        """As announce, for the push that is an update at once: nothing else has changed since what was written last."""
        core, state = self._core, self._core.control.state
        (part,) = job.parts
        key = part.key
        slot = core.slots[key]
        if self._options.get(key) is not slot.options or slot.sum is not None:
            return self.announce([job])
        ledger = core.ledger.position if core.ledger is not None else 0
        rows: list[int] = []
        applied, clocks = state.applied, state.clocks
        for worker in range(core.config.num_workers):
            rows += applied.get(worker, NOTHING)
            rows.append(clocks.get(worker, 0))
        push = _SHORT.pack(
            state.version, state.floor, ledger, key[0], key[1], part.push_id, job.divisor, slot.weight, len(slot.mask)
        )
        return self.journal.announce_short(push + self._rows.pack(*rows) + slot.mask)

    def announce(self, jobs: Sequence[Apply | Add]) -> int:
        """It will hold when these are done; their number comes back."""
        return self.journal.announce(self._encode([_job(job) for job in jobs]))

    def fulfil(self, jobs: Sequence[Apply | Add]) -> None:
        """They are done. An Add changes what is known of a sum, so that is written again."""
        for job in jobs:
            if type(job) is Add:
                self.journal.fulfil(self._encode([]))
                return
        self.journal.fulfil()

    def model(self) -> None:
        self._core.memory.put(MODEL, _ENCODER.encode(self._core.control.model))

    def carried(self) -> None:
        self._core.memory.put(CARRIED, bytes(self._core.carried))

    def unsaved(self) -> None:
        self._core.memory.put(UNSAVED, self._core.unsaved)

    def counts(self) -> None:
        """Write down what is counted only, and where all workers were."""
        core = self._core
        self._counts.write(
            _ENCODER.encode((_COUNTED.values(core.control), core.apply_s, core.bytes_in, core.bytes_out))
        )
        buffers = Buffers(dict(core.buffers), dict(core.control.saving.told))
        if buffers != self._buffers:
            self._buffers = buffers
            core.memory.put(BUFFERS, _ENCODER.encode(self._buffers))

    def _encode(self, jobs: list[Job]) -> bytes:
        core = self._core
        self._options = {key: slot.options for key, slot in core.slots.items()}
        slots = [self._slot(key, slot) for key, slot in core.slots.items()]
        ledger_bytes = core.ledger.position if core.ledger is not None else 0
        return _ENCODER.encode((_KNOWN.values(core.control), slots, jobs, ledger_bytes))

    def _slot(self, key: Key, slot: Slot) -> SlotMeta:
        total, known = slot.sum, self._raw.get(key)
        if known is None or known[0] is not slot.options:  # encoded again only when they are others
            known = self._raw[key] = (slot.options, msgspec.Raw(_ENCODER.encode(slot.options)))
        meta = SumMeta(total.mask, total.count, total.weight, total.is_weighted) if total is not None else None
        return SlotMeta(key, slot.mask, slot.weight, known[1], meta)

    # --- after a death ----------------------------------------------------------------------------------------

    def ledger_position(self) -> int | None:
        """Return how far the ledger is true. It is written first, so what lies behind that was never decided; an
        update that is done to its end now is in it already."""
        found = self.journal.read()
        if found is None:
            return None
        if found[1] is not None:
            return int(_SHORT.unpack_from(found[1])[2])
        return int(_READ.decode(found[0])[3])

    def recover(self) -> bool:
        """Take up what an earlier process left; False: it left nothing that could be used, and that is freed."""
        core, found = self._core, self.journal.read()
        if found is None:
            for name in core.memory.names():
                if name != "journal":
                    core.memory.free(name)
            return False
        known, slots, jobs, _ = _READ.decode(found[0])
        control = core.control
        _KNOWN.take(control, known)
        control.recall(core.now_s())
        if found[1] is not None:
            jobs = self._recall_push(found[1], slots)
        if core.ledger is not None:
            core.ledger.lineage = control.lineage
        carried, unsaved = core.memory.found(CARRIED), core.memory.found(UNSAVED)
        core.carried = bytearray(carried.memory) if carried is not None else bytearray()
        core.unsaved = bytes(unsaved.memory) if unsaved is not None else b""
        model = core.memory.found(MODEL)
        if model is not None:
            control.model = msgspec.msgpack.decode(model.memory, type=Model)
            self._recall_shard(control.model, slots, jobs)
        self._recall_counts()
        core.free_unused()
        return True

    def _recall_push(self, short: bytes, slots: list[SlotMeta]) -> list[Job]:
        """Set what the last push changed after the last whole value; return its job."""
        state = self._core.control.state
        state.version, state.floor, _, worker, incarnation, push_id, divisor, weight, mask_bytes = _SHORT.unpack_from(
            short
        )
        rows = self._rows.unpack_from(short, _SHORT.size)
        places = range(0, len(rows), 3)
        state.applied = {n // 3: (rows[n], rows[n + 1]) for n in places if rows[n : n + 2] != NOTHING}
        state.clocks = {n // 3: rows[n + 2] for n in places if rows[n + 2]}
        start = _SHORT.size + self._rows.size
        for meta in slots:
            if meta.key == (worker, incarnation):
                meta.mask, meta.weight = short[start : start + mask_bytes], weight
        return [Job((Part((worker, incarnation), push_id),), divisor)]

    def _recall_shard(self, model: Model, slots: list[SlotMeta], jobs: list[Job]) -> None:
        """Take the numbers as they are, and do the update that was under way to its end."""
        core = self._core
        shard = core.make_shard(model.layout, model.optimizer)
        for meta in slots:
            slot = core.slots[meta.key] = core.new_slot(meta.key)
            slot.mask, slot.weight = meta.mask, meta.weight
            slot.options = msgspec.msgpack.decode(meta.options, type=list[Options])
            if meta.sum is not None:
                total = slot.start_sum()
                total.mask, total.count = meta.sum.mask, meta.sum.count
                total.weight, total.is_weighted = meta.sum.weight, meta.sum.is_weighted
        pending = self.journal.pending
        if pending:
            made = [_made(job) for job in jobs]
            core.do_jobs(made, pending, self.journal.jobs_done)
            self.fulfil(made)
        shard.set_version(core.control.state.version)

    def _recall_counts(self) -> None:
        core, data = self._core, self._counts.read()
        saving, buffers = core.control.saving, core.memory.found(BUFFERS)
        if buffers is not None:
            known = msgspec.msgpack.decode(buffers.memory, type=Buffers)
            core.buffers, saving.told, saving.has_buffers = known.blocks, known.told, set(known.blocks)
        if data is not None:
            counts, core.apply_s, core.bytes_in, core.bytes_out = _READ_COUNTS.decode(data)
            _COUNTED.take(core.control, counts)
            if saving.policy is not None:
                saving.policy.last_s = saving.saved_s


def _job(job: Apply | Add) -> Job:
    if type(job) is Apply:
        return Job(job.parts, job.divisor, job.round)
    added = cast(Add, job)
    return Job((Part(added.key, added.push_id),), first=int(added.is_first))


def _made(job: Job) -> Apply | Add:
    if job.first < 0:
        return Apply(job.parts, job.divisor, job.round)
    return Add(job.parts[0].key, bool(job.first), job.parts[0].push_id)
