"""WHAT would a ps do? The real Service, Desk, Core, ShardState, Rounds, Membership and Budget, without threads.

Only three things are replaced: frames come from the simulated network, a connection's own thread is a delay, and the
shard holds no numbers: a slot remembers whose gradient lies in it, and an update writes down what it read there.
"""

from contextlib import suppress
from typing import Any

from sim_network import Connection, World

from paceline.errors import ConnectionLost, ProtocolError
from paceline.modes.base import Mode
from paceline.params.layout import Layout
from paceline.server.core import Peer, PsConfig
from paceline.server.service import Service
from paceline.server.state import Answer, ShardState
from paceline.wire.frames import Frame, Kind
from paceline.wire.messages import Join, OptimizerSpec

LAYOUT = Layout(())
OPTIMIZER = OptimizerSpec("SGD", [])
RUN = "simulated"

Gradient = tuple[int, int, int, int]  # worker, incarnation, push id, base version


class Bell:
    """wire/segments.Bell: a frame comes only to a worker that said it sleeps. (Here all that look at it do.)"""

    def __init__(self) -> None:
        self.sleeps_for = 0

    def ring(self, push_id: int, version: int, outcome: int, flags: int) -> bool:
        return self.sleeps_for == push_id


class Memory:
    """A slot's memory: whose gradient, or parameters that were copied over it."""

    nbytes = size_bytes = 0

    def __init__(self) -> None:
        self.content: Any = None
        self.memory = self
        self.bell = Bell()
        self.is_open = True

    def __setitem__(self, where: slice, value: Any) -> None:
        self.content = "parameters"

    def close(self) -> None:
        self.is_open = False


class Slot:
    def __init__(self) -> None:
        self.arena = self.memory = Memory()
        self.bell = self.arena.bell
        self.mask = b""
        self.options: list[Any] = []


class Ledger:
    """A shard without numbers: `updates` holds the gradients of each update, as they lay in the slots."""

    layout = LAYOUT
    size_bytes = 0

    def __init__(self, world: World, index: int) -> None:
        self._world = world
        self._index = index
        self.arena = self.memory = Memory()
        self.updates: list[tuple[Any, ...]] = []
        self.made: list[Slot] = []

    def new_slot(self) -> Slot:
        self.made.append(Slot())
        return self.made[-1]

    def slots(self) -> tuple[list[Any], list[Any]]:
        return [], []

    def apply(self, slots: list[Slot]) -> None:
        if not all(s.memory.is_open for s in slots):
            self._world.faults.append(f"ps:{self._index} read a slot that was freed")
        self.updates.append(tuple(s.memory.content for s in slots))


class SimService(Service):
    """One ps. `deliver` is what its connection threads do with a frame."""

    def __init__(self, world: World, index: int, num_ps: int, num_workers: int, mode: Mode, state: type) -> None:
        config = PsConfig(index, num_ps, num_workers, RUN, mode, "bytes", 5.0)
        super().__init__(config, b"", lambda task, report: None)
        self.world = world
        self.ledger = Ledger(world, index)
        self.core.shard = self.ledger  # type: ignore[assignment]
        self.core.is_initialised = True
        if state is not ShardState:
            self.core.state = state(mode, self.core.members, index == 0)

    @property
    def name(self) -> str:
        return f"ps:{self.core.config.index}"

    def deliver(self, connection: Connection, frame: Frame) -> None:
        peer = connection.peer
        try:
            self._handle(peer, frame)
        except ProtocolError as error:
            self.world.faults.append(f"{self.name} refused a frame of {peer.key}: {error}")
        except ConnectionLost as error:
            if not connection.down.is_ended:
                self.world.faults.append(f"{self.name} drops {peer.key} because of another's connection: {error}")
            connection.shutdown()
        except (KeyError, AssertionError) as error:
            self.world.faults.append(f"{self.name} broke over a frame of {peer.key}: {error!r}")

    def _handle(self, peer: Peer, frame: Frame) -> None:
        if frame.kind == Kind.PUSH:
            self._push(peer, frame)
        elif frame.kind == Kind.STAGE:
            self._stage(peer, frame)
        elif frame.kind == Kind.PULL:
            self._pull(peer, frame)
        else:
            self._cold(peer, frame)

    def ended(self, connection: Connection) -> None:
        try:
            self._ended(connection.peer)
        except (ConnectionLost, KeyError) as error:
            self.world.faults.append(f"{self.name} broke at the end of {connection.peer.key}: {error!r}")

    def _send(self, peer: Peer, answer: Answer, is_pull: bool) -> None:
        """Answers leave without the lock, so anything may happen between the decision and the sending."""
        if self.world.chance(0.5):
            self.world.after(self.world.delay(), self.send_late, peer, answer, is_pull)
        else:
            super()._send(peer, answer, is_pull)

    def send_late(self, peer: Peer, answer: Answer, is_pull: bool) -> None:
        with suppress(ConnectionLost):
            super()._send(peer, answer, is_pull)

    def _await_round(self, peer: Peer) -> None:
        """The connection's thread waits; here the answer finds its own way."""


def join_of(worker: int, incarnation: int, mode: str, num_ps: int) -> Join:
    return Join("worker", worker, incarnation, RUN, worker == 0, mode, "bytes", num_ps, LAYOUT, OPTIMIZER)
