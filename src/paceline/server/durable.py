"""WHAT does a ps still know after it was killed? Everything that it decided and acknowledged, as one value.

Used by server/core when its memory is kept. What a ps knows is written down after every event and before anybody hears
of it (server/journal); the numbers lie beside it (server/shard). `recover` makes a core of both.

INVARIANT I2, I5: what was acknowledged is applied, once: an update that was under way when the ps died is done to its
end before anything else happens.
"""

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from paceline.cluster.membership import Phase
from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec
from paceline.params.layout import Layout
from paceline.server.control.actions import Add, Apply, Part
from paceline.server.control.budget import Budget
from paceline.server.control.rounds import Ballot
from paceline.server.control.state import Staged
from paceline.server.journal import Journal, Twin
from paceline.server.vectors import Slot
from paceline.telemetry.records import ModeChange
from paceline.wire.decisions import Decision, Key
from paceline.wire.messages import Dial, OptimizerSpec, Options, Position

if TYPE_CHECKING:
    from paceline.server.core import Core

MODEL, CARRIED, UNSAVED, COUNTS, BUFFERS = (
    "model",
    "carried",
    "unsaved",
    "counts",
    "buffers",
)  # pieces of memory beside the journal and the shard's own
PHASES = list(Phase)
NOTHING = (0, 0)  # of a worker nothing was applied yet


class Buffers(msgspec.Struct, array_like=True):
    """Workers' own buffers, and the steps and samples of each worker when it sent them."""

    blocks: dict[int, bytes] = {}
    told: dict[int, tuple[int, float | None]] = {}


class Model(msgspec.Struct, array_like=True):
    """What the first worker brought; it never changes."""

    layout: Layout
    optimizer: OptimizerSpec


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
    is_waited_for: bool = False
    first: int = -1


class Known(msgspec.Struct, array_like=True):
    """One ps between two events."""

    is_initialised: bool
    is_started: bool
    seed: int
    lineage: int
    updates: int
    version: int
    offset: int
    turn: int
    spec: msgspec.Raw
    dial: msgspec.Raw
    wanted: ModeSpec | None
    members: list[tuple[int, int]]
    applied: dict[int, Key]
    staged: list[tuple[Key, Staged]]
    clocks: dict[int, int]
    floor: int
    votes: list[tuple[int, Ballot]]
    given: dict[int, int]
    open_decisions: tuple[Decision, ...]
    steps: int | None
    slots: list[SlotMeta]
    jobs: list[Job]
    ledger_bytes: int
    expected: int
    barriers: dict[int, tuple[int, int]]
    left_barriers: dict[int, tuple[int, int]]


class Counts(msgspec.Struct, array_like=True):
    """What is only counted, and where workers are in their data; written down four times a second, so a death loses
    a moment of it."""

    discarded: dict[int, int]
    not_finite: dict[int, int]
    staleness: dict[int, dict[int, int]]
    waited_s: dict[int, float]
    modes: list[ModeChange]
    apply_s: float
    bytes_in: int
    bytes_out: int
    positions: dict[int, Position]
    saved_s: float | None
    earlier: dict[int, int]
    began_at: int


# A push that is an update at once: version, updates, floor, ledger bytes, worker, incarnation, push id, divisor,
# weight, bytes of the mask; then (incarnation, push id, clock) of every worker, and the mask.
_SHORT = struct.Struct("<QQQQQQQQdQ")

_ENCODER = msgspec.msgpack.Encoder()
_KNOWN = msgspec.msgpack.Decoder(Known)


class Durable:
    """Writes a core down."""

    def __init__(self, core: "Core") -> None:
        self._core = core
        self.journal = Journal(core.memory)
        self._counts = Twin(core.memory, COUNTS)
        self._buffers = Buffers()
        self._raw: dict[str, tuple[object, msgspec.Raw]] = {}
        self._options: dict[Key, object] = {}  # of each slot, as they are in the last whole one
        self._rows = struct.Struct(f"<{3 * core.config.num_workers}Q")

    def write(self) -> None:
        """What the core knows holds from now on."""
        self.journal.write(self._encode([]))

    def announce_push(self, job: Apply) -> int:
        """As announce, for the push that is an update at once: nothing else has changed since what was written last."""
        core, state = self._core, self._core.state
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
            state.version, core.updates + 1, state.floor, ledger, key[0], key[1], part.push_id, job.divisor,
            slot.weight, len(slot.mask),
        )  # fmt: skip
        return self.journal.announce_short(push + self._rows.pack(*rows) + slot.mask)

    def announce(self, jobs: Sequence[Apply | Add]) -> int:
        """It will hold when these are done; their number comes back."""
        has_rounds = self._core.state.mode.has_rounds
        return self.journal.announce(self._encode([_job(job, has_rounds) for job in jobs]))

    def fulfil(self, jobs: Sequence[Apply | Add]) -> None:
        """They are done. An Add changes what is known of a sum, so that is written again."""
        has_added = any(type(job) is Add for job in jobs)
        self.journal.fulfil(self._encode([]) if has_added else None)

    def model(self, layout: Layout, optimizer: OptimizerSpec) -> None:
        self._core.memory.put(MODEL, _ENCODER.encode(Model(layout, optimizer)))

    def carried(self) -> None:
        self._core.memory.put(CARRIED, bytes(self._core.carried))

    def unsaved(self) -> None:
        self._core.memory.put(UNSAVED, self._core.unsaved)

    def counts(self) -> None:
        """What nobody decides by, and where everybody was."""
        core, state = self._core, self._core.state
        counts = Counts(
            dict(state.discarded), dict(state.not_finite), {w: dict(c) for w, c in state.staleness.items()},
            dict(state.waited_s), core.mode_changes, core.apply_s, core.bytes_in, core.bytes_out,
            core.snapshots.newest, core.snapshots.saved_s, core.snapshots.shares.earlier,
            core.snapshots.shares.began_at,
        )  # fmt: skip
        self._counts.write(_ENCODER.encode(counts))
        buffers = Buffers(dict(core.snapshots.buffers), dict(core.snapshots.told))
        if buffers != self._buffers:
            self._buffers = buffers
            core.memory.put(BUFFERS, _ENCODER.encode(self._buffers))

    def counted(self) -> bytes | None:
        return self._counts.read()

    def ledger_position(self) -> int | None:
        """After a death: how far the ledger is true. It is written first, so what lies behind that was never decided;
        an update that is done to its end now is in it already."""
        known = self.read()
        return known.ledger_bytes if known is not None else None

    def read(self) -> Known | None:
        """What an earlier life wrote last."""
        found = self.journal.read()
        if found is None:
            return None
        known = _KNOWN.decode(found[0])
        if found[1] is not None:
            self._take_push(known, found[1])
        return known

    def _take_push(self, known: Known, short: bytes) -> None:
        """A whole one, and the last push after it."""
        (
            known.version, known.updates, known.floor, known.ledger_bytes, worker, incarnation, push_id, divisor,
            weight, mask_bytes,
        ) = _SHORT.unpack_from(short)  # fmt: skip
        rows = self._rows.unpack_from(short, _SHORT.size)
        places = range(0, len(rows), 3)
        known.applied = {n // 3: (rows[n], rows[n + 1]) for n in places if rows[n : n + 2] != NOTHING}
        known.clocks = {n // 3: rows[n + 2] for n in places if rows[n + 2]}
        start = _SHORT.size + self._rows.size
        for meta in known.slots:
            if meta.key == (worker, incarnation):
                meta.mask, meta.weight = short[start : start + mask_bytes], weight
        known.jobs = [Job((Part((worker, incarnation), push_id),), divisor)]

    def _encode(self, jobs: list[Job]) -> bytes:
        core, state = self._core, self._core.state
        self._options = {key: slot.options for key, slot in core.slots.items()}
        known = Known(
            core.is_initialised,
            core.is_started,
            core.seed,
            core.lineage,
            core.updates + sum([job.first < 0 for job in jobs]),
            state.version,
            state.offset,
            state.turn,
            self._once("spec", state.mode.spec),
            self._once("dial", core.dial),
            core.wanted,
            [(PHASES.index(m.phase), m.incarnation) for m in core.members],
            state.applied,
            list(state.staged.items()),
            state.clocks,
            state.floor,
            list(state.rounds.votes.items()),
            state.rounds.given,
            state.rounds.open_decisions,
            core.budget.total if core.budget is not None else None,
            [self._slot(key, slot) for key, slot in core.slots.items()],
            jobs,
            core.ledger.position if core.ledger is not None else 0,
            core.members.expected,
            core.barrier_numbers,
            core.left_barriers,
        )
        return _ENCODER.encode(known)

    def _slot(self, key: Key, slot: Slot) -> SlotMeta:
        total = slot.sum
        meta = SumMeta(total.mask, total.count, total.weight, total.is_weighted) if total is not None else None
        return SlotMeta(key, slot.mask, slot.weight, self._once(f"options of {key}", slot.options), meta)

    def _once(self, what: str, value: object) -> msgspec.Raw:
        """Encoded again only when it is another value."""
        known = self._raw.get(what)
        if known is None or known[0] is not value:
            known = self._raw[what] = (value, msgspec.Raw(_ENCODER.encode(value)))
        return known[1]


def _job(job: Apply | Add, has_rounds: bool) -> Job:
    if type(job) is Apply:
        return Job(job.parts, job.divisor, has_rounds)
    added = cast(Add, job)
    return Job((Part(added.key, added.push_id),), first=int(added.is_first))


def recover(core: "Core") -> bool:
    """Take up what an earlier life of this ps left; False: it left nothing that could be used, and that is let go."""
    durable = core.durable
    assert durable is not None
    known = durable.read()
    if known is None:
        for name in core.memory.names():
            if name != "journal":
                core.memory.free(name)
        return False
    _recall_state(core, known)
    model = core.memory.found(MODEL)
    if model is not None:
        _recall_shard(core, known, msgspec.msgpack.decode(model.memory, type=Model))
    _recall_counts(core)
    core.free_unused()
    return True


def _recall_state(core: "Core", known: Known) -> None:
    state = core.state
    core.is_initialised, core.is_started = known.is_initialised, known.is_started
    if core.ledger is not None:
        core.ledger.lineage = known.lineage
    core.seed, core.lineage, core.updates = known.seed, known.lineage, known.updates
    core.dial = msgspec.msgpack.decode(known.dial, type=Dial)
    core.wanted, state.is_switching = known.wanted, known.wanted is not None
    core.budget = Budget(known.steps) if known.steps is not None else None
    for worker, (phase, incarnation) in enumerate(known.members):
        core.members.recall(worker, PHASES[phase], incarnation, core.now_s())
    state.version, state.offset, state.turn = known.version, known.offset, known.turn
    state.mode = make_mode(msgspec.msgpack.decode(known.spec, type=ModeSpec), core.config.num_workers)
    state.applied, state.staged = known.applied, dict(known.staged)
    state.clocks, state.floor = known.clocks, known.floor
    state.rounds.votes, state.rounds.given = dict(known.votes), known.given
    state.rounds.open_decisions = known.open_decisions
    core.members.expected = known.expected
    core.barrier_numbers, core.left_barriers = known.barriers, known.left_barriers
    core.returning = {(w, core.members[w].incarnation) for w in core.members.live}
    carried = core.memory.found(CARRIED)
    core.carried = bytearray(carried.memory) if carried is not None else bytearray()
    unsaved = core.memory.found(UNSAVED)
    core.unsaved = bytes(unsaved.memory) if unsaved is not None else b""


def _recall_shard(core: "Core", known: Known, model: Model) -> None:
    """The numbers as they are, and the update that was under way done to its end."""
    durable = core.durable
    assert durable is not None
    core.make_shard(model.layout, model.optimizer)
    for meta in known.slots:
        slot = core.slots[meta.key] = core.new_slot(meta.key)
        slot.mask, slot.weight = meta.mask, meta.weight
        slot.options = msgspec.msgpack.decode(meta.options, type=list[Options])
        if meta.sum is not None:
            total = slot.start_sum()
            total.mask, total.count = meta.sum.mask, meta.sum.count
            total.weight, total.is_weighted = meta.sum.weight, meta.sum.is_weighted
    pending = durable.journal.pending
    if pending:
        core.updates -= sum(job.first < 0 for job in known.jobs)
        core.do_jobs([_action(job) for job in known.jobs], pending, durable.journal.jobs_done)
    assert core.shard is not None
    core.shard.set_version(known.version)


def _action(job: Job) -> Apply | Add:
    if job.first < 0:
        return Apply(job.parts, job.divisor)
    return Add(job.parts[0].key, bool(job.first), job.parts[0].push_id)


def _recall_counts(core: "Core") -> None:
    state = core.state
    assert core.durable is not None
    data, buffers = core.durable.counted(), core.memory.found(BUFFERS)
    if buffers is not None:
        known = msgspec.msgpack.decode(buffers.memory, type=Buffers)
        core.snapshots.buffers, core.snapshots.told = known.blocks, known.told
    if data is None:
        return
    counts = msgspec.msgpack.decode(data, type=Counts)
    core.snapshots.newest, core.snapshots.saved_s = counts.positions, counts.saved_s
    core.snapshots.shares.earlier, core.snapshots.shares.began_at = counts.earlier, counts.began_at
    state.discarded.update(counts.discarded)
    state.not_finite.update(counts.not_finite)
    for worker, staleness in counts.staleness.items():
        state.staleness[worker].update(staleness)
    state.waited_s.update(counts.waited_s)
    core.mode_changes = counts.modes
    core.apply_s, core.bytes_in, core.bytes_out = counts.apply_s, counts.bytes_in, counts.bytes_out
