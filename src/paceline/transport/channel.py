"""Authenticated connections: send and receive frames with their tails and bulk over a stream.

Used by server/service and worker/requests/client. Sending is safe from any thread; receiving belongs to one.
"""

import struct
import threading
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from hmac import compare_digest

import msgspec
import xxhash

from paceline import forks
from paceline.errors import ConnectionLost, PacelineError, ProtocolError, WaitTimeout
from paceline.params.arena import has_shared_memory
from paceline.transport import LANES, tls
from paceline.transport.base import Buffer, Stream
from paceline.transport.security import Role, as_client, as_server, deadline_s, keys_dir_of
from paceline.wire.frames import FRAME_BYTES, HEADER_BYTES, MAX_TAIL_BYTES, NO_TAIL, TAIL_BYTES, Frame, Kind
from paceline.wire.messages import Reply, Request, decode, encode

HASH_BYTES = 1 << 20  # the xxh3 of bulk up to this size is in its frame; of larger bulk it follows the bulk
SEND_BYTES = 1 << 22  # sent and hashed at a time: the kernel is faster with one large piece than with many
RECV_BYTES = 1 << 20  # received and hashed at a time
CHECKSUM_BYTES = 8
ASK_S = 120.0  # limit for a reply that waits for no other task
PIECE_BYTES = 1 << 16  # memory for a tail is allocated as it comes, not as it is claimed
SMALL_TAIL_BYTES = 1 << 16  # limit for roles that bring no model

_HEADER = struct.Struct("<BBHH2xIIQQQQ")
_COUNTER = struct.Struct("<Q")
_SEEN_BYTES = HEADER_BYTES + _COUNTER.size  # what the MAC covers: header and counter, then the tail


class Counts(msgspec.Struct, frozen=True):
    """Bytes that connections carried: payload (tensors) sent and received, and all bytes by TCP_INFO, where known."""

    sent: int = 0
    received: int = 0
    tcp_sent: int | None = 0
    tcp_received: int | None = 0

    def __add__(self, other: "Counts") -> "Counts":
        """Add two; a number that one of them does not know is unknown in the sum.

        >>> Counts(1, 2, 3, 4) + Counts(1, 2, None, None)
        Counts(sent=2, received=4, tcp_sent=None, tcp_received=None)
        """
        return Counts(
            self.sent + other.sent,
            self.received + other.received,
            None if self.tcp_sent is None or other.tcp_sent is None else self.tcp_sent + other.tcp_sent,
            None if self.tcp_received is None or other.tcp_received is None else self.tcp_received + other.tcp_received,
        )


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


class Channel:
    """One authenticated connection."""

    def __init__(self, stream: Stream, keys: tuple[bytes, bytes], role: Role = Role.WORKER) -> None:
        self.stream = stream
        self.role = role  # of the client, on both ends
        self.address = ""  # set on the client's end
        self.tail_limit_bytes = MAX_TAIL_BYTES
        self.shares_memory = stream.shares_memory
        self.lane = stream.lane
        self.bytes_in = 0
        self.bytes_out = 0
        self.payload_in = 0  # the part of them that is bulk: gradients, parameters and other tensors
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
        """Send one frame with its tail, its bulk and the bulk's checksum."""
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
            elif (write := self.stream.write) is None:
                self.stream.send((frame,), FRAME_BYTES)
            else:
                try:
                    sent = write(frame)
                except OSError as error:
                    raise self.stream.lost(error) from error
                if sent < FRAME_BYTES:
                    self.stream.send((frame[sent:],), FRAME_BYTES - sent)
        self.bytes_out += FRAME_BYTES + len(tail) + size

    def _send_hashing(self, frame: bytearray, tail: bytes, bulk: Sequence[Buffer]) -> None:
        """Send large bulk in large pieces. Hash each one right after it is sent, while the other side receives it; the
        checksum comes last."""
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
        """Receive the next frame and its tail; take bulk, if any, with recv_bulk before the next call."""
        stream = self.stream
        seen = stream.look(self._view) if stream.look_s else 0
        if not seen:
            stream.recv_into(self._view)
        elif seen < FRAME_BYTES:
            stream.recv_rest(self._view[seen:])
        size, tail = 0, b""
        if self._frame[TAIL_BYTES] != NO_TAIL:
            size = self._codec.tail_bytes(self._frame)
            tail = self._recv_tail(size)
        frame = self._codec.unpack(self._frame, tail)
        self.bytes_in += FRAME_BYTES + size + frame.bulk_bytes
        return frame

    def _recv_tail(self, size: int) -> bytes:
        """Receive a tail. Its MAC can be checked only when all of it is here, so its claimed size is not trusted."""
        if size > self.tail_limit_bytes:
            raise ProtocolError(f"a {self.role} sent a tail of {size} bytes, its limit is {self.tail_limit_bytes}")
        tail = bytearray()
        while len(tail) < size:
            piece = bytearray(min(PIECE_BYTES, size - len(tail)))
            self.stream.recv_rest(memoryview(piece))
            tail += piece
        return bytes(tail)

    def recv_cold(self) -> Frame:
        """Receive the next cold message. Skip answers, which were sent to wake a worker that had not slept."""
        frame = self.recv()
        while frame.kind == Kind.ANSWER and self.shares_memory:
            frame = self.recv()
        return frame

    def recv_bulk(self, frame: Frame, into: memoryview) -> None:
        """Receive the bulk of `frame` into its place, which must have its size, and check it."""
        if frame.bulk_bytes != into.nbytes:
            raise ProtocolError(f"{frame.bulk_bytes} bytes came where {into.nbytes} belong")
        self.payload_in += frame.bulk_bytes
        if frame.bulk_bytes <= HASH_BYTES:
            self.stream.recv_rest(into)
            if into.nbytes and xxhash.xxh3_64_intdigest(into) != frame.checksum:
                raise ProtocolError("a payload was damaged on the way")
            return
        digest = xxhash.xxh3_64()
        for start in range(0, into.nbytes, RECV_BYTES):
            piece = into[start : start + RECV_BYTES]
            self.stream.recv_rest(piece)
            digest.update(piece)
        checksum = bytearray(CHECKSUM_BYTES)
        self.stream.recv_rest(memoryview(checksum))
        if digest.digest() != checksum:
            raise ProtocolError("a payload was damaged on the way")

    def say(self, message: Request | Reply, bulk: Sequence[Buffer] = (), push_id: int = 0) -> None:
        """Send a cold message."""
        self.send(Kind.COLD, tail=encode(message), bulk=bulk, push_id=push_id)

    def ask(self, message: Request, bulk: Sequence[Buffer] = (), limit_s: float = ASK_S) -> tuple[Reply, Frame]:
        """Send a request and wait for its one reply. The caller must own this channel's receiving side."""
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
        """Return (sent, received) as the system counted them, also after close(); this is a system call."""
        return self.stream.kernel_bytes() or self._kernel_bytes

    def counts(self) -> Counts:
        """Return what this connection has carried so far; not meant for every frame."""
        return Counts(self.payload_out, self.payload_in, *(self.kernel_bytes() or (None, None)))

    def close_in_child(self) -> None:
        """Make a lock that is free: another thread may have been sending when the child was forked."""
        self._sending = threading.Lock()

    def close(self) -> None:
        self._kernel_bytes = self.kernel_bytes()
        self.stream.close()


def connect(address: str, lane: str, secret: bytes, timeout_s: float = 5.0, role: Role = Role.WORKER) -> Channel:
    """Connect by the lane asked for; `auto` is shm if the ps is on this host, else tcp. `timeout_s` holds for the
    connection, and then for the handshake, which has HANDSHAKE_S at most."""
    wanted = ["shm", "tcp"] if lane == "auto" else [lane]
    if lane == "auto" and not has_shared_memory():
        wanted = ["tcp"]
    failure = ConnectionLost(f"no lane to {address}")
    for name in wanted:
        try:
            stream = LANES[name].connect(address, timeout_s)
        except ConnectionLost as error:
            failure = error
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
    raise failure


def accept(stream: Stream, secret: bytes) -> Channel:
    """Return the server's end of a channel, or raise AuthenticationError."""
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
    """Yield all of it in order, in groups of about so many bytes, each with its size; a large buffer is cut.

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
