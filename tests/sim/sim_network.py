"""WHEN does a message arrive, if at all? Simulated time, and connections that keep order but promise nothing else.

Used by the other sim files. A connection is two pipes; each can be cut at a point of its own, and the end is seen
after what was still on its way. Everything random comes from the seed; the modules of a ps look at the clock here.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from random import Random
from typing import Any

from paceline.errors import ConnectionLost
from paceline.server import core, service
from paceline.server.core import Peer
from paceline.transport.security import Role
from paceline.wire.frames import Frame, Kind
from paceline.wire.messages import Reply, Request, encode

UPTIME_S = 1e6  # a machine's clock does not begin with the run
CLOCKED: tuple[Any, ...] = (core, service)


class World:
    """The clock, the dice, and what was found wrong."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.faults: list[str] = []
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = count()

    def at(self, time: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._queue, (time, next(self._number), call, args))

    def after(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay, call, *args)

    def delay(self) -> float:
        """Mostly short; now and then long enough for everybody else to get far ahead."""
        return self.random.expovariate(1.0) * (12.0 if self.random.random() < 0.06 else 1.0)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def run(self, max_events: int) -> None:
        for _ in range(max_events):
            if not self._queue or self.faults:
                return
            self.now, _, call, args = heapq.heappop(self._queue)
            call(*args)
        self.faults.append(f"not over after {max_events} events")


class Clock:
    """The `time` that a ps imports."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic(self) -> float:
        return UPTIME_S + self._world.now

    perf_counter = monotonic


@contextmanager
def clock_of(world: World) -> Iterator[None]:
    """Inside, every ps lives in this world's time."""
    real = [module.time for module in CLOCKED]
    for module in CLOCKED:
        module.time = Clock(world)
    try:
        yield
    finally:
        for module, time in zip(CLOCKED, real, strict=True):
            module.time = time


class Pipe:
    """One direction of a connection: in order, with delays, until it ends."""

    def __init__(self, world: World, on_item: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        self._world = world
        self._on_item = on_item
        self._on_end = on_end
        self._pending: deque[Any] = deque()
        self._last = 0.0
        self.is_ended = False

    def put(self, item: Any) -> None:
        self._last = max(self._world.now + self._world.delay(), self._last)
        self._pending.append(item)
        self._world.at(self._last, self._arrive)

    def _arrive(self) -> None:
        if self._pending:
            self._on_item(self._pending.popleft())

    def end(self, keep: int | None = None) -> None:
        """Nothing more is sent; of what is on its way the first `keep` arrive (None: as the dice say)."""
        kept = self._world.random.randint(0, len(self._pending)) if keep is None else keep
        while len(self._pending) > kept:
            self._pending.pop()
        if self.is_ended:
            return
        self.is_ended = True
        self._world.at(max(self._last, self._world.now) + self._world.delay(), self._on_end)


class Outbox:
    """What is put here is sent by the connection's own thread, when it comes to it."""

    def __init__(self, world: World, service: Any, connection: "Connection") -> None:
        self._world = world
        self._service = service
        self._connection = connection

    def put(self, answer: Any) -> None:
        if answer is not None:
            self._world.after(
                self._world.delay(), self._service.send_late, self._service.core, self._connection.peer, answer, False
            )


class Connection:
    """A connection to one ps, with a Channel's face on the side of the ps."""

    lane = "sim"

    def __init__(self, world: World, service: Any, shares_memory: bool, on_frame: Any, on_end: Any) -> None:
        self.shares_memory = shares_memory
        self.bytes_in = self.bytes_out = 0
        self.role = Role.WORKER
        self.stream = self
        self.arenas: list[Any] = []
        self.payload: Any = None
        self.peer = Peer(self, outbox=Outbox(world, service, self))  # type: ignore[arg-type]
        service.core.peers[self.peer.id] = self.peer
        self._world = world
        self._service = service
        self.up = Pipe(world, self._deliver, lambda: service.ended(self))
        self.down = Pipe(world, on_frame, on_end)
        service.connections.append(self)

    def set_send_timeout(self, seconds: float) -> None:
        """Nothing is ever slow to be taken here."""

    # --- the worker's side ------------------------------------------------------------------------------------

    def say_up(self, frame: Frame, payload: Any = None) -> None:
        if self.up.is_ended:
            raise ConnectionLost("sending on a connection that has ended")
        self.up.put((frame, payload))

    def _deliver(self, item: tuple[Frame, Any]) -> None:
        frame, self.payload = item
        self._service.deliver(self, frame)

    def cut(self) -> None:
        """Both directions end, each at its own point."""
        self.up.end()
        self.down.end()

    # --- the side of the ps -----------------------------------------------------------------------------------

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
        bulk: Any = (),
    ) -> None:
        if self._service.core.lock._is_owned():
            self._world.faults.append(f"{self._service.name} sends under its lock")
        if self.down.is_ended:
            raise ConnectionLost("the worker is gone")
        self.down.put(
            Frame(kind, outcome, flags, worker, incarnation, len(tail), push_id, version, bool(bulk), tail=tail)
        )

    def say(self, message: Request | Reply, bulk: Any = ()) -> None:
        self.send(Kind.COLD, tail=encode(message), bulk=bulk)

    def send_arenas(self, arenas: list[Any]) -> None:
        self.arenas = arenas

    def recv_bulk(self, frame: Frame, into: Any) -> None:
        if not isinstance(into, memoryview):  # else values, which a simulated shard does not have
            into.content = self.payload

    def shutdown(self) -> None:
        """The ps ends it; its thread may have a last frame in its hands."""
        self.up.end(keep=self._world.random.randint(0, 1))
        self.down.end()
