"""WHAT can be sent to a port? Anything; it ends the connection with a named error, quickly, and allocates nothing."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from seeds import CORPUS, PROBES, anything, changed

from paceline.errors import ClusterError, ProtocolError
from paceline.modes.spec import ModeSpec
from paceline.params.layout import Layout, TensorSpec
from paceline.transport import channel as channels
from paceline.transport.base import Stream
from paceline.transport.channel import Channel, Codec, accept
from paceline.transport.security import as_client
from paceline.wire import messages as m
from paceline.wire.frames import Kind

SECRET = b"s" * 32
KEYS = (b"u" * 32, b"d" * 32)
MESSAGES = [
    m.Join("worker", 0, 1, "r", True, "async", "bytes", 1,
           Layout((TensorSpec("w", (3, 2), (2, 1), "float32", 0), TensorSpec("b", (2,), (1,), "int64"))),
           m.OptimizerSpec("SGD", [{"lr": 0.1, "betas": [0.9, 0.999]}])),
    m.Init(), m.Start(), m.Start(has_values=True), m.Attach(1, 2), m.Steps(10), m.Fetch("parameters", 0),
    m.Describe(), m.Lost(1, 2),
    m.Serves(1, 2),
    m.Carried(((1, ((0, 1, 1), (1, 1, 1))),)),
    m.PushTail([{"lr": 0.5}], b"\x03", 4.0),
    m.Align(m.Dial(1, ModeSpec(name="sync"), 4, ((1, ((0, 1, 1),)),))),
    m.SwitchMode(ModeSpec(name="sync", replicas_to_aggregate=1)),
    m.Assign("slots", [m.SlotEntry(0, 0, 6, "exp_avg", "float32", False, 0, 24)]),
    m.Close(b"{}", [b"{}"]),
]  # fmt: skip
ENCODED = [m.encode(message) for message in MESSAGES]


@contextmanager
def ends() -> Iterator[tuple[socket.socket, Stream]]:
    raw, ours = socket.socketpair()
    try:
        yield raw, Stream(ours)
    finally:
        raw.close()
        ours.close()


def frames() -> list[bytes]:
    """A few good ones as they lie on the wire."""
    made = []
    for kind, tail, bulk in ((Kind.BEAT, b"", 0), (Kind.COLD, ENCODED[0], 0), (Kind.PUSH, ENCODED[9], 3)):
        codec = Codec(*KEYS)
        made.append(bytes(codec.pack(kind, 0, 1, 1, 0, tail, 7, 3, bulk)) + tail + b"abc"[:bulk])
    return made


@given(anything(PROBES))
def test_I8_whoever_does_not_know_the_secret_is_refused_by_a_ps(sent: bytes) -> None:
    with ends() as (raw, server):
        raw.sendall(sent[:4000])
        raw.shutdown(socket.SHUT_WR)
        with pytest.raises(ClusterError):
            accept(server, SECRET)


@given(anything(PROBES))
def test_a_worker_refuses_whoever_answers_something_else(sent: bytes) -> None:
    with ends() as (raw, client):
        raw.sendall(sent[:4000])
        raw.shutdown(socket.SHUT_WR)
        with pytest.raises(ClusterError):
            as_client(client, SECRET, "there")


@given(anything([*frames(), *PROBES]))
def test_a_frame_is_the_one_that_was_sent_or_it_is_refused(sent: bytes) -> None:
    good = frames()
    with ends() as (raw, server):
        raw.sendall(sent[:100_000])
        raw.shutdown(socket.SHUT_WR)
        channel = Channel(server, KEYS[::-1])
        try:
            frame = channel.recv()
            into = bytearray(min(frame.bulk_bytes, 100))
            channel.recv_bulk(frame, memoryview(into))
        except ClusterError:
            return
        assert any(sent.startswith(each) for each in good)


@given(anything([*ENCODED, *PROBES]))
@example(b"\x91" * 100_000)  # nested deeper than any stack
@example(b"\x83\xa4type\xa8Position\xa6worker\x00\xaaschedulers\x91" + b"\x81\xa1a" * 100_000)
def test_a_cold_message_is_one_of_ours_or_refused(sent: bytes) -> None:
    try:
        message = m.decode(sent)
    except ProtocolError:
        return
    assert isinstance(message, m.Message)
    assert m.decode(m.encode(message)) == message


@given(st.data())
def test_numbers_of_any_size_in_a_cold_message_do_no_harm(data: st.DataObject) -> None:
    """A message whose leaves were replaced parses or is refused; both ends of a channel agree on it."""
    seed = data.draw(st.sampled_from(MESSAGES))
    leaf = st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.none() | st.binary(max_size=5)
    tree = replaced(msgspec.to_builtins(seed), data, leaf)
    try:
        message = m.decode(msgspec.msgpack.encode(tree))
    except ProtocolError:
        return
    m.encode(message)


def replaced(tree: object, data: st.DataObject, leaf: st.SearchStrategy[object]) -> object:
    if isinstance(tree, dict):
        return {k: v if k == "type" else replaced(v, data, leaf) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [replaced(v, data, leaf) for v in tree]
    return data.draw(leaf) if data.draw(st.integers(0, 5)) == 0 else tree


def test_the_corpus_holds_what_scanners_send() -> None:
    assert {"http-get", "tls13-hello", "nmap-smb-negotiate", "frame-2-to-63-bulk", "torch-tcpstore-huge-key"} <= set(
        CORPUS
    )
    assert channels.SMALL_TAIL_BYTES == 1 << 16


@given(changed([b"".join(frames())]))
def test_frames_one_after_the_other_end_at_the_first_that_was_touched(sent: bytes) -> None:
    whole, position = frames(), 0
    with ends() as (raw, server):
        raw.sendall(sent[:100_000])
        raw.shutdown(socket.SHUT_WR)
        channel = Channel(server, KEYS[::-1])
        with pytest.raises(ClusterError):  # at the latest where the bytes end: only the first was made with counter 0
            while True:
                frame = channel.recv()
                channel.recv_bulk(frame, memoryview(bytearray(frame.bulk_bytes)))
                assert sent[position:].startswith(whole[0])
                position += len(whole[0])
