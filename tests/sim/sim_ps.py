"""A simulated ps: the real Service, Requests, Core and control plane, whole, without threads.

Only four things are replaced: frames come from the simulated network, a connection's own thread is a delay, a timer is
an event, and the shard holds no numbers: a slot remembers whose gradient lies in it, its sum which were added up, and
an update writes down what it read there. What is sent after an event may leave late.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from lives import Pieces
from sim_network import UPTIME_S, Connection, World
from sim_watch import Moment, Watch, WatchedMembership

from paceline.errors import ConnectionLost, ProtocolError
from paceline.modes import make as make_mode
from paceline.params.layout import Layout
from paceline.server.control.actions import Action, Answer, Apply
from paceline.server.control.config import PsConfig
from paceline.server.control.control import Control, make
from paceline.server.copies import Copies
from paceline.server.core import Core, Peer, Reply, Sends
from paceline.server.journal import Durable, SlotMeta
from paceline.server.service import Service
from paceline.wire.decisions import Key
from paceline.wire.frames import Frame, Kind
from paceline.wire.messages import Join, OptimizerSpec

if TYPE_CHECKING:
    from sim_plan import Plan

LAYOUT = Layout(())
OPTIMIZER = OptimizerSpec("SGD", [])
RUN = "simulated"
LEASE_S = 5.0
COUNTED = "a gradient that was added up"


class Memory:
    """A slot's memory: whose gradient, or parameters that were copied over it."""

    nbytes = size_bytes = 0

    def __init__(self) -> None:
        self.content: Any = None
        self.memory = self
        self.bell = [0, 0, 0, 0]  # here all that look at it sleep
        self.is_open = True

    def __setitem__(self, where: slice, value: Any) -> None:
        self.content = "parameters"

    def close(self) -> None:
        self.is_open = False


class Slot:
    """server/numbers/gradients.Slot: the gradient that came last, and the sum of those that were counted before it."""

    def __init__(self) -> None:
        self.arena = self.memory = self.parameters = Memory()
        self.bell = self.arena.bell
        self.mask = b""
        self.weight = 0.0
        self.options: list[Any] = []
        self.sum: list[Any] | None = None

    def free(self) -> None:
        self.arena.close()

    def add_up(self, is_first: bool) -> None:
        assert is_first == (self.sum is None), (
            f"a sum of {self.sum} is taken for {'a new' if is_first else 'an old'} one"
        )
        self.sum = [*(self.sum or ()), self.memory.content]
        self.memory.content = COUNTED

    def taken(self, has_sum: bool, has_slot: bool) -> list[Any]:
        """What an update reads here."""
        gradients: list[Any] = []
        if has_sum:
            assert self.sum is not None, "a sum that is not there"
            gradients, self.sum = self.sum, None
        return [*gradients, self.memory.content] if has_slot else gradients


class Ledger:
    """A shard without numbers: `updates` holds the gradients of each update, as they lay in the slots."""

    layout = LAYOUT
    size_bytes = 0
    optimizer_name, options = OPTIMIZER.name, OPTIMIZER.groups

    def __init__(self, service: "SimService") -> None:
        self._service = service
        self.arena = self.memory = Memory()
        self.updates: list[tuple[Any, ...]] = []
        self.epochs: list[int] = []  # how often the mode had changed at each update
        self.made: list[Slot] = []

    def new_slot(self, name: str) -> Slot:
        self.made.append(Slot())
        return self.made[-1]

    def slots(self) -> tuple[list[Any], list[Any]]:
        return [], []

    def refusal_of(self, options: Any) -> str:
        return ""

    def add_up(self, slot: Slot, is_first: bool, job: int, is_again: bool) -> None:
        slot.add_up(is_first)

    def apply(
        self, parts: list[tuple[Slot, bool, bool]], divisor: int, is_waited_for: bool, job: int, is_again: bool
    ) -> None:
        if not all(slot.memory.is_open for slot, _, _ in parts):
            self._service.fault("read a slot that was freed")
        gradients = tuple(g for slot, has_sum, has_slot in parts for g in slot.taken(has_sum, has_slot))
        moment = self._service.moments.pop(0)
        self._service.watch.updates(moment, gradients, divisor, len(self.updates))
        self.updates.append(gradients)
        self.epochs.append(moment.turn)

    def fill(self, values: memoryview) -> None:
        """Which updates are in the values, their version says."""

    assign = fill

    def set_version(self, version: int) -> None:
        """Go back."""
        del self.updates[version:], self.epochs[version:]

    def prepare_next(self) -> None:
        """Copy nothing: there are no numbers to put back."""


class SimCopies(Copies):
    """A copy is made right after the update that it is of."""

    def __init__(self, service: "SimService") -> None:
        super().__init__()
        self._service = service

    def take(self, shard: Any, number: int, version: int, carried: bytes, has_averages: bool) -> None:
        service, applied = self._service, self._service.core.control.saving.copy.applied  # type: ignore[union-attr]
        updates = service.ledger.updates
        if version != len(updates):
            service.fault(f"copied version {version} after {len(updates)} updates")
        late = [g for update in updates for g in update if isinstance(g, tuple) and g[1:3] > applied.get(g[0], (0, 0))]
        if late:
            service.fault(f"says of a copy that {applied} are in it, and {late} are, too")
        super().take(shard, number, version, carried, has_averages)


class SimDurable(Durable):
    """Slots have no numbers here, and outlive a ps as they are."""

    def _slot(self, key: Key, slot: Any) -> SlotMeta:
        return SlotMeta(key, b"", 0.0, msgspec.Raw(msgspec.msgpack.encode(slot.options)), None)


class SimService(Service):
    """One ps. `deliver` is what its connection threads do with a frame."""

    def __init__(self, world: World, index: int, plan: "Plan") -> None:
        mode = make_mode(plan.spec, plan.num_workers)
        config = PsConfig(
            index, plan.num_ps, plan.num_workers, RUN, mode, "bytes", LEASE_S, plan.expected, plan.min_workers,
            save_every=str(plan.saves or "none"),
        )  # fmt: skip
        super().__init__(config, b"", lambda task, report: None)
        self.world = world
        self.connections: list[Connection] = []
        self.moments: list[Moment] = []  # when each update that is to be made was decided
        self._seen: set[int] = set()  # actions of this event that the watch has seen
        self._plan = plan
        self._pieces: dict[str, Any] = {}
        self.watch = Watch(self, may_lose_votes=plan.not_finite > 0)
        self.ledger = Ledger(self)
        self._live()
        self.core.control.is_initialised = True

    def _live(self) -> None:
        """One process: a core with the simulated parts."""
        plan, config = self._plan, self.core.config
        self.core = core = Core(config, Pieces(self._pieces) if plan.rebirths else None)
        members = WatchedMembership(plan.num_workers, plan.expected)
        state = plan.state(config.mode, members, config.index == 0, plan.min_workers)
        core.control = control = make(config, 7, UPTIME_S + self.world.now, members, state)
        members.watch = self.watch
        core.shard = self.ledger  # type: ignore[assignment]
        core.copies = SimCopies(self)
        core.perform = self._perform  # type: ignore[method-assign]
        core.wake_after = self._wake_after
        control.do = self._decides  # type: ignore[method-assign]
        self.requests.core = core
        if core.durable is not None:
            core.durable = SimDurable(core)

    def be_reborn(self) -> None:
        """Between two events this process is killed; the next one knows what it had written down, and has its slots."""
        before = self.core
        self._live()
        core = self.core
        core.slots = before.slots
        state = core.control.state
        for name in ("discarded", "not_finite", "staleness", "waited_s"):  # written down now and then
            setattr(state, name, getattr(before.control.state, name))
        if not core.recover():
            core.control.is_initialised = True  # nobody had come yet
        core.control.mode_changes = before.control.mode_changes
        self.watch.open.clear()
        self.world.after(LEASE_S + 1.0, self.happens, "while it gave up who did not come back", self._expire)

    def lose_memory(self) -> None:
        """Its host is lost: the next process has neither memory nor values, and a worker brings some."""
        for slot in self.core.slots.values():
            slot.free()
        self._pieces.clear()
        self._live()
        self.watch.forget()
        for number in range(1, 30):  # whoever was in is waited for, for a while
            self.world.after(2.0 * number, self.happens, "while it waited for those who were in", self._expire)

    @property
    def name(self) -> str:
        return f"ps:{self.core.config.index}"

    def fault(self, text: str) -> None:
        self.world.faults.append(f"{self.name} {text}")

    # --- what threads do --------------------------------------------------------------------------------------

    def deliver(self, connection: Connection, frame: Frame) -> None:
        peer = connection.peer
        try:
            self._handle(peer, frame)
        except ConnectionLost as error:
            if not connection.down.is_ended:
                self.fault(f"drops {peer.key} because of another's connection: {error}")
            connection.shutdown()
        except (ProtocolError, KeyError, AssertionError) as error:
            self.fault(f"broke over a frame of {peer.key}: {error!r}")
        self.watch.looks()

    def _handle(self, peer: Peer, frame: Frame) -> None:
        if frame.kind == Kind.PUSH:
            self.watch.pushed(peer, frame)
            self._push(peer, frame)
        elif frame.kind == Kind.STAGE:
            self._stage(peer, frame)
        elif frame.kind == Kind.PULL:
            self._pull(peer, frame)
        else:
            self._cold(peer, frame)

    def ended(self, connection: Connection) -> None:
        self.happens(f"at the end of {connection.peer.key}", lambda: self._ended(connection.peer))

    def happens(self, when: str, event: Callable[[], object]) -> None:
        """Something that no frame brought; it may not break anything."""
        try:
            event()
        except (ConnectionLost, KeyError, AssertionError) as error:
            self.fault(f"broke {when}: {error!r}")
        self.watch.looks()

    def _wake_after(self, after_s: float) -> None:
        late_s = 0.1 * self.world.random.random()  # as timers are
        self.world.after(after_s + late_s, self.happens, "when it was woken", self._woken)

    # --- what they say ----------------------------------------------------------------------------------------

    def _decides(self, actions: list[Action], now_s: float) -> None:
        """The state of the shard has decided this, and the event goes on."""
        self._sees(actions)
        Control.do(self.core.control, actions, now_s)

    def _sees(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if type(action) is Answer:
                self.watch.answers(action)
            elif type(action) is Apply and id(action) not in self._seen:
                self._seen.add(id(action))
                self.moments.append(self.watch.moment())

    def _perform(self, actions: Sequence[Action], block: bytearray | None = None) -> Sends:
        self._sees(actions)
        made = len(self.ledger.updates)
        sends = Core.perform(self.core, actions, block)
        for action in actions:
            if type(action) is Apply:
                self.watch.writes_down(action.parts, self.ledger.updates[made])
                made += 1
        self._seen.clear()
        return sends

    def _send(self, peer: Peer, answer: Answer, is_pull: bool) -> None:
        """Answers leave without the lock, so anything may happen between the decision and the sending."""
        if self.world.chance(0.5):
            self.world.after(self.world.delay(), self.send_late, self.core, peer, answer, is_pull)
        else:
            super()._send(peer, answer, is_pull)

    def send_late(self, core: Core, peer: Peer, answer: Answer, is_pull: bool) -> None:
        if core is not self.core:
            return  # that process is dead
        with suppress(ConnectionLost):
            super()._send(peer, answer, is_pull)

    def _reply(self, peer: Peer, reply: Reply) -> None:
        """So do cold replies."""
        if self.world.chance(0.2):
            self.world.after(self.world.delay(), self.reply_late, self.core, peer, reply)
        else:
            super()._reply(peer, reply)

    def reply_late(self, core: Core, peer: Peer, reply: Reply) -> None:
        if core is self.core:
            super()._reply(peer, reply)

    def _await_round(self, peer: Peer) -> None:
        """The connection's thread waits; here the answer finds its own way."""


def join_of(worker: int, incarnation: int, plan: "Plan", offer: int = -1, trained_in: int = -1) -> Join:
    return Join(
        "worker", worker, incarnation, RUN, worker == 0, plan.spec.name, "bytes", plan.num_ps, LAYOUT, OPTIMIZER,
        offer=offer, trained_in=trained_in,
    )  # fmt: skip
