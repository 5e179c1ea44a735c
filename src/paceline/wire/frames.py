"""Hot-path messages: 64-byte frames with a keyed MAC, and the headers of shared memory.

Packed by transport/channel; the headers are used by server/service and worker/requests/link. A frame may be followed by
a *tail* (small, covered by the MAC) and by *bulk*, a shard's bytes. The checksum of small bulk is in the frame; that of
large bulk follows the bulk, so that both sides hash piece by piece while the bytes are in the cache.

    kind u8 | outcome u8 | flags u16 | worker u16 | 2 bytes of padding | incarnation u32 | tail_bytes u32 |
    push_id u64 | version u64 | bulk_bytes u64 | checksum u64 | mac 16 bytes; the MAC covers frame, tail and a counter

On a lane that shares memory, both sides read and write two kinds of segments as plain memory, without locks or system
calls. A segment of parameters starts with a *sequence number* (a seqlock): odd while an update runs, then 2 x version.
Values that come from outside make no version; they are counted in the number's upper bits, so that it still changes.
A slot, the segment of a gradient, starts with a *bell*: the ps writes its answer there, and sends a frame only to a
worker that already sleeps. Most answers are there before the worker asks, so most cost neither side a system call.
"""

from enum import IntEnum
from typing import NamedTuple

FRAME_BYTES = 64
HEADER_BYTES = 48
MAX_TAIL_BYTES = 16 << 20
SEGMENT_HEAD_BYTES = 64
ASSIGNMENT = 1 << 48  # added to the sequence number when values come from outside

NO_TAIL = bytes(4)
TAIL_BYTES = slice(12, 16)  # where a frame says how long its tail is

ANSWERED, VERSION, OUTCOME, SLEEPS = range(4)  # cells of a bell


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
