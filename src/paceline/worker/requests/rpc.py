"""Ask a ps: one request and one reply, on this connection or on the next one.

Every cold request goes through `call`: those of the thread that trains (worker/requests/link, client and joining), of
the heartbeat's connection, the saver, readers (worker/kv) and operators (worker/control). They differ in what they do
when a connection is lost and while a reply is held back, which is the `Peer`'s and the caller's. No request is harmed
by being asked twice.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from paceline.errors import ClusterError, ConnectionLost, ProtocolError, Refused, WaitTimeout
from paceline.transport.base import Buffer
from paceline.transport.channel import ASK_S, Channel
from paceline.wire.messages import Failed, Request, decode

R = TypeVar("R")


class Peer(Protocol):
    """One ps, as its asker reaches it."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def channel(self) -> Channel:
        """The connection that holds now; raises ConnectionLost if there is none."""
        ...

    def reconnect(self, error: ClusterError) -> None:
        """Make another connection, because of this error; raise if the request must not be asked again."""
        ...


class Once:
    """A ps on a connection that is not made again."""

    def __init__(self, channel: Channel, name: str) -> None:
        self.channel = channel
        self.name = name

    def reconnect(self, error: ClusterError) -> None:
        """Raise what ended the connection."""
        raise error


def call(
    peer: Peer,
    request: Request,
    expects: type[R] | tuple[type[R], ...],
    bulk: Sequence[Buffer] = (),
    limit_bytes: int = 0,
    limit_s: float = ASK_S,
    on_wait: Callable[[], None] | None = None,
) -> tuple[R, bytearray]:
    """Return the reply, which must be of the type `expects`, and at most `limit_bytes` of bulk with it.

    A refusal raises Refused. A reply is waited for `limit_s`; or, with `on_wait`, until that raises: it is called
    whenever nothing has come for a while, because the ps may hold the reply back.
    """
    channel: Channel | None = None
    while True:
        is_late = False
        try:
            if channel is None:
                channel, deadline = peer.channel, time.monotonic() + limit_s
                channel.say(request, bulk)
            frame = channel.recv_cold()
            reply = decode(frame.tail)
            block = bytearray(frame.bulk_bytes if frame.bulk_bytes <= limit_bytes else 0)  # else refused below
            if block:
                channel.recv_bulk(frame, memoryview(block))
            break
        except WaitTimeout as error:
            is_late = on_wait is None and time.monotonic() >= deadline
            lost: ClusterError = error
        except (ConnectionLost, ProtocolError) as error:
            channel, lost = None, error
        if is_late:
            channel, lost = None, WaitTimeout(f"no answer to {type(request).__name__} within {limit_s:.0f} s")
        if channel is None:
            peer.reconnect(lost)
        elif on_wait is not None:
            on_wait()
    if isinstance(reply, Failed):
        raise Refused(reply.reason)
    if not isinstance(reply, expects):
        raise ProtocolError(f"{peer.name} answered {type(request).__name__} with {type(reply).__name__}")
    if frame.bulk_bytes > limit_bytes:
        raise ProtocolError(f"{peer.name} sent {frame.bulk_bytes} bytes, at most {limit_bytes} were expected")
    return reply, block
