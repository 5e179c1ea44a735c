"""Connect to one ps beside the training, to copy its state or to restore it.

Used by worker/checkpoints/saver and rewinding. A connection that ends is not made again: the caller begins anew.
"""

from collections.abc import Sequence
from typing import TypeVar

from paceline.errors import ClusterError, Refused
from paceline.transport.base import Buffer
from paceline.transport.channel import connect
from paceline.wire import messages as m
from paceline.worker.requests.identity import Identity
from paceline.worker.requests.rpc import Once, call

R = TypeVar("R")


class CopyGone(ClusterError):
    """The ps holds another copy than the one announced: it was started again, or another copy was asked for."""


class Connection:
    """One ps, on a connection of its own."""

    def __init__(self, me: Identity, index: int) -> None:
        self.index = index
        self._peer = Once(connect(me.ps_addresses[index], me.lane, me.secret), f"ps:{index}")

    def ask(self, request: m.Request, expects: type[R] = m.Done, bulk: Sequence[Buffer] = ()) -> R:  # type: ignore[assignment]
        """Ask, on this connection only."""
        return call(self._peer, request, expects, bulk)[0]

    def described(self) -> m.Described:
        """Ask for this ps's lineage, and for the mode that holds there."""
        return self.ask(m.Describe(), m.Described)

    def copied(self, request: m.Copy, carried: bytes = b"") -> m.Copied:
        return self.ask(request, m.Copied, [carried] if carried else [])

    def fetch(
        self, what: str, limit_bytes: int, copy: m.Copied, worker: int | None = None
    ) -> tuple[m.Fetched, bytearray]:
        request = m.Fetch(what, is_copy=True, worker=worker, number=copy.number)
        try:
            return call(self._peer, request, m.Fetched, limit_bytes=limit_bytes)
        except Refused as refused:
            raise CopyGone(f"ps:{self.index}: {refused}") from refused

    def close(self) -> None:
        self._peer.channel.close()
