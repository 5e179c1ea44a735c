"""HOW does a frame travel? A stream, a codec and two counters: send a frame, receive a frame, move bulk.

Used by server/service and worker/client. Sending is safe from any thread; receiving belongs to one.
"""

import threading
import time
from collections.abc import Iterator, Sequence

import xxhash

from paceline import forks
from paceline.errors import ConnectionLost, PacelineError, ProtocolError, WaitTimeout
from paceline.params.arena import has_shared_memory
from paceline.transport import LANES, tls
from paceline.transport.base import Buffer, Rest, Stream
from paceline.transport.security import Role, as_client, as_server, deadline_s, keys_dir_of
from paceline.wire.frames import FRAME_BYTES, MAX_TAIL_BYTES, NO_TAIL, TAIL_BYTES, Codec, Frame, Kind
from paceline.wire.messages import Reply, Request, decode, encode

HASH_BYTES = 1 << 20  # the xxh3 of bulk up to this size is in its frame; of larger bulk it comes behind it
SEND_BYTES = 1 << 22  # sent and hashed at a time: the kernel is faster with one large piece than with many
RECV_BYTES = 1 << 20  # received and hashed at a time
CHECKSUM_BYTES = 8
ASK_S = 120.0  # the longest that an answer may take which waits for nobody else
PIECE_BYTES = 1 << 16  # a tail takes memory as it comes, not as it is claimed
SMALL_TAIL_BYTES = 1 << 16  # what those may say who bring no model


class Channel:
    """One authenticated connection."""

    def __init__(self, stream: Stream, keys: tuple[bytes, bytes], role: Role = Role.WORKER) -> None:
        self.stream = stream
        self.role = role  # the client's, on both ends
        self.address = ""  # that was connected to
        self.tail_limit_bytes = MAX_TAIL_BYTES
        self.shares_memory = stream.shares_memory
        self.lane = stream.lane
        self.bytes_in = 0
        self.bytes_out = 0
        self.payload_in = 0  # of those the bulk: gradients, parameters and other tensors
        self.payload_out = 0
        self._kernel_bytes: tuple[int, int] | None = None
        self._codec = Codec(*keys)
        self._sending = threading.Lock()
        forks.hold(self)
        self._frame = bytearray(FRAME_BYTES)
        self._view = memoryview(self._frame)

    def send(
        self,
        kind: int,
        flags: int = 0,
        worker: int = 0,
        incarnation: int = 0,
        outcome: int = 0,
        push_id: int = 0,
        version: int = 0,
        tail: bytes = b"",
        bulk: Sequence[Buffer] = (),
    ) -> None:
        """One frame, its tail, its bulk and the bulk's checksum."""
        size = sum([memoryview(b).nbytes for b in bulk]) if bulk else 0
        checksum = _checksum(bulk) if 0 < size <= HASH_BYTES else 0
        with self._sending:
            frame = self._codec.pack(kind, flags, worker, incarnation, outcome, tail, push_id, version, size, checksum)
            if size > HASH_BYTES:
                self.payload_out += size
                self._send_hashing(frame, tail, bulk)
            elif size or tail:
                self.payload_out += size
                self.stream.send([frame, tail, *bulk], FRAME_BYTES + len(tail) + size)
            else:
                self.stream.send((frame,), FRAME_BYTES)
        self.bytes_out += FRAME_BYTES + len(tail) + size

    def _send_hashing(self, frame: bytearray, tail: bytes, bulk: Sequence[Buffer]) -> None:
        """Large bulk goes out in large pieces. Each is hashed right behind it, while it is on its way and the other
        side takes it, and the checksum comes last."""
        digest = xxhash.xxh3_64()
        head: list[Buffer] = [frame, tail]
        size = FRAME_BYTES + len(tail)
        for group, group_bytes in _pieces(bulk, SEND_BYTES):
            self.stream.send([*head, *group], size + group_bytes)
            for piece in group:
                digest.update(piece)
            head, size = [], 0
        self.stream.send((digest.digest(),), CHECKSUM_BYTES)

    def recv(self) -> Frame:
        """The next frame with its tail; bulk, if any, must be taken with recv_bulk before the next call."""
        seen = self.stream.look(self._view) if self.stream.look_s else 0
        if not seen:
            self.stream.recv_into(self._view)
        elif seen < FRAME_BYTES:
            self._fill(self._view[seen:])
        size, tail = 0, b""
        if self._frame[TAIL_BYTES] != NO_TAIL:
            size = self._codec.tail_bytes(self._frame)
            tail = self._recv_tail(size)
        frame = self._codec.unpack(self._frame, tail)
        self.bytes_in += FRAME_BYTES + size + frame.bulk_bytes
        return frame

    def _recv_tail(self, size: int) -> bytes:
        """The MAC can be checked only behind the tail, so nothing is believed yet but the bytes that are there."""
        if size > self.tail_limit_bytes:
            raise ProtocolError(f"a {self.role} sent a tail of {size} bytes, its limit is {self.tail_limit_bytes}")
        tail = bytearray()
        while len(tail) < size:
            piece = bytearray(min(PIECE_BYTES, size - len(tail)))
            self._fill(memoryview(piece))
            tail += piece
        return bytes(tail)

    def recv_cold(self) -> Frame:
        """The next cold message. An answer that comes first was sent to wake a worker that was awake already."""
        frame = self.recv()
        while frame.kind == Kind.ANSWER and self.shares_memory:
            frame = self.recv()
        return frame

    def recv_bulk(self, frame: Frame, into: memoryview) -> None:
        """The bulk behind `frame`, straight into its place; its size must be what the place has."""
        if frame.bulk_bytes != into.nbytes:
            raise ProtocolError(f"{frame.bulk_bytes} bytes came where {into.nbytes} belong")
        self.payload_in += frame.bulk_bytes
        if frame.bulk_bytes <= HASH_BYTES:
            if frame.bulk_bytes:
                self._fill(into)
                if xxhash.xxh3_64_intdigest(into) != frame.checksum:
                    raise ProtocolError("a payload was damaged on the way")
            return
        digest = xxhash.xxh3_64()
        position = 0
        rest = Rest(self.stream.name)
        while position < into.nbytes:
            piece = into[position : position + RECV_BYTES]
            try:
                count = self.stream.recv_some(piece)
            except WaitTimeout:
                rest.check()
                continue
            rest.came()
            digest.update(piece[:count])
            position += count
        checksum = bytearray(CHECKSUM_BYTES)
        self._fill(memoryview(checksum))
        if digest.digest() != checksum:
            raise ProtocolError("a payload was damaged on the way")

    def _fill(self, view: memoryview) -> None:
        rest: Rest | None = None
        while True:
            try:
                return self.stream.recv_into(view)
            except WaitTimeout:
                rest = rest or Rest(self.stream.name)
                rest.check()

    def say(self, message: Request | Reply, bulk: Sequence[Buffer] = (), push_id: int = 0) -> None:
        """A cold message."""
        self.send(Kind.COLD, tail=encode(message), bulk=bulk, push_id=push_id)

    def ask(self, message: Request, bulk: Sequence[Buffer] = (), limit_s: float = ASK_S) -> tuple[Reply, Frame]:
        """Say it and wait for the one reply. The caller owns this channel's receiving side."""
        self.say(message, bulk)
        deadline = time.monotonic() + limit_s
        while True:
            try:
                frame = self.recv_cold()
                return decode(frame.tail), frame  # type: ignore[return-value]
            except WaitTimeout:
                if time.monotonic() >= deadline:
                    raise WaitTimeout(f"no answer to {type(message).__name__} within {limit_s:.0f} s") from None

    def kernel_bytes(self) -> tuple[int, int] | None:
        """(sent, received) as the system counted them, also after close(); asks the system, so not for every frame."""
        return self.stream.kernel_bytes() or self._kernel_bytes

    def close_in_child(self) -> None:
        """Refuse at once, also where another thread was sending when the child was forked."""
        self._sending = threading.Lock()

    def close(self) -> None:
        self._kernel_bytes = self.kernel_bytes()
        self.stream.close()


def connect(address: str, lane: str, secret: bytes, timeout_s: float = 5.0, role: Role = Role.WORKER) -> Channel:
    """The best lane to an address: shm when the ps is on this very host, else tcp; or the one asked for. `timeout_s` is
    for the connection, and then for the handshake, which has HANDSHAKE_S at most."""
    wanted = ["shm", "tcp"] if lane == "auto" else [lane]
    if lane == "auto" and not has_shared_memory():
        wanted = ["tcp"]
    trouble = ConnectionLost(f"no lane to {address}")
    for name in wanted:
        try:
            stream = LANES[name].connect(address, timeout_s)
        except ConnectionLost as error:
            trouble = error
            continue
        try:
            until_s = min(deadline_s(), time.monotonic() + timeout_s)
            keys_dir = keys_dir_of(secret)
            if keys_dir is not None and name == "tcp":
                stream = tls.as_client(stream, keys_dir, address, until_s)
            channel = Channel(stream, as_client(stream, secret, address, role, until_s), role)
            channel.address = address
            return channel
        except PacelineError:
            stream.close()
            raise
    raise trouble


def accept(stream: Stream, secret: bytes) -> Channel:
    """The server's end: a channel, or AuthenticationError."""
    until_s = deadline_s()
    keys_dir = keys_dir_of(secret)
    if keys_dir is not None and stream.lane == "tcp":
        stream = tls.as_server(stream, keys_dir, until_s)
    role, keys = as_server(stream, secret, until_s)
    channel = Channel(stream, keys, role)
    if role is not Role.WORKER:
        channel.tail_limit_bytes = SMALL_TAIL_BYTES
    return channel


def _checksum(bulk: Sequence[Buffer]) -> int:
    if len(bulk) == 1:
        return xxhash.xxh3_64_intdigest(bulk[0])
    digest = xxhash.xxh3_64()
    for buffer in bulk:
        digest.update(buffer)
    return digest.intdigest()


def _pieces(bulk: Sequence[Buffer], limit_bytes: int) -> Iterator[tuple[list[memoryview], int]]:
    """All of it in order, in groups of about so many bytes, each with its size; a large buffer is cut.

    >>> [[bytes(piece) for piece in group] for group, _ in _pieces([b"ab", b"cdefg"], 4)]
    [[b'ab', b'cdef'], [b'g']]
    """
    group: list[memoryview] = []
    size = 0
    for buffer in bulk:
        view = memoryview(buffer).cast("B")
        for start in range(0, view.nbytes, limit_bytes):
            if size >= limit_bytes:
                yield group, size
                group, size = [], 0
            group.append(view[start : start + limit_bytes])
            size += group[-1].nbytes
    if group:
        yield group, size
