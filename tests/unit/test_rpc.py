"""One request and one reply: what is asked again, what is raised, and that no late reply is taken for another's."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from paceline.errors import ClusterError, ConnectionLost, ProtocolError, Refused, WaitTimeout
from paceline.wire import messages as m
from paceline.wire.frames import Frame, Kind
from paceline.worker.requests.heartbeat import Heartbeat
from paceline.worker.requests.rpc import Once, call


class Replies:
    """A channel whose `replies` come one after the other; a late one comes after as many WaitTimeout."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.asked: list[Any] = []
        self.received = 0
        self.is_closed = False

    def say(self, request: Any, bulk: Any = ()) -> None:
        if self.is_closed:
            raise ConnectionLost("closed")
        self.asked.append(request)

    def recv_cold(self) -> Frame:
        if not self.replies:
            raise WaitTimeout("nothing yet")
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        message, size = reply if isinstance(reply, tuple) else (reply, 0)
        return Frame(Kind.COLD, 0, 0, 0, 0, 0, 0, 0, size, 0, m.encode(message))

    def recv_bulk(self, frame: Frame, into: memoryview) -> None:
        if frame.bulk_bytes != into.nbytes:
            raise ProtocolError(f"{frame.bulk_bytes} bytes came where {into.nbytes} belong")
        self.received += into.nbytes

    def close(self) -> None:
        self.is_closed = True


class Again:
    """A ps that is connected to again, over these channels."""

    name = "ps:1"

    def __init__(self, *channels: Replies) -> None:
        self.left = list(channels)
        self.errors: list[ClusterError] = []

    @property
    def channel(self) -> Any:
        return self.left[0]

    def reconnect(self, error: ClusterError) -> None:
        self.errors.append(error)
        self.left.pop(0)
        if not self.left:
            raise error


STATUS = m.Status([0], [], 0)


@pytest.mark.parametrize("error", [ConnectionLost("gone"), ProtocolError("damaged")])
def test_a_request_is_asked_again_on_the_next_connection(error: Exception) -> None:
    first, second = Replies(error), Replies(STATUS)
    peer = Again(first, second)
    assert call(peer, m.AskStatus(), m.Status)[0] == STATUS
    assert first.asked == second.asked == [m.AskStatus()] and peer.errors == [error]


def test_a_reply_of_another_type_and_a_refusal_are_raised() -> None:
    with pytest.raises(ProtocolError, match="ps:0 answered AskStatus with Done"):
        call(Once(Replies(m.Done()), "ps:0"), m.AskStatus(), m.Status)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="no"):
        call(Once(Replies(m.Failed("no")), "ps:0"), m.AskStatus(), m.Status)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit_bytes", [0, 8])
def test_more_bulk_than_was_asked_for_is_refused_at_once(limit_bytes: int) -> None:
    channel = Replies((m.Fetched(3), 16))
    peer = Again(channel, Replies((m.Fetched(3), 16)))
    with pytest.raises(ProtocolError, match=f"ps:1 sent 16 bytes, at most {limit_bytes} were expected"):
        call(peer, m.Fetch("parameters"), m.Fetched, limit_bytes=limit_bytes)
    assert not peer.errors and not channel.received


def test_a_reply_that_is_late_ends_the_connection() -> None:
    first, second = Replies(), Replies(STATUS)
    peer = Again(first, second)
    assert call(peer, m.AskStatus(), m.Status, limit_s=0.0)[0] == STATUS
    assert isinstance(peer.errors[0], WaitTimeout) and "AskStatus" in str(peer.errors[0])


def test_a_reply_that_is_held_back_is_waited_for_on_the_same_connection() -> None:
    waits = []
    channel = Replies(WaitTimeout("nothing yet"), WaitTimeout("nothing yet"), STATUS)
    call(Again(channel), m.AskStatus(), m.Status, limit_s=0.0, on_wait=lambda: waits.append(1))
    assert len(waits) == 2 and len(channel.asked) == 1


def heartbeat_over(*channels: Replies) -> tuple[Heartbeat, Callable[[], Any]]:
    left = list(channels)
    heartbeat = Heartbeat(lambda: left.pop(0), 0, 0.05, bytes)  # type: ignore[arg-type,return-value]
    return heartbeat, lambda: heartbeat.ask(m.AskStatus(), m.Status, 0.0)


def test_a_late_status_is_never_taken_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heartbeat, "_beat", lambda self: None)
    slow, next_one = Replies(m.Done()), Replies(m.Done(), m.Status([], [], 0, live=[0, 1]))
    heartbeat, ask = heartbeat_over(slow, next_one)
    heartbeat.attach(1)
    with pytest.raises(WaitTimeout):
        ask()
    assert slow.is_closed
    slow.replies.append(STATUS)  # too late
    assert heartbeat.ask(m.AskStatus(), m.Status, 5.0).live == [0, 1]
    heartbeat.close()


def test_a_question_beside_the_training_takes_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heartbeat, "_beat", lambda self: None)
    channel = Replies(m.Done(), ConnectionLost("gone"))
    heartbeat = Heartbeat(lambda: channel, 0, 60.0, bytes)  # type: ignore[arg-type,return-value]
    heartbeat.attach(1)
    began_s = time.monotonic()
    with pytest.raises(WaitTimeout, match="gone"):
        heartbeat.ask(m.AskStatus(), m.Status, 0.1)
    assert time.monotonic() - began_s < 5.0, "it waited for the time of the next beat"
    heartbeat.close()


def test_a_heartbeat_that_attaches_while_its_worker_ends_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heartbeat, "_beat", lambda self: None)
    first, late = Replies(m.Done()), Replies(m.Done())

    def connect() -> Any:
        if first.asked:
            heartbeat.close()  # of the thread that trains
            return late
        return first

    heartbeat = Heartbeat(connect, 0, 0.05, bytes)
    heartbeat.attach(1)
    with pytest.raises(ConnectionLost):
        heartbeat.attach(1)
    assert first.is_closed and late.is_closed
