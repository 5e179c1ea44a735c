"""HOW does a ps change its mind at once? Places for what it knows, and one 8-byte store that says which of them holds.

Used by server/durable, on memory that outlives the process (server/memory). A change that needs no numbers is written
beside what holds, then holds. One that does is *announced* first: written, with the jobs that make it true; then the
jobs run, block by block (server/undo); then it holds. Whoever comes after a death finds what holds, or what was
announced and must be done to its end.

Most changes are one push that is one update. They are *short*: few numbers that hold together with the last whole one.

    cells u64: holds | announced | jobs done of what was announced;   whole places 0, 1;   short places 0, 1
    a turn u64: its number << 2 | is it short << 1 | its place
    a place: size u64, bytes; a short one: the whole place with which it holds u64, bytes
"""

import struct

from paceline.errors import ProtocolError
from paceline.params.arena import Arena
from paceline.server.memory import Memory

PLACE_BYTES = 1 << 20
SHORT_BYTES = 1 << 16
HEAD_BYTES = 64
_HOLDS, _ANNOUNCED, _JOBS = range(3)
_NUMBER = struct.Struct("<Q")


class Twin:
    """Bytes that change now and then and need no order with anything else: two places, the newer one counts."""

    def __init__(self, memory: Memory, name: str) -> None:
        self._memory = memory
        self._name = name
        self._arena: Arena | None = memory.found(name)

    def write(self, data: bytes) -> None:
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
        """What was written last; None: nothing was."""
        if self._arena is None:
            return None
        memory, half = self._arena.memory, (self._arena.size_bytes - 8) // 2
        (turn,) = _NUMBER.unpack_from(memory)
        start = 8 + (turn & 1) * half
        (size,) = _NUMBER.unpack_from(memory, start)
        return bytes(memory[start + 8 : start + 8 + size]) if turn else None


class Journal:
    """What a ps knows, in turns."""

    def __init__(self, memory: Memory) -> None:
        held = memory.own("journal", HEAD_BYTES + 2 * PLACE_BYTES + 2 * SHORT_BYTES)
        self._cells = held[:HEAD_BYTES].cast("Q")
        sizes = (PLACE_BYTES, PLACE_BYTES, SHORT_BYTES, SHORT_BYTES)
        starts = [HEAD_BYTES + sum(sizes[:n]) for n in range(4)]
        self._places = [held[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        self._sizes = [place[:8].cast("Q") for place in self._places]
        self._shorts = [place[8:] for place in self._places[2:]]
        self._whole = self._last_whole()  # its place: short ones hold together with it

    def write(self, data: bytes) -> None:
        """This holds from now on."""
        self._cells[_HOLDS] = self._lay(data, self._cells[_HOLDS])

    def announce(self, data: bytes) -> int:
        """This will hold when its jobs are done; the turn comes back."""
        turn = self._lay(data, self._cells[_HOLDS])
        self._cells[_JOBS] = 0
        self._cells[_ANNOUNCED] = turn
        return turn

    def announce_short(self, data: bytes) -> int:
        """Announce a short value, which holds together with the last whole one; return its turn."""
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
        self._cells[_JOBS] = count

    def fulfil(self, data: bytes | None = None) -> None:
        """All jobs are done: what was announced holds, or this, if the jobs have changed more than they said."""
        turn = self._cells[_ANNOUNCED]
        self._cells[_HOLDS] = turn if data is None else self._lay(data, turn)

    def _lay(self, data: bytes, before: int) -> int:
        """Beside what holds, and beside what was announced, if that comes before."""
        if len(data) + 8 > PLACE_BYTES:
            raise ProtocolError(f"a ps that knows {len(data)} bytes of its workers; {PLACE_BYTES} is the limit")
        place = self._whole ^ 1
        self._sizes[place][0] = len(data)
        self._places[place][8 : 8 + len(data)] = data
        self._whole = place
        return ((before >> 2) + 1) << 2 | place

    # --- after a death ----------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """The turn that was announced and does not hold yet; 0: none."""
        announced = self._cells[_ANNOUNCED]
        return announced if announced > self._cells[_HOLDS] else 0

    @property
    def jobs_done(self) -> int:
        return self._cells[_JOBS]

    def read(self) -> tuple[bytes, bytes | None] | None:
        """What was announced, else what holds: the whole one, and the short one that holds with it, if that is newer;
        None: nothing was ever written."""
        turn = self.pending or self._cells[_HOLDS]
        if not turn:
            return None
        short = bytes(self._shorts[turn & 1]) if turn & 2 else None
        size = self._sizes[self._whole][0]
        return bytes(self._places[self._whole][8 : 8 + size]), short

    def _last_whole(self) -> int:
        """The place of the last whole one; a short one says with which it holds."""
        turn = self.pending or self._cells[_HOLDS]
        return self._sizes[2 + (turn & 1)][0] if turn & 2 else turn & 1
