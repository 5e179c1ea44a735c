"""Connect to every ps, join and start; after a lost connection, rejoin.

Used by worker/requests/client. No framework; it moves no gradients. When a connection ends:

1. connect again, now and then, until the deadline, and join as the same incarnation: the push that was not answered
   is sent again by the client, with the same id, and counts once;
2. at ps:0 also ask for the mode that holds, which may have changed meanwhile;
3. if this incarnation was evicted (fenced), come back to every ps as a newer one: what was not answered is void.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from paceline.errors import AuthenticationError, ClusterError, ConnectionLost, ProtocolError, Refused, WaitTimeout
from paceline.transport.channel import Channel
from paceline.wire import messages as m
from paceline.worker.requests.deadline import Deadline
from paceline.worker.requests.heartbeat import Heartbeat
from paceline.worker.requests.identity import Identity
from paceline.worker.requests.link import FencedOff, Link
from paceline.worker.requests.rpc import Once, call

T = TypeVar("T")
RETRY_S = 0.1
SLOWEST_RETRY_S = 1.0
PS_0 = "/job:ps/replica:0/task:0"
TRANSIENT = (ConnectionLost, AuthenticationError, ProtocolError, WaitTimeout)  # of a ps that was joined before


class Recovery(Protocol):
    """What a worker does for a ps that came back without its memory (worker/checkpoints/rewinding)."""

    def on_empty(self, link: Link, joined: m.Joined) -> None:
        """Bring it values if it is this worker's turn; always raise, so that the caller joins again."""
        ...

    def offer(self, link: Link) -> int:
        """Return the version of the values that this worker could bring; -1: none."""
        ...


class NoRecovery:
    """A worker that has nothing to bring."""

    def on_empty(self, link: Link, joined: m.Joined) -> None:
        raise Refused(f"ps:{link.index} was started again and has lost its memory: there is nothing to go on with")

    def offer(self, link: Link) -> int:
        return -1


class Joining:
    """Joins the ps for one worker. `links` grows while it joins for the first time, `incarnation` after an eviction."""

    def __init__(
        self,
        me: Identity,
        connect: Callable[[str, str, bytes], Channel],
        join: Callable[[int], m.Join],
        say: Callable[[str], None],
        beat: Callable[[], bytes],
        recovery: Recovery,
    ) -> None:
        self.incarnation = me.incarnation
        self.links: list[Link] = []
        self.is_started = False
        self._is_late = False  # a run is on, which this worker is about to enter
        self._recovery = recovery
        self.heartbeat = Heartbeat(lambda: self._connect_to(0), me.worker, me.lease_s, beat)
        self._me = me
        self._connect = connect
        self._join = join
        self._say = say

    # --- the first time ---------------------------------------------------------------------------------------

    def connect(self, index: int) -> Channel:
        """Connect to this ps, in any start order."""
        return self._persist(lambda: self._connect_to(index), index, "did not answer", (ConnectionLost,))

    def enter(self, link: Link) -> m.Joined:
        """Join for the first time, on the connection that the link has."""
        self.links.append(link)
        try:
            return link.join(self._join(self.incarnation))
        except FencedOff as fenced:
            self._come_back(fenced.incarnation)
        except ConnectionLost as error:
            self.again(link, error)
        assert link.joined is not None
        return link.joined

    def wait_for_values(self, empty: Sequence[Link]) -> None:
        """Rejoin these ps, which have no values though others train, until one worker has brought some."""
        self._is_late = True
        for link in empty:
            if link.joined is not None and not link.joined.is_initialised:
                self.again(link, ConnectionLost(f"ps:{link.index} has lost its memory"))

    def start(self, has_values: bool = False) -> m.Started:
        """Wait until all workers have joined (`has_values`: and have the first values)."""
        link = self.links[0]
        waiting: Deadline | None = None

        def wait() -> None:
            nonlocal waiting
            status = self.heartbeat.status()
            missing = [self._me.worker_devices[w] for w in status.missing] if status is not None else []
            waiting = waiting or Deadline(self._me.wait_s, missing or [PS_0], self._say, style=self._me.log_style)
            waiting.names = missing or [PS_0]
            waiting.again(f"{', '.join(waiting.names)} did not join")

        started, _ = call(Once(link.channel, link.name), m.Start(has_values), m.Started, on_wait=wait)
        self.is_started = True
        return started

    # --- again ------------------------------------------------------------------------------------------------

    def again(self, link: Link, error: ClusterError, limit_s: float | None = None) -> m.Started | None:
        """Connect to this ps again and rejoin. Return what ps:0 says of the run, if it was asked: the lost connection
        was its own, or this worker came back as a newer incarnation."""
        try:
            return self._in_at_last(link, error, limit_s, SLOWEST_RETRY_S)
        except FencedOff as fenced:
            return self._come_back(fenced.incarnation)

    def _join_again(self, link: Link) -> m.Started | None:
        join = msgspec.structs.replace(
            self._join(self.incarnation),
            offer=self._recovery.offer(link),
            trained_in=link.lineage if self.is_started else -1,
        )
        was_at, channel = link.channel.address, self._connect_to(link.index)
        if channel.address != was_at:
            self._say(f"paceline: ps:{link.index} has moved from {was_at} to {channel.address}")
        joined = link.rejoin(channel, join)  # 1
        if (self.is_started or self._is_late) and not joined.is_initialised:
            self._recovery.on_empty(link, joined)
        if link.index or not self.is_started:
            return None
        self.heartbeat.attach(self.incarnation)
        return self.start()  # 2

    def _come_back(self, known: int) -> m.Started | None:
        """Rejoin all ps as a newer incarnation (3), ps:0 last: from its answer on the rounds count on this worker."""
        while True:
            self.incarnation = known + 1
            self._say(f"paceline: worker:{self._me.worker} was given up, and comes back")
            try:
                started = None
                for link in sorted(self.links, key=lambda each: -each.index):
                    started = self._in_at_last(link)
                return started
            except FencedOff as fenced:
                known = fenced.incarnation

    def _in_at_last(
        self, link: Link, error: ClusterError | None = None, limit_s: float | None = None, slowest_s: float = RETRY_S
    ) -> m.Started | None:
        join = partial(self._join_again, link)
        return self._persist(join, link.index, "went away", TRANSIENT, error, limit_s, slowest_s)

    def _persist(
        self, attempt: Callable[[], T], index: int, what: str, heeded: tuple[type[ClusterError], ...],
        error: ClusterError | None = None, limit_s: float | None = None, slowest_s: float = RETRY_S,
    ) -> T:  # fmt: skip
        """Try, until the deadline, as long as this ps fails in these ways; with an `error` it has failed before."""
        waiting = Deadline(
            self._me.wait_s if limit_s is None else limit_s, [device(index)], self._say, style=self._me.log_style
        )
        pause_s = 0.0
        while True:
            if error is not None:
                waiting.again(f"{device(index)} at {self._me.ps_addresses[index]} {what} ({error})", error=error)
                time.sleep(pause_s)  # nothing tells when a ps can be connected to
                pause_s = min(slowest_s, 2 * pause_s or RETRY_S)
            try:
                return attempt()
            except heeded as lost:
                error = lost

    def _connect_to(self, index: int) -> Channel:
        """Connect by the lane that this ps had, unless it has moved: it may be on this host now, or not any more."""
        address = self._me.ps_addresses[index]
        had = (link.channel.lane for link in self.links if link.index == index and link.channel.address == address)
        channel = self._connect(address, next(had, self._me.lane), self._me.secret)
        channel.stream.name = f"ps:{index} at {address} (its log says why)"
        return channel

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.heartbeat.close()


def device(index: int) -> str:
    """
    >>> device(1)
    '/job:ps/replica:0/task:1'
    """
    return f"/job:ps/replica:0/task:{index}"
