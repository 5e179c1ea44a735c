"""Hot-path messages: 64-byte frames with a keyed MAC, and the headers of shared memory.

Used by transport/channel; the headers by server/numbers and worker/requests/link. Pure: bytes in, tuples out. A frame
may be followed by a *tail* (small, covered by the MAC) and by *bulk*, a shard's bytes. The checksum of small bulk is in
the frame; that of large bulk follows the bulk, so that both sides hash piece by piece while the bytes are in the cache.

    kind u8 | outcome u8 | flags u16 | worker u16 | 2 bytes of padding | incarnation u32 | tail_bytes u32 |
    push_id u64 | version u64 | bulk_bytes u64 | checksum u64 | mac 16 bytes; the MAC covers frame, tail and a counter

On a lane that shares memory, both sides read and write two kinds of segments as plain memory, without locks or system
calls. A segment of parameters starts with a *sequence number* (a seqlock): odd while an update runs, then 2 x version.
Values that come from outside make no version; they are counted in the number's upper bits, so that it still changes.
A slot, the segment of a gradient, starts with a *bell*.
"""

import struct
from enum import IntEnum
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from paceline.errors import ProtocolError

FRAME_BYTES = 64
HEADER_BYTES = 48
MAX_TAIL_BYTES = 16 << 20
SEGMENT_HEAD_BYTES = 64
ASSIGNMENT = 1 << 48  # added to the sequence number when values come from outside

NO_TAIL = bytes(4)
TAIL_BYTES = slice(12, 16)  # where a frame says how long its tail is

_HEADER = struct.Struct("<BBHH2xIIQQQQ")
_COUNTER = struct.Struct("<Q")
ANSWERED, VERSION, OUTCOME, SLEEPS = range(4)  # cells of a bell
_SEEN_BYTES = HEADER_BYTES + _COUNTER.size  # what the MAC covers: header and counter, then the tail


class Kind(IntEnum):
    """What a frame is."""

    PUSH = 1  # a gradient; on ps:0 of a round mode also the vote
    STAGE = 2  # a gradient for a shard that obeys ps:0
    PULL = 3  # parameters, please; the tail carries decisions
    ANSWER = 4  # what became of the push; parameters may follow
    BEAT = 5  # one way: the worker is alive
    COLD = 6  # the tail is a message of wire/messages
    BUCKET = 7  # one way: a part of the gradient to come, at byte `version` of the slot


class Flag(IntEnum):
    """Bits of `flags`."""

    NOT_FINITE = 1  # the gradient holds a NaN or an infinity; no bulk follows
    WANTS_TICKET = 2  # the worker asks for leave to compute one more step
    TICKET = 4  # granted
    INTO_SLOT = 8  # copy the parameters into my slot: reading them in place was torn too often
    COUNTED = 16  # in a pull: ps:0 has counted what I staged last, and I may stage more for the same round
    WAITED = 32  # in an answer: it was held back, so what the other shards said before is old
    SWITCH = 64  # in an answer: stand still before the next step, the mode changes
    SENT = 128  # in a push: its gradient came before, in buckets
    SAVE = 256  # in an answer: the next update will be saved; say where you are (wire/messages Position) after it
    WRITES = 512  # with SAVE: you write the checkpoint


class Outcome(IntEnum):
    """What became of a push."""

    APPLIED = 0
    STAGED = 1
    DISCARDED = 2  # late: its round was decided without it
    NOT_FINITE = 3
    DUPLICATE = 4
    FENCED = 5  # a newer incarnation of this worker is in, or it was given up
    ADDED = 6  # counted in a round that is still open, to which this worker may add more


WITHOUT_PARAMETERS = (Outcome.STAGED, Outcome.FENCED, Outcome.ADDED)


class Frame(NamedTuple):
    """One unpacked frame; `tail` is read, bulk is not."""

    kind: int
    outcome: int
    flags: int
    worker: int
    incarnation: int
    tail_bytes: int
    push_id: int
    version: int
    bulk_bytes: int
    checksum: int = 0
    tail: bytes = b""


class Codec:
    """Pack frames with one key and its counter; check frames with the other key and its counter.

    >>> a, b = Codec(b"1" * 32, b"2" * 32), Codec(b"2" * 32, b"1" * 32)
    >>> frame = bytes(a.pack(Kind.BEAT, 0, 3, 1, 0, b"", 7, 0, 0))
    >>> b.unpack(bytearray(frame)).push_id
    7
    """

    def __init__(self, send_key: bytes, recv_key: bytes) -> None:
        self._send_key = send_key
        self._recv_key = recv_key
        self._sent = 0
        self._received = 0
        self._out = bytearray(FRAME_BYTES)
        self._out_seen = memoryview(self._out)[:_SEEN_BYTES]

    def pack(
        self,
        kind: int,
        flags: int,
        worker: int,
        incarnation: int,
        outcome: int,
        tail: bytes,
        push_id: int,
        version: int,
        bulk_bytes: int,
        checksum: int = 0,
    ) -> bytearray:
        """Return the frame's bytes, which are valid until the next call."""
        out = self._out
        _HEADER.pack_into(
            out,
            0,
            kind,
            outcome,
            flags,
            worker,
            incarnation,
            len(tail),
            push_id,
            version,
            bulk_bytes,
            checksum,
        )
        _COUNTER.pack_into(out, HEADER_BYTES, self._sent)
        self._sent += 1
        mac = blake2b(self._out_seen, key=self._send_key, digest_size=16)
        if tail:
            mac.update(tail)
        out[HEADER_BYTES:] = mac.digest()
        return out

    def tail_bytes(self, frame: bytearray) -> int:
        """Return how many tail bytes follow. It is read before the MAC can be checked, so it is bounded here."""
        size: int = _HEADER.unpack_from(frame)[5]
        if size > MAX_TAIL_BYTES:
            raise ProtocolError(f"a frame claims {size} bytes of tail, the limit is {MAX_TAIL_BYTES}")
        return size

    def unpack(self, frame: bytearray, tail: bytes = b"") -> Frame:
        """Check the MAC over frame, counter and tail, then unpack. Overwrites the frame's last 16 bytes."""
        received = bytes(frame[HEADER_BYTES:])
        _COUNTER.pack_into(frame, HEADER_BYTES, self._received)
        self._received += 1
        mac = blake2b(memoryview(frame)[:_SEEN_BYTES], key=self._recv_key, digest_size=16)
        if tail:
            mac.update(tail)
        if not compare_digest(mac.digest(), received):
            raise ProtocolError("a frame with a wrong MAC: changed on the way, replayed, or not from this run")
        return Frame._make((*_HEADER.unpack_from(frame), tail))


class Bell:
    """The first cells of a slot, in memory that a worker and a ps both map; worker/requests/link reads them without a
    call.

    The ps writes its answer there, and sends a frame only to a worker that already sleeps. Most answers are there
    before the worker asks, so most cost neither side a system call.

    >>> bell = Bell(memoryview(bytearray(64)))
    >>> bell.ring(push_id=7, version=3, outcome=0, flags=4)
    False
    >>> bell.cells[ANSWERED], bell.cells[VERSION], bell.cells[OUTCOME] & 0xFF, bell.cells[OUTCOME] >> 8
    (7, 3, 0, 4)
    """

    __slots__ = ("cells",)

    def __init__(self, header: memoryview) -> None:
        self.cells = header[:SEGMENT_HEAD_BYTES].cast("Q")

    def ring(self, push_id: int, version: int, outcome: int, flags: int) -> bool:
        """Write the answer, its push id last; return whether the worker sleeps, so that a frame must wake it.

        A worker writes its push id to SLEEPS before it blocks, and reads ANSWERED once more after that. A processor may
        let both sides miss each other; a blocked worker reads again whenever its read times out, so that costs a
        moment, never a hang."""
        cells = self.cells
        cells[VERSION] = version
        cells[OUTCOME] = outcome | flags << 8
        cells[ANSWERED] = push_id
        return cells[SLEEPS] == push_id
