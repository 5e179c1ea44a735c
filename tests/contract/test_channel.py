"""WHAT does a channel refuse? Everything that is not exactly what the other side sent, once, in order."""

from collections.abc import Sequence

import pytest

from paceline.errors import ClusterError, ConnectionLost, ProtocolError
from paceline.transport.base import Buffer, Stream
from paceline.transport.channel import HASH_BYTES, RECV_BYTES, SEND_BYTES, Channel
from paceline.wire.frames import FRAME_BYTES, Kind
from paceline.wire.messages import Done, Lost

KEYS = (b"u" * 32, b"d" * 32)


class Tape(Stream):
    """Keeps what is sent; plays what it is given, and then the connection is over."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.sends: list[int] = []
        self._position = 0

    def send(self, buffers: Sequence[Buffer], size_bytes: int = -1) -> None:
        size = sum(len(buffer) for buffer in buffers)
        assert size_bytes in (-1, size)
        self.sends.append(size)
        for buffer in buffers:
            self.data += buffer

    def recv_some(self, view: memoryview) -> int:
        piece = self.data[self._position : self._position + len(view)]
        if not piece:
            raise ConnectionLost("the tape is over")
        view[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


def sent(*frames: dict[str, object]) -> bytes:
    tape = Tape()
    channel = Channel(tape, KEYS)
    for frame in frames:
        channel.send(Kind.PUSH, **frame)  # type: ignore[arg-type]
    return bytes(tape.data)


def heard(data: bytes) -> Channel:
    return Channel(Tape(data), KEYS[::-1])


FRAME = {"flags": 3, "worker": 2, "incarnation": 7, "push_id": 99, "version": 12, "tail": b"a tail of 20 bytes.."}


def test_what_was_sent_is_what_is_heard() -> None:
    channel = heard(sent(FRAME, {"push_id": 5}))
    first, second = channel.recv(), channel.recv()
    assert (first.flags, first.worker, first.incarnation, first.push_id, first.version) == (3, 2, 7, 99, 12)
    assert first.tail == FRAME["tail"]
    assert (second.push_id, second.tail) == (5, b"")


def test_a_flipped_bit_anywhere_in_frame_or_tail_is_refused() -> None:
    data = sent(FRAME)
    assert len(data) == FRAME_BYTES + 20
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ClusterError) as refused:
            heard(bytes(changed)).recv()
        # A larger tail length asks for bytes that never come; everything else fails its MAC.
        assert isinstance(refused.value, ProtocolError | ConnectionLost), bit


def test_a_truncated_frame_is_refused_at_every_length() -> None:
    data = sent(FRAME)
    for length in range(len(data)):
        with pytest.raises(ConnectionLost):
            heard(data[:length]).recv()


def test_a_replayed_frame_is_refused() -> None:
    data = sent(FRAME)
    channel = heard(data + data)
    channel.recv()
    with pytest.raises(ProtocolError, match="replayed"):
        channel.recv()


def test_a_lost_frame_and_a_swapped_pair_are_refused() -> None:
    one, two = {"push_id": 1}, {"push_id": 2}
    both = sent(one, two)
    with pytest.raises(ProtocolError):
        heard(both[FRAME_BYTES:]).recv()
    with pytest.raises(ProtocolError):
        heard(both[FRAME_BYTES:] + both[:FRAME_BYTES]).recv()


def test_a_frame_sent_back_to_its_sender_is_refused() -> None:
    with pytest.raises(ProtocolError):
        Channel(Tape(sent(FRAME)), KEYS).recv()


def test_a_frame_of_another_connection_is_refused() -> None:
    other = Channel(Tape(sent(FRAME)), (b"x" * 32, b"y" * 32))
    with pytest.raises(ProtocolError):
        other.recv()


def test_a_tail_longer_than_the_limit_is_refused_before_it_is_allocated() -> None:
    data = bytearray(sent(FRAME))
    data[12:16] = (1 << 31).to_bytes(4, "little")
    with pytest.raises(ProtocolError, match="limit"):
        heard(bytes(data)).recv()


@pytest.mark.parametrize("size", [1, 63, 1000, HASH_BYTES, HASH_BYTES + 1])
def test_bulk_arrives_whole_and_a_flipped_byte_is_refused(size: int) -> None:
    payload = bytes(i * 7 % 256 for i in range(size))
    data = sent({"bulk": [memoryview(payload)[: size // 3], payload[size // 3 :]]})
    assert len(data) == FRAME_BYTES + size + (8 if size > HASH_BYTES else 0)
    channel, into = heard(data), bytearray(size)
    channel.recv_bulk(channel.recv(), memoryview(into))
    assert into == payload
    positions = {FRAME_BYTES, FRAME_BYTES + size // 2, FRAME_BYTES + size - 1, len(data) - 8, len(data) - 1}
    for position in (p for p in positions if p >= FRAME_BYTES):
        changed = bytearray(data)
        changed[position] ^= 0x10
        channel = heard(bytes(changed))
        with pytest.raises(ProtocolError, match="damaged"):
            channel.recv_bulk(channel.recv(), memoryview(into))


LARGE = {
    "one piece": [HASH_BYTES, 1],
    "exactly what is sent at a time": [SEND_BYTES],
    "one byte more": [SEND_BYTES + 1],
    "exactly what is received at a time": [RECV_BYTES],
    "many small tensors": [10_007] * 600,
    "small ones between large ones": [5, SEND_BYTES * 2 + 3, 7, 0, SEND_BYTES, 1],
}


@pytest.mark.parametrize("sizes", LARGE.values(), ids=LARGE)
def test_large_bulk_of_many_buffers_arrives_whole_and_no_byte_of_it_may_change(sizes: list[int]) -> None:
    buffers = [bytes([1 + number % 255]) * size for number, size in enumerate(sizes)]
    data = sent({"bulk": buffers, "tail": b"tail"})
    into = bytearray(sum(sizes))
    channel = heard(data)
    channel.recv_bulk(channel.recv(), memoryview(into))
    assert into == b"".join(buffers)
    for position in (FRAME_BYTES + 4, FRAME_BYTES + 4 + len(into) // 2, len(data) - 9, len(data) - 8, len(data) - 1):
        changed = bytearray(data)
        changed[position] ^= 1
        channel = heard(bytes(changed))
        with pytest.raises(ProtocolError, match="damaged"):
            channel.recv_bulk(channel.recv(), memoryview(into))


@pytest.mark.parametrize(("size", "behind"), [(1_000_000, []), (3_000_000, [8])])
def test_it_leaves_in_one_piece_and_the_checksum_of_large_bulk_behind_it(size: int, behind: list[int]) -> None:
    tape = Tape()
    Channel(tape, KEYS).send(Kind.PUSH, bulk=[bytes(size)])
    assert tape.sends == [FRAME_BYTES + size, *behind]


def test_bulk_of_the_wrong_size_is_refused() -> None:
    data = sent({"bulk": [bytes(100)]})
    for size in (0, 99, 101):
        channel = heard(data)
        with pytest.raises(ProtocolError, match="100 bytes came"):
            channel.recv_bulk(channel.recv(), memoryview(bytearray(size)))
    channel = heard(data[:-20])
    with pytest.raises(ConnectionLost):
        channel.recv_bulk(channel.recv(), memoryview(bytearray(100)))


def test_a_cold_message_and_its_reply() -> None:
    tape = Tape()
    Channel(tape, KEYS[::-1]).say(Done())
    asking = Tape(bytes(tape.data))
    reply, _ = Channel(asking, KEYS).ask(Lost(3))
    assert reply == Done()
