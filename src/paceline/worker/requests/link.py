"""Send one ps gradients and requests, and read its parameters without tearing.

Used by worker/requests/client, one a ps. No framework: memory is bytes here. A connection that ends, or on which bytes
were damaged, raises ConnectionLost; a request is then asked again on the connection that `recover` makes.
"""

import os
import time
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

from paceline.errors import ClusterError, ConnectionLost, ProtocolError, Refused, WaitTimeout
from paceline.telemetry import ledger as led
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.steps import StepClock
from paceline.transport.base import Buffer
from paceline.transport.channel import ASK_S, Channel, Counts
from paceline.wire.decisions import Decision
from paceline.wire.frames import (
    ANSWERED,
    ASSIGNMENT,
    OUTCOME,
    SEGMENT_HEAD_BYTES,
    SLEEPS,
    VERSION,
    WITHOUT_PARAMETERS,
    Flag,
    Frame,
    Kind,
    Outcome,
)
from paceline.wire.messages import Carried, Close, Closed, Done, Fenced, Join, Joined, Request, encode
from paceline.worker.requests.rpc import Once, call

TORN_TRIES = 3
OWN_ID = 1 << 63  # of a pull into the slot: larger than every push id
GRADIENTS = (Kind.PUSH, Kind.STAGE)
LOOK_S = 200e-6  # how long to spin before sleeping: being woken costs more than most answers take
MAX_LOSSES = 60  # connections in a row that ended before a single answer: then what is sent is what ends them

FENCED = int(Outcome.FENCED)
Answered = tuple[int, int, int, bytes]  # outcome, flags, version and tail of an answer
_PUSH, _ANSWER, _PULL = int(led.Kind.PUSH), int(led.Kind.ANSWER), int(led.Kind.PULL)


Recover = Callable[["Link", ConnectionLost], None]  # connects again, or raises
R = TypeVar("R")


class FencedOff(Exception):
    """This incarnation was evicted; the newest that the ps knows is `incarnation`."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation


class ClosedAlready(Refused):
    """This worker, or an earlier start of it, has closed, but did not hear the answer, which is `reply`."""

    def __init__(self, reply: Closed, worker: int) -> None:
        super().__init__(f"worker:{worker} has closed already; its share of this run is done")
        self.reply = reply


class Link:
    """One ps as a worker sees it. `into` is the part of the worker's arena that this ps owns; `connections` counts
    how often it was connected again."""

    def __init__(
        self,
        channel: Channel,
        index: int,
        into: memoryview,
        worker: int,
        incarnation: int,
        ledger: Ledger | None = None,
        clock: StepClock | None = None,
        recover: Recover | None = None,
    ) -> None:
        self.channel = channel
        self.index = index
        self.name = f"ps:{index}"
        self.into = into
        self.version = 0
        self.offset = 0  # this shard's version less ps:0's, where rounds are counted
        self.slot: memoryview | None = None
        self._left: memoryview | None = None  # the slot of the connection before, where this one has none
        self.slot_bytes = 0  # of a gradient in a slot that both map; where it travels the channel counts it
        self.copied_in = 0  # bytes, into the slot
        self._copied_out = 0  # and out of what the ps shares
        self._earlier = Counts()  # on the connections before this one
        self._worker = worker
        self._incarnation = incarnation
        self._parameters: memoryview | None = None
        self._sequence: memoryview | None = None
        self._bell: memoryview | None = None  # the cells of the slot's bell (wire/frames)
        self.lineage = 0
        self._ledger = ledger
        self._awaits_push = False  # whether the next answer tells what became of a gradient
        self.connections = 0
        self.joined: Joined | None = None
        self.is_leaving = False  # asks to close: it looks for a ps that may have ended for a short time only
        self.losses = 0  # connections that ended since the last answer
        self._recover = recover or _give_up
        self.clock = clock or StepClock()

    @property
    def shares_memory(self) -> bool:
        return self.channel.shares_memory

    def join(self, join: Join) -> Joined:
        """Join (step 1 of worker/requests/joining); on a lane that shares memory, map what the ps hands over."""
        joined, _ = call(Once(self.channel, self.name), join, (Joined, Fenced, Closed))
        if isinstance(joined, Fenced):
            if joined.is_taken:
                raise Refused(joined.reason)
            raise FencedOff(joined.incarnation)
        if isinstance(joined, Closed):
            raise ClosedAlready(joined, self._worker)
        assert isinstance(joined, Joined)
        if joined.is_initialised and joined.lineage < self.lineage:
            self.channel.close()
            raise ConnectionLost(
                f"this ps:{self.index} is of lineage {joined.lineage}, and worker:{self._worker} trains in lineage "
                f"{self.lineage}: it was started again elsewhere since"
            )
        if joined.segment_bytes != [SEGMENT_HEAD_BYTES + self.into.nbytes] * 2:
            raise ProtocolError(f"ps:{self.index} holds {joined.segment_bytes} bytes, expected {self.into.nbytes}")
        if self.shares_memory:
            parameters, slot = self.channel.stream.recv_arenas(joined.segment_bytes, [False, True])
            self._sequence = parameters.memory[:8].cast("Q")
            self._parameters = parameters.memory[SEGMENT_HEAD_BYTES:]
            self.slot = slot.memory[SEGMENT_HEAD_BYTES:]
            self.slot_bytes = self.slot_bytes or self.slot.nbytes
            self._bell = slot.memory[:SEGMENT_HEAD_BYTES].cast("Q")
            if self.channel.lane == "shm":
                parameters.close()
                slot.close()
        else:
            self._sequence = self._parameters = self.slot = self._bell = None  # it may have been on this host before
        self.version = joined.version
        if joined.is_initialised:  # else it knows of none, and the worker that restores it must know the last one
            self.lineage = joined.lineage
        if self._ledger is not None:
            self._awaits_push = False
            here = (self.index, self._incarnation, 0, self.version, 0, self.lineage)
            self._ledger.write(led.Kind.ENTER, int(joined.is_initialised), *here)
        self.joined = joined
        return joined

    def rejoin(self, channel: Channel, join: Join) -> Joined:
        """Join on a new connection. As the same incarnation, move the gradient that lies in the slot to the new one.
        What was read is still of the version that it was read at."""
        self.channel.close()
        self._earlier += self.channel.counts()
        old, version, lineage, is_same = self.slot, self.version, self.lineage, self._incarnation == join.incarnation
        self.channel, self._incarnation = channel, join.incarnation
        joined = self.join(join)
        if self.lineage == lineage:
            self.version = version
        self.connections += 1
        self._left = None
        if is_same and old is not None and self.slot is not None:
            self.slot[:] = old
        elif is_same and old is not None:  # it was on this host before
            self._left = old[: self.slot_bytes]
        return joined

    def as_it_takes(self, gradient: Sequence[Buffer]) -> Sequence[Buffer]:
        """Return what a push on this connection carries of a gradient of the one before. The ps may have come to this
        host, or left it: where memory is shared the gradient is put into the slot, elsewhere it travels."""
        if self.slot is None:
            return (self._left,) if self._left is not None and not gradient else gradient
        start = 0
        for part in gradient:
            raw = memoryview(part).cast("B")
            self.slot[start : start + raw.nbytes] = raw
            start += raw.nbytes
        return ()

    def ask(self, request: Request, expects: type[R] = Done, bulk: Sequence[Buffer] = ()) -> R:  # type: ignore[assignment]
        """Ask on this connection, or on the next one; raise a refusal."""
        return self.ask_bulk(request, expects, 0, bulk)[0]

    def ask_bulk(
        self, request: Request, expects: type[R], limit_bytes: int, bulk: Sequence[Buffer] = ()
    ) -> tuple[R, bytearray]:
        """Ask for a reply that brings bulk, too."""
        answered = call(self, request, expects, bulk, limit_bytes)
        self.losses = 0
        return answered

    def close_run(self, request: Close) -> Closed:
        """Report that this worker has done its part. A ps that has closed it already, or has ended since, is no
        failure."""
        self.is_leaving = True
        try:
            return self.ask(request, Closed)
        except ClosedAlready as closed:
            return closed.reply
        except WaitTimeout:
            return Closed(is_last=False)
        finally:
            self.is_leaving = False

    def reconnect(self, error: ClusterError) -> None:
        """Have another connection made; raise after too many losses in a row."""
        self._recover(self, self.note_loss(error))

    def note_loss(self, error: ClusterError) -> ConnectionLost:
        """Count a lost connection; raise after too many in a row."""
        self.losses += 1
        told = error if isinstance(error, ConnectionLost) else ConnectionLost(f"ps:{self.index}: {error}")
        if self.losses > MAX_LOSSES:
            raise ConnectionLost(f"{self.losses} connections to ps:{self.index} ended without an answer: {told}")
        return told

    def send(self, kind: int, flags: int, push_id: int, tail: bytes = b"", bulk: Sequence[Buffer] = ()) -> None:
        if self._ledger is not None:
            self._awaits_push = kind in GRADIENTS
            if self._awaits_push:
                here = (self.index, self._incarnation, push_id, self.version, int(kind == Kind.STAGE), self.lineage)
                self._ledger.write(_PUSH, flags & Flag.NOT_FINITE, *here)
        try:
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
        except ConnectionLost:
            self.channel.stream.shutdown()  # half a frame may be on its way, and the ps must not wait for the rest
            raise

    def send_bucket(self, offset: int, part: Buffer) -> None:
        """Send a part of the next gradient, for this byte of the slot; it is not answered."""
        try:
            self.channel.send(Kind.BUCKET, 0, self._worker, self._incarnation, version=offset, bulk=(part,))
        except ConnectionLost:
            self.channel.stream.shutdown()
            raise

    def answer(self, push_id: int) -> Answered:
        """Wait for what became of a push. Where memory is shared the ps writes it there: spin before sleeping, and
        yield the core between two looks. A ps in this process needs the interpreter: sleep at once."""
        cells = self._bell
        if cells is None:
            return self.frame(push_id)
        if cells[ANSWERED] != push_id:
            if self.channel.lane == "shm":
                began_s = now_s = perf_counter()
                while now_s - began_s < LOOK_S and cells[ANSWERED] != push_id:
                    os.sched_yield()
                    now_s = perf_counter()
                self.clock.wait_s += now_s - began_s
            if cells[ANSWERED] != push_id:
                cells[SLEEPS] = push_id  # from now on a frame will come
                if cells[ANSWERED] != push_id:
                    return self.frame(push_id)
        both, version = cells[OUTCOME], cells[VERSION]
        outcome = both & 0xFF
        if self._ledger is not None:
            self._note_answer(push_id, outcome, version)
        if outcome == FENCED:
            raise self._fenced()
        return outcome, both >> 8, version, b""

    def frame(self, push_id: int) -> Answered:
        """Return the frame that answers `push_id`; on tcp its parameters lie in the arena then."""
        frame = self._recv_answer(push_id)
        if frame.kind != Kind.ANSWER or frame.push_id != push_id:
            raise ProtocolError(f"ps:{self.index} sent kind {frame.kind} for push {frame.push_id}, not {push_id}")
        if self._ledger is not None:
            self._note_answer(push_id, frame.outcome, frame.version)
        if frame.outcome == FENCED:
            raise self._fenced()
        if not self.shares_memory and frame.outcome not in WITHOUT_PARAMETERS:
            self._recv_bulk(frame, self.into)
            self.version = frame.version
            if self._ledger is not None:
                self._note_read()
        return frame.outcome, frame.flags, frame.version, frame.tail

    def deliver(self, push_id: int, decisions: tuple[Decision, ...]) -> None:
        """Send decisions, and discard the parameters that come with the answer."""
        self.send(Kind.PULL, 0, push_id, encode(Carried(decisions)))
        self._drop_bulk(self._wait_frame(push_id))

    def _recv_answer(self, push_id: int) -> Frame:
        """Receive the frame that answers `push_id`. An older one was sent to wake a worker that was awake already, or
        answers a push that was given up."""
        frame = self._recv()
        while frame.push_id < push_id:
            self._drop_bulk(frame)
            frame = self._recv()
        return frame

    def _drop_bulk(self, frame: Frame) -> None:
        if not self.shares_memory:
            self._recv_bulk(frame, memoryview(bytearray(frame.bulk_bytes)))

    def _recv(self) -> Frame:
        began_s = perf_counter()
        try:
            return self.channel.recv()
        except ProtocolError as error:  # damaged on the way, or replayed
            raise ConnectionLost(f"ps:{self.index}: {error}") from error
        finally:
            self.clock.wait_s += perf_counter() - began_s

    def _recv_bulk(self, frame: Frame, into: memoryview) -> None:
        try:
            self.channel.recv_bulk(frame, into)
        except ProtocolError as error:
            raise ConnectionLost(f"ps:{self.index}: {error}") from error

    def _note_answer(self, push_id: int, outcome: int, version: int) -> None:
        if self._ledger is not None and self._awaits_push:
            self._awaits_push = False
            self._ledger.write(_ANSWER, outcome, self.index, self._incarnation, push_id, version, 0, self.lineage)

    def _note_read(self) -> None:
        if self._ledger is not None:
            self._ledger.write(_PULL, 0, self.index, self._incarnation, 0, self.version, 0, self.lineage)

    def _fenced(self) -> ConnectionLost:
        return ConnectionLost(f"worker:{self._worker} is fenced: ps:{self.index} has given it up, or knows a newer one")

    def read(self, push_id: int) -> None:
        """Copy the newest parameters into the arena, all of one version; do nothing where they came with the answer.

        The sequence number is odd while an update runs (a seqlock). What changed under the copy is copied again, and
        after a few tries the ps is asked to copy, under its lock, into the slot.
        """
        sequence, parameters = self._sequence, self._parameters
        if sequence is None or parameters is None:
            return
        for _ in range(TORN_TRIES):
            before = sequence[0]
            if before & 1:
                os.sched_yield()
                continue
            self.into[:] = parameters
            if sequence[0] == before:
                version = before % ASSIGNMENT // 2
                if version < self.version:
                    self.reconnect(
                        ConnectionLost(f"ps:{self.index} went back from version {self.version} to {version}")
                    )
                    return self.read(push_id)
                self._copied_out += self.into.nbytes
                self.version = version
                if self._ledger is not None:
                    self._note_read()
                return None
        try:
            self._read_by_slot(push_id | OWN_ID)  # a frame that was to wake us for the push may still be on its way
        except ConnectionLost as error:
            self.reconnect(error)
            self.read(push_id)
        return None

    def _read_by_slot(self, asked: int) -> None:
        self.send(Kind.PULL, Flag.INTO_SLOT, asked)
        frame = self._wait_frame(asked)
        assert self.slot is not None
        self.into[:] = self.slot
        self._copied_out += self.into.nbytes
        self.version = frame.version
        if self._ledger is not None:
            self._note_read()

    def _wait_frame(self, push_id: int) -> Frame:
        """Wait for an answer that waits for no other worker."""
        deadline = time.monotonic() + ASK_S
        while True:
            try:
                return self._recv_answer(push_id)
            except WaitTimeout:
                if time.monotonic() >= deadline:
                    raise ConnectionLost(f"ps:{self.index} has not answered for {ASK_S:.0f} s") from None

    def counts(self) -> Counts:
        """Return how much this worker and this ps exchanged so far, on all connections and in shared memory."""
        return self._earlier + self.channel.counts() + Counts(self.copied_in, self._copied_out)

    def close(self) -> None:
        self.channel.close()


def _give_up(link: Link, error: ConnectionLost) -> None:
    raise error
