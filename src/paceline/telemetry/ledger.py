"""WHAT happened to every gradient? Fixed records in a mapped file, one a task; they survive kill -9.

Written with `--ledger` by every ps (server/core) and every worker (worker/requests/link), 0.2 µs a record, read by
telemetry/verify. It never drops one in silence: a record is written before anybody hears of what it tells, and where
the disk is full the last one says so.

    kind u8 | outcome u8 | other u16 | incarnation u32 | push_id u64 | version u64 | amount u16 | lineage u16 |
    number u32

A worker writes three records a step and ps, a ps one a gradient and one a round: at 1,000 steps a second a worker's
file grows by 350 MB an hour.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paceline import files, forks
from paceline.telemetry import losses

LOST = "this ledger ends here, and `paceline verify` can prove nothing of what follows; training goes on"
RECORD_BYTES = 32
GROW_RECORDS = 1 << 15
GROW_BYTES = GROW_RECORDS * RECORD_BYTES  # a multiple of every page size: where the file is mapped from

_RECORD = struct.Struct("<BBHIQQHHI")
_PACK = _RECORD.pack_into
_NUMBER = struct.Struct("<I")
_LAST_AT = GROW_BYTES - RECORD_BYTES
REMOVED = "this ledger is lost, and `paceline verify` can prove nothing"


class Kind(IntEnum):
    """What a record tells. `other` is the worker in a ps's ledger and the ps in a worker's."""

    START = 1  # this process began to write; outcome: START_*, version: where it stands
    MODE = 2  # ps: this mode holds; outcome: MODE_*, push_id: its turn, amount: the bound, version: here, now
    ENTER = 3  # ps: this worker trains from now on; push_id: its clock. worker: joined this ps; outcome: it has a model
    LEAVE = 4  # ps: it does not any more; outcome: LEFT_*
    APPLY = 5  # ps: `amount` gradients of this worker, the last of them push_id, are in the update that made `version`
    ADD = 6  # ps: this gradient counts in the open round, together with later ones; `version` is the one it was made of
    ROUND = 7  # ps: `version` was made by round push_id (as ps:0 counts), from `amount` workers' gradients
    DISCARD = 8  # ps: this push does not count; outcome: why
    CHECKPOINT = 9  # `version` was copied for the checkpoint of global step push_id
    RESTORE = 10  # ps: begins again at `version`, from now on in `lineage`; outcome: FROM_*
    PUSH = 11  # worker: this gradient, computed from `version`, is sent; outcome: 1 not finite, amount: 1 only staged
    ANSWER = 12  # worker: this is what became of it; outcome: wire/frames Outcome
    PULL = 13  # worker: these parameters were read
    FULL = 14  # nothing could be written from here on: the disk is full


KINDS = np.array(Kind)
MAX_AMOUNT = (1 << 16) - 1
START_EMPTY, START_KEPT = 0, 1  # a ps without and with what it knew before; a worker is always without
MODE_EACH_PUSH, MODE_ROUNDS, MODE_BOUNDED = 0, 1, 2
LEFT_PAUSED, LEFT_CLOSED, LEFT_GONE, LEFT_LOST = 0, 1, 2, 3
FROM_CHECKPOINT, FROM_WORKER, FROM_RESUME = 0, 1, 2  # RESUME: a new run, whose tasks count incarnations from the start


class Record(NamedTuple):
    """One line of a ledger; what its fields mean depends on its kind. `number` counts from 1."""

    kind: int
    outcome: int = 0
    other: int = 0
    incarnation: int = 0
    push_id: int = 0
    version: int = 0
    amount: int = 0
    lineage: int = 0
    number: int = 0


class Ledger:
    """The growing file of one task. One thread writes at a time.

    A ledger that is there already goes on after its last whole record, or at `position`: what lies behind it was
    written of something that will be done again.
    """

    __slots__ = ("__weakref__", "_at", "_base", "_file", "_memory", "_path", "is_full")

    def __init__(self, path: Path, position: int | None = None) -> None:
        self._path = path = path.absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        folder, name = path.parent, path.name
        self._file = files.open_below(folder.parent, (folder.name, name), os.O_RDWR | os.O_CREAT)
        end = end_of(self._file)
        start = end if position is None else min(position, end)
        os.ftruncate(self._file, start)
        self.is_full = False
        self._map(start // GROW_BYTES * GROW_BYTES)
        self._at = start - self._base
        forks.hold(self)

    def _map(self, base: int) -> None:
        _allocate(self._file, base)
        self._memory: mmap.mmap | bytearray = mmap.mmap(self._file, GROW_BYTES, offset=base)
        self._base = base
        self._at = 0

    @property
    def position(self) -> int:
        """Where the next record will lie, in bytes."""
        return self._base + self._at

    def write(
        self,
        kind: int,
        outcome: int = 0,
        other: int = 0,
        incarnation: int = 0,
        push_id: int = 0,
        version: int = 0,
        amount: int = 0,
        lineage: int = 0,
    ) -> None:
        at = self._at
        if at >= _LAST_AT:
            if not self._has_room():
                return
            at = self._at
        self._at = at + RECORD_BYTES
        number = (self._base + at >> 5) + 1 & 0xFFFFFFFF  # packed last: a record without it was never finished
        _PACK(self._memory, at, kind, outcome, other, incarnation, push_id, version, amount, lineage, number)

    def _has_room(self) -> bool:
        """At the last place of a piece the next piece is made, because that may fail and must be told here."""
        if self.is_full:
            return False
        if self._at < GROW_BYTES:
            try:
                _allocate(self._file, self._base + GROW_BYTES)
            except OSError as error:
                self.is_full = True
                losses.tell(self._path, error, LOST)
                _PACK(self._memory, self._at, Kind.FULL, 0, 0, 0, 0, 0, 0, 0, self.position // RECORD_BYTES + 1)
                self._at += RECORD_BYTES
                return False
            return True
        self._unmap()
        self._map(self._base + GROW_BYTES)
        return True

    def close(self) -> None:
        """Cut off what was not used."""
        if self._file < 0:
            return
        forks.release(self)
        self._unmap()
        losses.removed(self._path, self._file, REMOVED)
        os.ftruncate(self._file, self.position)
        os.close(self._file)

    def close_in_child(self) -> None:
        """Leave the file to the parent: what is written here from now on goes nowhere."""
        self._unmap()
        os.close(self._file)
        self._file, self._memory, self.is_full = -1, bytearray(GROW_BYTES), True

    def _unmap(self) -> None:
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()


def _allocate(file: int, base: int) -> None:
    """Make the piece at `base`, with its blocks where the system can: a mapped page without one would be a SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, base, GROW_BYTES)
    else:
        os.ftruncate(file, base + GROW_BYTES)


def end_of(file: int) -> int:
    """Where the whole records end, in bytes: a later one has no number, or not its own."""
    low, high = 0, os.fstat(file).st_size // RECORD_BYTES
    while low < high:
        middle = (low + high) // 2
        number = os.pread(file, _NUMBER.size, (middle + 1) * RECORD_BYTES - _NUMBER.size)
        if number == _NUMBER.pack((middle + 1) & 0xFFFFFFFF):
            low = middle + 1
        else:
            high = middle
    return low * RECORD_BYTES


def records_of(data: bytes | memoryview) -> Iterator[Record]:
    """All records up to the first that was never finished.

    >>> list(records_of(bytes(64)))
    []
    """
    whole = memoryview(data)[: len(data) // RECORD_BYTES * RECORD_BYTES]
    for record in map(Record._make, _RECORD.iter_unpack(whole)):
        if not record.number:
            return
        yield record


def problem(data: bytes) -> str:
    """Why a ledger cannot be followed to its end; empty when it can.

    What a task that was killed leaves is whole: its last record may be unfinished, and zeros follow.

    >>> two = pack(Record(Kind.START, number=1)) + pack(Record(Kind.MODE, number=2))
    >>> problem(two), problem(two + bytes(64)), problem(two[:-5]), problem(two[32:] + two[:32])
    ('', '', 'is cut after record 1', 'is damaged at record 1')
    """
    if not data:
        return "is empty"
    count = len(data) // RECORD_BYTES
    whole = memoryview(data)[: count * RECORD_BYTES]
    table = np.frombuffer(whole, "<u4").reshape(count, RECORD_BYTES // 4)
    numbers, kinds = table[:, -1], table[:, 0] & 0xFF
    ends = np.flatnonzero(numbers == 0)
    written = int(ends[0]) if len(ends) else count
    places = np.arange(1, written + 1, dtype=np.uint64)
    is_wrong = (numbers[:written] != (places & 0xFFFFFFFF)) | ~np.isin(kinds[:written], KINDS)
    wrong = [int(place) for place in places[is_wrong][:1]]
    if table[written + 1 :].any():
        wrong.append(written + 1)
    if wrong:
        return f"is damaged at record {wrong[0]}"
    is_cut = written == count and len(data) % RECORD_BYTES
    return f"is cut after record {count}" if is_cut else ""


def read(path: Path) -> list[Record]:
    """All whole records, in the order in which they were written."""
    return list(records_of(path.read_bytes()))


def pack(record: Record) -> bytes:
    """One record's bytes, as a ledger holds them.

    >>> records_of(pack(Record(Kind.PULL, other=1, version=7, number=1))).__next__().version
    7
    """
    return _RECORD.pack(*record)
