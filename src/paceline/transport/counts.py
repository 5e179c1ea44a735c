"""HOW MANY bytes did one connection carry? Read off a channel when telemetry is written, or when it is closed.

Used by worker/link, which adds up the connections that it had to one ps. Must never be asked for on the way of a step:
counting there is an addition in transport/channel, and the rest is done here.
"""

from typing import Protocol

import msgspec


class Counting(Protocol):
    """What transport/channel counts."""

    payload_in: int
    payload_out: int

    def kernel_bytes(self) -> tuple[int, int] | None: ...


class Counts(msgspec.Struct, frozen=True):
    """Payload (tensors) that was sent and received; beside it all bytes, as TCP_INFO has them, where it has."""

    sent: int = 0
    received: int = 0
    tcp_sent: int | None = 0
    tcp_received: int | None = 0

    def __add__(self, other: "Counts") -> "Counts":
        """A number that one of them does not know is not known of both.

        >>> Counts(1, 2, 3, 4) + Counts(1, 2, None, None)
        Counts(sent=2, received=4, tcp_sent=None, tcp_received=None)
        """
        return Counts(
            self.sent + other.sent,
            self.received + other.received,
            None if self.tcp_sent is None or other.tcp_sent is None else self.tcp_sent + other.tcp_sent,
            None if self.tcp_received is None or other.tcp_received is None else self.tcp_received + other.tcp_received,
        )


def counts_of(channel: Counting) -> Counts:
    """As it stands now."""
    return Counts(channel.payload_out, channel.payload_in, *(channel.kernel_bytes() or (None, None)))
