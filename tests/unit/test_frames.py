"""CAN bytes from outside do harm? The codec and the message decoder on everything that can arrive."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.errors import ProtocolError
from paceline.modes.spec import ModeSpec
from paceline.transport.channel import Codec
from paceline.wire import messages as m
from paceline.wire.frames import FRAME_BYTES, HEADER_BYTES, MAX_TAIL_BYTES, Flag, Frame, Kind, Outcome

UP, DOWN = b"u" * 32, b"d" * 32


def pair() -> tuple[Codec, Codec]:
    return Codec(UP, DOWN), Codec(DOWN, UP)


def uint(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


@given(
    kind=st.sampled_from(Kind),
    flags=uint(8),
    worker=uint(16),
    incarnation=uint(32),
    outcome=st.sampled_from(Outcome),
    tail=st.binary(max_size=200),
    push_id=uint(64),
    version=uint(64),
    bulk_bytes=uint(64),
)
def test_what_is_packed_is_unpacked(tail: bytes, **fields: int) -> None:
    here, there = pair()
    packed = bytearray(here.pack(tail=tail, **fields))
    assert len(packed) == FRAME_BYTES
    assert there.tail_bytes(packed) == len(tail)
    assert there.unpack(packed, tail) == Frame(tail_bytes=len(tail), tail=tail, **fields)


@settings(max_examples=300)
@given(st.binary(min_size=FRAME_BYTES, max_size=FRAME_BYTES), st.binary(max_size=64))
@example(bytes(FRAME_BYTES), b"")
@example(b"\xff" * FRAME_BYTES, b"")
def test_arbitrary_bytes_are_no_frame(data: bytes, tail: bytes) -> None:
    codec = Codec(UP, DOWN)
    with pytest.raises(ProtocolError):
        codec.unpack(bytearray(data), tail)
    try:
        assert codec.tail_bytes(bytearray(data)) <= MAX_TAIL_BYTES
    except ProtocolError as error:
        assert "limit" in str(error)


@given(st.integers(0, 8 * FRAME_BYTES - 1), st.binary(max_size=40))
def test_every_bit_is_covered(bit: int, tail: bytes) -> None:
    here, there = pair()
    packed = bytearray(here.pack(Kind.PUSH, 0, 1, 1, 0, tail, 5, 9, 0))
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ProtocolError):
        there.unpack(packed, tail)


def test_the_counter_is_part_of_the_mac() -> None:
    here, there = pair()
    packed = [bytes(here.pack(Kind.BEAT, 0, 0, 1, 0, b"", 0, 0, 0)) for _ in range(2)]
    assert packed[0][:HEADER_BYTES] == packed[1][:HEADER_BYTES]
    assert packed[0] != packed[1]
    there.unpack(bytearray(packed[0]))
    there.unpack(bytearray(packed[1]))
    with pytest.raises(ProtocolError):
        there.unpack(bytearray(packed[0]))


def test_a_tail_of_the_limit_passes_and_one_byte_more_does_not() -> None:
    here, there = pair()
    packed = bytearray(here.pack(Kind.COLD, 0, 0, 0, 0, b"", 0, 0, 0))
    packed[12:16] = MAX_TAIL_BYTES.to_bytes(4, "little")
    assert there.tail_bytes(packed) == MAX_TAIL_BYTES
    packed[12:16] = (MAX_TAIL_BYTES + 1).to_bytes(4, "little")
    with pytest.raises(ProtocolError):
        there.tail_bytes(packed)


def test_flags_are_bits_of_their_own() -> None:
    assert all(flag & flag - 1 == 0 and flag < 1 << 16 for flag in Flag)
    assert len(set(Flag)) == len(Flag)


# --- cold messages ----------------------------------------------------------------------------------------------------


@settings(max_examples=500)
@given(st.binary(max_size=300))
@example(b"")
@example(b"\xc1")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\x91" * 300)
def test_arbitrary_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    with suppress(ProtocolError):
        m.decode(data)


objects = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from([kind.__name__ for kind in m.Message.__subclasses__()])
fields = st.sampled_from(sorted({name for kind in m.Message.__subclasses__() for name in kind.__struct_fields__}))


@settings(max_examples=200)
@given(names, st.dictionaries(fields, objects, max_size=6))
def test_a_message_with_the_wrong_fields_is_a_protocol_error(name: str, content: dict[str, object]) -> None:
    try:
        decoded = m.decode(msgspec.msgpack.encode({"type": name, **content}))
    except ProtocolError:
        return
    assert type(decoded).__name__ == name


@pytest.mark.parametrize(
    "message",
    [
        m.Lost(3),
        m.Serves(1, 2),
        m.Steps(10_000),
        m.Carried(((4, ((0, 1, 1), (2, 7, 3))), (5, ()))),
        m.PushTail([{"lr": 0.1, "betas": [0.9, 0.999], "foreach": None, "nesterov": True}], b"\x05", 12.0),
        m.Started(1, 2, ((0, ((1, 1, 1),)),), m.Dial(2, ModeSpec(name="bounded", staleness=4), 7)),
        m.SwitchMode(ModeSpec(name="sync", replicas_to_aggregate=2, grace_share=0.2), waits=False),
        m.Fetched(3, [m.SlotEntry(0, 0, 16, "exp_avg", "float32", False, 0, 64)]),
    ],
    ids=lambda message: type(message).__name__,
)
def test_messages_come_back_as_they_were(message: m.Message) -> None:
    assert m.decode(m.encode(message)) == message


def test_a_message_of_a_type_that_is_not_ours_is_refused() -> None:
    for other in ({"type": "Eval", "code": "1"}, {"no": "type"}, [1, 2], "Done"):
        with pytest.raises(ProtocolError, match="does not parse"):
            m.decode(msgspec.msgpack.encode(other))
