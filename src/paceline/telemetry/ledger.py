"""WHICH gradients made which update? Fixed records in a mapped file, one a contributor; they survive kill -9.

Written by a ps with `--ledger` (0.2 µs a record), read by tests and by whoever verifies a run. It never drops one:
a record is written before anybody hears of its update.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

RECORD_BYTES = 32
GROW_RECORDS = 1 << 15

_RECORD = struct.Struct("<QQIHHQ")  # version, push id, incarnation, worker, gradients, mark
_MARK = 0x6C65646765720A01  # says that a record was written to its end


class Applied(NamedTuple):
    """`gradients` of one worker, the last of them `push_id`, in the update that made `version`."""

    version: int
    push_id: int
    incarnation: int
    worker: int
    gradients: int


class Ledger:
    """The growing file of one ps."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._position = 0
        self._grow()

    def write(self, version: int, push_id: int, incarnation: int, worker: int, gradients: int) -> None:
        if self._position + RECORD_BYTES > len(self._memory):
            self._grow()
        _RECORD.pack_into(self._memory, self._position, version, push_id, incarnation, worker, gradients, _MARK)
        self._position += RECORD_BYTES

    def _grow(self) -> None:
        size = self._position + GROW_RECORDS * RECORD_BYTES
        os.ftruncate(self._file, size)
        self._memory = mmap.mmap(self._file, size)

    def close(self) -> None:
        """Cut off what was not used."""
        self._memory.close()
        os.ftruncate(self._file, self._position)
        os.close(self._file)


def read(path: Path) -> list[Applied]:
    """All whole records, in the order in which the updates were made."""
    records = []
    for fields in _RECORD.iter_unpack(path.read_bytes()):
        if fields[-1] != _MARK:
            break  # nothing was written from here on
        records.append(Applied(*fields[:-1]))
    return records
