"""The faulty stream does what it says, counts it, and leaves the sender's memory alone; what it damages is caught."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from lane_pairs import Running, connected, received

from paceline.errors import ConnectionLost, ProtocolError, WaitTimeout
from paceline.transport.base import Stream
from paceline.transport.channel import Channel
from paceline.transport.faulty import Faulty, Trouble, flipped
from paceline.wire.frames import Kind, Outcome

KEYS = b"1" * 32, b"2" * 32
PS = "ps"


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Counted(dict[str, int]):
    def __call__(self, kind: str, times: int) -> None:
        self[kind] = self.get(kind, 0) + times


@contextmanager
def pair(lane: str = "tcp", **trouble: Any) -> Iterator[tuple[Trouble, Faulty, Stream, Counted]]:
    counted = Counted()
    made = Trouble(counted, **trouble)
    with connected(lane) as (client, server):
        yield made, Faulty(client, made, PS), server, counted


@pytest.mark.parametrize("lane", ["tcp", "shm", "inproc"])
def test_without_trouble_it_is_the_stream_itself(lane: str) -> None:
    with pair(lane) as (_, client, server, counted):
        client.send([b"ab", b"", b"cd"], 4)
        assert received(server, 4) == b"abcd"
        server.send([b"xyz"])
        assert received(client, 3) == b"xyz"
        assert (client.lane, client.shares_memory) == (server.lane, server.shares_memory)
        assert counted == {}


def test_a_delay_and_a_limit_take_as_long_as_they_say() -> None:
    clock = Clock()
    with pair(delay_s=0.05, bytes_per_s=1000.0, clock=clock, sleep=clock.sleep) as (_, client, server, counted):
        client.send([bytes(100)])
        assert clock.now_s == pytest.approx(0.05 + 0.1)
        server.send([bytes(50)])
        received(client, 50)
        assert clock.now_s == pytest.approx(0.05 + 0.1 + 0.05)
        assert counted == {"delay": 1, "limit": 2}


def test_one_line_is_shared_by_all_connections() -> None:
    clock = Clock()
    waits: list[float] = []
    trouble = Trouble(lambda kind, times: None, bytes_per_s=100.0, clock=clock, sleep=waits.append)
    trouble.carried(10)
    trouble.carried(10)
    assert waits == pytest.approx([0.1, 0.2])  # nobody slept yet, so the second stands behind the first


@pytest.mark.parametrize("at", range(6))
def test_one_bit_differs_and_the_sender_keeps_its_memory(at: int) -> None:
    first, second = bytearray(b"abc"), bytearray(b"def")
    changed = b"".join(bytes(b) for b in flipped([first, second], at, 4))
    assert bytes(first + second) == b"abcdef"
    assert [i for i, (a, b) in enumerate(zip(changed, b"abcdef", strict=True)) if a != b] == [at]
    assert changed[at] ^ b"abcdef"[at] == 4


def test_flips_come_as_often_as_the_chance_says() -> None:
    counted = Counted()
    trouble = Trouble(counted, flip_chance=1e-3, seed="7")
    message = bytes(1000)  # damaged with a chance of 1 - 0.999**1000
    damaged = sum(b"".join(trouble.before_send([message])) != message for _ in range(1000))
    assert damaged == counted["flip"]
    assert 560 < damaged < 700
    again = Trouble(Counted(), flip_chance=1e-3, seed="7")
    assert damaged == sum(b"".join(again.before_send([message])) != message for _ in range(1000)), "seeded"


def channels(client: Stream, server: Stream) -> tuple[Channel, Channel]:
    return Channel(client, KEYS), Channel(server, (KEYS[1], KEYS[0]))


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit_anywhere_in_a_push_is_caught(seed: int) -> None:
    bulk = bytes(range(256)) * 16
    with pair(seed=str(seed)) as (trouble, client, server, counted):
        ours, theirs = channels(client, server)
        trouble.flip_next()
        ours.send(Kind.PUSH, push_id=1, version=0, bulk=[bulk])
        client.close()
        into = bytearray(len(bulk))

        def receive() -> None:
            frame = theirs.recv()
            theirs.recv_bulk(frame, memoryview(into))

        with pytest.raises((ProtocolError, ConnectionLost)):
            Running(receive).result()
        assert counted == {"flip": 1}


def answers(server: Channel, push_ids: list[int]) -> None:
    for push_id in push_ids:
        server.send(Kind.ANSWER, push_id=push_id, outcome=Outcome.APPLIED)


def test_the_first_answer_to_each_push_is_swallowed_and_ends_the_connection() -> None:
    counted = Counted()
    trouble = Trouble(counted, swallow_acks=2)
    lost = []
    for push_id in (1, 1, 2, 2, 3):
        with connected("tcp") as (client, server):
            ours, theirs = channels(Faulty(client, trouble, PS), server)
            answers(theirs, [push_id])
            try:
                assert ours.recv().push_id == push_id
                lost.append(False)
            except ConnectionLost:
                lost.append(True)
    assert lost == [True, False, True, False, False]
    assert counted == {"swallow-acks": 2}


def test_other_frames_pass() -> None:
    trouble = Trouble(Counted(), swallow_acks=5)
    with connected("tcp") as (client, server):
        ours, theirs = channels(Faulty(client, trouble, PS), server)
        theirs.send(Kind.COLD, push_id=9, tail=b"x")
        assert ours.recv().kind == Kind.COLD
        answers(theirs, [0])  # before the first push
        assert ours.recv().kind == Kind.ANSWER


def test_a_cut_holds_everything_back_and_loses_nothing() -> None:
    clock = Clock()
    with pair(clock=clock, sleep=clock.sleep) as (trouble, client, server, _):
        server.send([b"early"])
        trouble.cut(2.0)
        with pytest.raises(WaitTimeout):
            client.recv_into(memoryview(bytearray(5)))
        with pytest.raises(ConnectionLost, match="cut off"):
            trouble.around(_never)("a:1", "tcp", b"")
        client.send([b"late"])  # stands still until the cut is over
        assert clock.now_s >= 2.0
        assert received(server, 4) == b"late"
        assert received(client, 5) == b"early"


def _never(*args: object, **options: object) -> Channel:
    raise AssertionError("it must not be asked for a connection")


@pytest.mark.parametrize(
    ("trouble", "lane"), [({"bytes_per_s": 1e9}, "tcp"), ({"swallow_acks": 1}, "tcp"), ({}, "auto")]
)
def test_what_needs_bytes_that_travel_goes_by_tcp(trouble: dict[str, Any], lane: str) -> None:
    asked: list[str] = []

    def connect(address: str, lane: str, *args: object, **options: object) -> Channel:
        asked.append(lane)
        return channels(client, server)[0]

    with connected("tcp") as (client, server):
        made: Callable[..., Channel] = Trouble(Counted(), **trouble).around(connect)
        channel = made("a:1", "auto", b"")
        assert isinstance(channel.stream, Faulty)
        made("a:1", "shm", b"")
    assert asked == [lane, "shm"], "a lane that was asked for is kept"


def test_heartbeats_and_training_may_send_at_once() -> None:
    counted = Counted()
    lock = threading.Lock()

    def count(kind: str, times: int) -> None:
        with lock:
            counted(kind, times)

    trouble = Trouble(count, flip_chance=1.0, seed="1")
    threads = [
        threading.Thread(target=lambda: [trouble.before_send([b"x" * 64]) for _ in range(200)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counted == {"flip": 800}
