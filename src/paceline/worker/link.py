"""HOW does a worker talk to one ps? The connection, its slot, and a read that is never torn.

Used by worker/client, one a ps. No framework: memory is bytes here.
"""

import os
from collections.abc import Sequence

from paceline.errors import ProtocolError, Refused, WaitTimeout
from paceline.transport.base import Buffer
from paceline.transport.channel import Channel
from paceline.wire.frames import WITHOUT_PARAMETERS, Flag, Frame, Kind, Outcome
from paceline.wire.messages import Failed, Join, Joined, Reply, Request
from paceline.wire.segments import ASSIGNMENT, HEADER_BYTES, Bell

TORN_TRIES = 3
OWN_ID = 1 << 63  # of a pull into the slot: larger than every push id


class Link:
    """One ps as a worker sees it. `into` is the part of the worker's arena that this ps owns."""

    def __init__(self, channel: Channel, index: int, into: memoryview, worker: int, incarnation: int) -> None:
        self.channel = channel
        self.index = index
        self.into = into
        self.version = 0
        self.offset = 0  # this shard's version less ps:0's, where rounds are counted
        self.slot: memoryview | None = None
        self._worker = worker
        self._incarnation = incarnation
        self._parameters: memoryview | None = None
        self._sequence: memoryview | None = None
        self._bell: Bell | None = None

    @property
    def shares_memory(self) -> bool:
        return self.channel.shares_memory

    def join(self, join: Join) -> Joined:
        """Step 1 of joining; on a lane that shares memory, maps what the ps hands over."""
        joined = self.ask(join)
        if not isinstance(joined, Joined):
            raise ProtocolError(f"a ps answered Join with {type(joined).__name__}")
        if joined.segment_bytes != [HEADER_BYTES + self.into.nbytes] * 2:
            raise ProtocolError(f"ps:{self.index} holds {joined.segment_bytes} bytes, expected {self.into.nbytes}")
        if self.shares_memory:
            parameters, slot = self.channel.stream.recv_arenas(joined.segment_bytes, [False, True])
            self._sequence = parameters.memory[:8].cast("Q")
            self._parameters = parameters.memory[HEADER_BYTES:]
            self.slot = slot.memory[HEADER_BYTES:]
            self._bell = Bell(slot.memory)
            if self.channel.lane == "shm":
                parameters.close()
                slot.close()
        self.version = joined.version
        return joined

    def ask(self, request: Request, bulk: Sequence[Buffer] = ()) -> Reply:
        """A cold request and its reply; a refusal is raised."""
        reply, _ = self.channel.ask(request, bulk)
        if isinstance(reply, Failed):
            raise Refused(reply.reason)
        return reply

    def ask_bulk(self, request: Request, limit_bytes: int) -> tuple[Reply, bytearray]:
        """A cold request whose reply brings bulk."""
        reply, frame = self.channel.ask(request)
        if isinstance(reply, Failed):
            raise Refused(reply.reason)
        if frame.bulk_bytes > limit_bytes:
            raise ProtocolError(f"ps:{self.index} sent {frame.bulk_bytes} bytes, at most {limit_bytes} were expected")
        block = bytearray(frame.bulk_bytes)
        self.channel.recv_bulk(frame, memoryview(block))
        return reply, block

    def send(self, kind: Kind, flags: int, push_id: int, tail: bytes = b"", bulk: Sequence[Buffer] = ()) -> None:
        self.channel.send(
            kind,
            flags,
            self._worker,
            self._incarnation,
            push_id=push_id,
            version=self.version,
            tail=tail,
            bulk=bulk,
        )

    def send_bucket(self, offset: int, part: Buffer) -> None:
        """A part of the gradient to come, for this byte of the slot; no answer."""
        self.channel.send(Kind.BUCKET, 0, self._worker, self._incarnation, version=offset, bulk=(part,))

    def answer(self, push_id: int) -> Frame:
        """The answer to a push; where memory is shared it has mostly been written there before we ask."""
        bell = self._bell
        if bell is not None and (bell.is_answered(push_id) or not bell.will_sleep(push_id)):
            self._refuse_fenced(bell.outcome)
            return Frame(Kind.ANSWER, bell.outcome, bell.flags, 0, 0, 0, 0, push_id, bell.version, 0)
        return self.frame(push_id)

    def frame(self, push_id: int) -> Frame:
        """The frame that answers `push_id`; on tcp its parameters lie in the arena when this returns."""
        frame = self.channel.recv()
        while frame.push_id < push_id and self.shares_memory:
            frame = self.channel.recv()  # it was sent to wake us, and we were awake already
        if frame.kind != Kind.ANSWER or frame.push_id != push_id:
            raise ProtocolError(f"ps:{self.index} sent kind {frame.kind} for push {frame.push_id}, not {push_id}")
        self._refuse_fenced(frame.outcome)
        if not self.shares_memory and frame.outcome not in WITHOUT_PARAMETERS:
            self.channel.recv_bulk(frame, self.into)
            self.version = frame.version
        return frame

    def _refuse_fenced(self, outcome: int) -> None:
        if outcome == Outcome.FENCED:
            raise Refused(f"worker:{self._worker} is fenced: ps:{self.index} has given it up or knows a newer one")

    def read(self, push_id: int) -> None:
        """On a lane that shares memory: copy the parameters into the arena, all from one version.

        The sequence number is odd while an update runs. What changed under the copy is copied again, and after a few
        tries the ps is asked to copy, under its lock, into the slot.
        """
        if self._sequence is None or self._parameters is None:
            return
        for _ in range(TORN_TRIES):
            before = self._sequence[0]
            if before & 1:
                os.sched_yield()
                continue
            self.into[:] = self._parameters
            if self._sequence[0] == before:
                self.version = before % ASSIGNMENT // 2
                return
        asked = push_id | OWN_ID  # a frame that was to wake us for the push itself may still be on its way
        self.send(Kind.PULL, Flag.INTO_SLOT, asked)
        frame = self._wait(asked)
        assert self.slot is not None
        self.into[:] = self.slot
        self.version = frame.version

    def _wait(self, push_id: int) -> Frame:
        while True:
            try:
                return self.frame(push_id)
            except WaitTimeout:
                continue

    def close(self) -> None:
        self.channel.close()
