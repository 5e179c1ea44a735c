"""Double-buffered write-ahead journal of a ps; one 8-byte store commits.

Written by server/core where memory outlives the process (server/memory); read by server/recovery. The control plane
says which of its fields are written (control/kept): after every event, before anything is sent. A change that leaves
parameters alone is written beside the committed state and committed. One that does not is *announced* first: written,
with the jobs that make it true; then the jobs run, block by block (server/numbers/undo); then it is committed. After a
death the next process finds the committed state, or an announced one whose jobs it must finish.

Most changes are one push that is one update. Their records are *short*: a few numbers on top of the last whole record.

    cells u64: committed turn | announced turn | jobs done of the announced turn;   whole places 0, 1; short places 0, 1
    a turn u64: its number << 2 | is it short << 1 | its place
    a place: size u64, bytes; a short one: the whole place that it belongs to u64, bytes
"""

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from paceline.params.arena import Arena
from paceline.server.control.actions import Add, Apply, Part
from paceline.server.control.control import Control
from paceline.server.control.kept import COUNTED, KNOWN, KeptFields
from paceline.server.memory import Memory
from paceline.server.numbers.gradients import Slot
from paceline.wire.decisions import Key

if TYPE_CHECKING:
    from paceline.server.core import Core

PLACE_BYTES = 1 << 20
SHORT_BYTES = 1 << 16
HEAD_BYTES = 64
_HOLDS, _ANNOUNCED, _JOBS = range(3)
_NUMBER = struct.Struct("<Q")

MODEL, CARRIED, UNSAVED, COUNTS, BUFFERS = "model", "carried", "unsaved", "counts", "buffers"  # pieces of memory
NOTHING = (0, 0)  # of a worker nothing was applied yet


class Buffers(msgspec.Struct, array_like=True):
    """Workers' own buffers, and the steps and samples of each worker when it sent them."""

    blocks: dict[int, bytes] = {}
    told: dict[int, tuple[int, float | None]] = {}


class SumMeta(msgspec.Struct, array_like=True):
    """What is known of a sum of gradients beside its bytes."""

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


# A short record: version, floor, ledger bytes, worker, incarnation, push id, divisor, weight, bytes of the mask; then
# (incarnation, push id, clock) of every worker, and the mask.
SHORT = struct.Struct("<QQQQQQQdQ")
KNOWN_FIELDS, COUNTED_FIELDS = KeptFields(Control, KNOWN), KeptFields(Control, COUNTED)
_ENCODER = msgspec.msgpack.Encoder()


class Durable:
    """The record of what a core knows, and the pieces of memory beside it."""

    def __init__(self, core: "Core") -> None:
        self._core = core
        self.journal = Journal(core.memory)
        self.counted = Twin(core.memory, COUNTS)
        self._buffers = Buffers()
        self._raw: dict[Key, tuple[object, msgspec.Raw]] = {}  # options of each slot, encoded
        self._options: dict[Key, object] = {}  # of each slot, as they are in the last whole one
        self.rows = struct.Struct(f"<{3 * core.config.num_workers}Q")

    def write(self) -> None:
        """Commit what the core knows."""
        self.journal.write(self._encode([]))

    def announce_push(self, job: Apply) -> int:
        """Announce a push that is an update at once: nothing else has changed since the last record."""
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
        push = SHORT.pack(
            state.version, state.floor, ledger, key[0], key[1], part.push_id, job.divisor, slot.weight, len(slot.mask)
        )
        return self.journal.announce_short(push + self.rows.pack(*rows) + slot.mask)

    def announce(self, jobs: Sequence[Apply | Add]) -> int:
        """Announce what the core will know when these jobs are done; return the turn of the record."""
        return self.journal.announce(self._encode([_job(job) for job in jobs]))

    def fulfil(self, jobs: Sequence[Apply | Add]) -> None:
        """Commit what was announced: its jobs are done. An Add changes a sum, which is written again."""
        for job in jobs:
            if type(job) is Add:
                self.journal.fulfil(self._encode([]))
                return
        self.journal.fulfil()

    def model(self) -> None:
        """Write the model that the first worker brought."""
        self._core.memory.put(MODEL, _ENCODER.encode(self._core.control.model))

    def carried(self) -> None:
        """Write the carried tensors."""
        self._core.memory.put(CARRIED, bytes(self._core.carried))

    def unsaved(self) -> None:
        """Write the buffers that no checkpoint holds."""
        self._core.memory.put(UNSAVED, self._core.unsaved)

    def counts(self) -> None:
        """Write what is only counted, and where all workers were; four times a second is enough."""
        core = self._core
        self.counted.write(
            _ENCODER.encode((COUNTED_FIELDS.values(core.control), core.apply_s, core.bytes_in, core.bytes_out))
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
        return _ENCODER.encode((KNOWN_FIELDS.values(core.control), slots, jobs, ledger_bytes))

    def _slot(self, key: Key, slot: Slot) -> SlotMeta:
        total, known = slot.sum, self._raw.get(key)
        if known is None or known[0] is not slot.options:  # encoded again only when they are others
            known = self._raw[key] = (slot.options, msgspec.Raw(_ENCODER.encode(slot.options)))
        meta = SumMeta(total.mask, total.count, total.weight, total.is_weighted) if total is not None else None
        return SlotMeta(key, slot.mask, slot.weight, known[1], meta)


def _job(job: Apply | Add) -> Job:
    if type(job) is Apply:
        return Job(job.parts, job.divisor, job.round)
    added = cast(Add, job)
    return Job((Part(added.key, added.push_id),), first=int(added.is_first))


class Twin:
    """Double-buffered bytes that need no order with anything else: two places, the newer one counts."""

    def __init__(self, memory: Memory, name: str) -> None:
        self._memory = memory
        self._name = name
        self._arena: Arena | None = memory.found(name)

    def write(self, data: bytes) -> None:
        """Replace the bytes."""
        arena = self._arena
        if arena is None or arena.size_bytes < 8 + 2 * (8 + len(data)):
            size = 8 + 2 * (8 + 2 * len(data))
            arena = self._arena = self._memory.arena(self._name, size - size % 16 + 8)
        half = (arena.size_bytes - 8) // 2
        (turn,) = _NUMBER.unpack_from(arena.memory)
        start = 8 + (turn + 1 & 1) * half
        _NUMBER.pack_into(arena.memory, start, len(data))
        arena.memory[start + 8 : start + 8 + len(data)] = data
        _NUMBER.pack_into(arena.memory, 0, turn + 1)

    def read(self) -> bytes | None:
        """Return what was written last; None if nothing was."""
        if self._arena is None:
            return None
        memory, half = self._arena.memory, (self._arena.size_bytes - 8) // 2
        (turn,) = _NUMBER.unpack_from(memory)
        start = 8 + (turn & 1) * half
        (size,) = _NUMBER.unpack_from(memory, start)
        return bytes(memory[start + 8 : start + 8 + size]) if turn else None


class Journal:
    """The journal; each record is a turn."""

    def __init__(self, memory: Memory) -> None:
        held = memory.own("journal", HEAD_BYTES + 2 * PLACE_BYTES + 2 * SHORT_BYTES)
        self._cells = held[:HEAD_BYTES].cast("Q")
        sizes = (PLACE_BYTES, PLACE_BYTES, SHORT_BYTES, SHORT_BYTES)
        starts = [HEAD_BYTES + sum(sizes[:n]) for n in range(4)]
        self._places = [held[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        self._sizes = [place[:8].cast("Q") for place in self._places]
        self._shorts = [place[8:] for place in self._places[2:]]
        self._whole = self._last_whole()  # its place: short ones belong to it

    def write(self, data: bytes) -> None:
        """Write a record and commit it."""
        self._cells[_HOLDS] = self._lay(data, self._cells[_HOLDS])

    def announce(self, data: bytes) -> int:
        """Write a record whose jobs are still to be done; return its turn."""
        turn = self._lay(data, self._cells[_HOLDS])
        self._cells[_JOBS] = 0
        self._cells[_ANNOUNCED] = turn
        return turn

    def announce_short(self, data: bytes) -> int:
        """Write a short record whose job is still to be done; return its turn."""
        cells = self._cells
        holds = cells[_HOLDS]
        place = holds & 1 ^ 1 if holds & 2 else 0
        turn: int = ((holds >> 2) + 1) << 2 | 2 | place
        self._shorts[place][: len(data)] = data
        self._sizes[2 + place][0] = self._whole
        cells[_JOBS] = 0
        cells[_ANNOUNCED] = turn
        return turn

    def did_job(self, count: int) -> None:
        """Write that so many jobs of the announced record are done."""
        self._cells[_JOBS] = count

    def fulfil(self, data: bytes | None = None) -> None:
        """Commit the announced record, or this one instead, if the jobs have changed more than was announced."""
        turn = self._cells[_ANNOUNCED]
        self._cells[_HOLDS] = turn if data is None else self._lay(data, turn)

    def _lay(self, data: bytes, before: int) -> int:
        """Write a whole record into the place that neither the committed nor the announced one has; return its turn."""
        if len(data) + 8 > PLACE_BYTES:
            raise OverflowError(f"a ps that knows {len(data)} bytes of its workers; {PLACE_BYTES} is the limit")
        place = self._whole ^ 1
        self._sizes[place][0] = len(data)
        self._places[place][8 : 8 + len(data)] = data
        self._whole = place
        return ((before >> 2) + 1) << 2 | place

    # --- after a death ----------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """The turn that was announced and is not committed yet; 0: none."""
        announced = self._cells[_ANNOUNCED]
        return announced if announced > self._cells[_HOLDS] else 0

    @property
    def jobs_done(self) -> int:
        """The jobs of the announced record that are done."""
        return self._cells[_JOBS]

    def read(self) -> tuple[bytes, bytes | None] | None:
        """Return the announced record, else the committed one, as the whole one and the short one on top of it, if that
        is newer; None if nothing was ever written."""
        turn = self.pending or self._cells[_HOLDS]
        if not turn:
            return None
        short = bytes(self._shorts[turn & 1]) if turn & 2 else None
        size = self._sizes[self._whole][0]
        return bytes(self._places[self._whole][8 : 8 + size]), short

    def _last_whole(self) -> int:
        """Return the place of the last whole record; a short one says to which it belongs."""
        turn = self.pending or self._cells[_HOLDS]
        return self._sizes[2 + (turn & 1)][0] if turn & 2 else turn & 1
