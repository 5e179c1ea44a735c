"""HOW does a worker push and pull? The verbs over all ps, in the order that the one-decision protocol wants.

Used by worker/torch (and other frameworks' files): no framework here, memory is bytes. One request at a time, always
from the thread that trains; only heartbeats (and with --overlap, buckets) come from a thread of their own.

A step in a mode with rounds and several ps (server/rounds has the other side):

1. stage the gradient on ps:1..n, wait for all acks,
2. stage and vote at ps:0, in one message,
3. ps:0's answer brings the contributor set,
4. carry it to ps:1..n; each answers with parameters of that round.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from paceline.errors import ClusterError, ConnectionLost, ProtocolError, Refused, WaitTimeout
from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec
from paceline.params.layout import Layout
from paceline.params.placement import Plan
from paceline.transport.base import Buffer
from paceline.transport.channel import Channel, connect
from paceline.wire import messages as m
from paceline.wire.decisions import Decision
from paceline.wire.frames import Flag, Frame, Kind, Outcome
from paceline.worker.link import Link
from paceline.worker.patience import SAY_EVERY_S, Patience

STATUS_S = 5.0
RETRY_S = 0.1
PS_0 = "/job:ps/replica:0/task:0"
REFRESH_TRIES = 1000


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this worker is, and where its cluster is."""

    job: str
    worker: int
    incarnation: int
    run_id: str
    is_chief: bool
    spec: ModeSpec
    ps_addresses: tuple[str, ...]
    worker_devices: tuple[str, ...]
    placement: str
    lane: str
    wire: str
    overlaps: bool
    secret: bytes
    lease_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of a push."""

    outcome: Outcome
    has_ticket: bool


class Client:
    """The worker's end of the cluster. `arena` is the memory of all trained parameters, shard after shard."""

    def __init__(
        self,
        me: Identity,
        layout: Layout,
        plan: Plan,
        arena: memoryview,
        say: Callable[[str], None],
    ) -> None:
        self._me = me
        self._say = say
        self.dial = m.Dial(0, me.spec, 0)
        self._take_dial(self.dial)
        self._layout = layout
        self._plan = plan
        self._arena = arena
        self._ended = threading.Event()
        self._watch: Channel | None = None
        self._owed = 0  # answers that are still to come on that connection
        self.links: list[Link] = []
        self.push_id = 0
        self.is_pending = False
        self.waited_s = 0.0

    # --- joining ----------------------------------------------------------------------------------------------

    def join(
        self, optimizer: m.OptimizerSpec, carried: Callable[[], bytes], initialise_slots: Callable[[], None]
    ) -> m.Started:
        """Connect to every ps in any start order, join, initialise (the chief), and wait for all others."""
        me = self._me
        began = time.monotonic()
        is_first = False
        message = m.Join(
            me.job, me.worker, me.incarnation, me.run_id, me.is_chief, me.spec.name, me.placement, self._plan.num_ps,
            self._layout, optimizer, me.wire,
        )  # fmt: skip
        # ps:0 last: from its answer on the rounds count on this worker.
        for index in [*range(1, self._plan.num_ps), 0]:
            link = Link(self._connect(index), index, self._slice(index), me.worker, me.incarnation)
            self.links.append(link)
            joined = link.join(message)
            if me.is_chief and not joined.is_initialised:
                extra = [carried()] if index == 0 and self._layout.carried_bytes else []
                link.ask(m.Init(), bulk=[self._slice(index), *extra])
                is_first = True
        self.links.sort(key=lambda each: each.index)
        if is_first:
            initialise_slots()
        self._attach()
        started = self._await_start()
        self.adopt(started.dial)
        self.carry(started.decisions)
        self.waited_s = time.monotonic() - began
        return started

    def _connect(self, index: int) -> Channel:
        address = self._me.ps_addresses[index]
        device = f"/job:ps/replica:0/task:{index}"
        waiting = Patience(self._me.wait_s, [device], self._say)
        while True:
            try:
                channel = connect(address, self._me.lane, self._me.secret)
                channel.stream.name = f"ps:{index} at {address} (its log says why)"
                return channel
            except ConnectionLost as error:
                waiting.again(f"{device} at {address} did not answer ({error})")
                time.sleep(RETRY_S)  # between attempts to connect: nobody can wake us

    def _attach(self) -> None:
        self._watch = self._connect(0)
        self._watch.ask(m.Attach(self._me.worker, self._me.incarnation))
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        assert self._watch is not None
        while not self._ended.wait(self._me.lease_s / 5):
            try:
                self._watch.send(Kind.BEAT, worker=self._me.worker, incarnation=self._me.incarnation)
            except ConnectionLost:
                return  # the thread that trains sees the end on its own connection, and says so

    def _await_start(self) -> m.Started:
        channel = self.links[0].channel
        channel.say(m.Start())
        waiting: Patience | None = None
        while True:
            try:
                frame = channel.recv_cold()
                break
            except WaitTimeout:
                missing = [self._me.worker_devices[w] for w in self.status().missing] or [PS_0]
                waiting = waiting or Patience(self._me.wait_s, missing, self._say)
                waiting.names = missing
                waiting.again(f"{', '.join(missing)} did not join")
        reply = m.decode(frame.tail)
        if isinstance(reply, m.Failed):
            raise Refused(reply.reason)
        if not isinstance(reply, m.Started):
            raise ProtocolError(f"ps:0 answered Start with {type(reply).__name__}")
        return reply

    def status(self) -> m.Status:
        """Who is missing and whom the round waits for; asked beside a connection that waits."""
        try:
            reply = self._ask_beside(m.AskStatus(), STATUS_S)
        except WaitTimeout:
            return m.Status([], [], 0)  # ps:0 itself is what we wait for
        if not isinstance(reply, m.Status):
            raise ProtocolError("ps:0 does not know its status")
        return reply

    def switch_mode(self, spec: ModeSpec) -> None:
        """Ask ps:0 for another mode, beside the connection that trains; a refusal is raised."""
        reply = self._ask_beside(m.SwitchMode(spec, waits=False), self._me.wait_s)
        if isinstance(reply, m.Failed):
            raise Refused(reply.reason)
        if not isinstance(reply, m.Switched):
            raise ProtocolError(f"ps:0 answered SwitchMode with {type(reply).__name__}")

    def _ask_beside(self, request: m.Request, limit_s: float) -> m.Reply:
        """A question that the heartbeat's connection carries. An answer that came too late for another one is read
        and left alone."""
        assert self._watch is not None
        self._owed += 1
        self._watch.say(request)
        deadline = time.monotonic() + limit_s
        while True:
            try:
                frame = self._watch.recv_cold()
            except WaitTimeout:
                if time.monotonic() >= deadline:
                    raise
                continue
            self._owed -= 1
            if self._owed == 0:
                return m.decode(frame.tail)  # type: ignore[return-value]

    # --- the two verbs ----------------------------------------------------------------------------------------

    def push(
        self,
        payloads: Sequence[Sequence[Buffer]],
        tail: bytes = b"",
        is_finite: bool = True,
        wants_ticket: bool = False,
        sent: Collection[int] = (),
    ) -> None:
        """Send one gradient: `payloads` holds each shard's buffers, empty where the slot is shared memory, and on the
        `sent` shards, which have it already."""
        self.push_id += 1
        flags = 0
        if not is_finite:
            flags, payloads = Flag.NOT_FINITE, [()] * len(self.links)
        others = self.links[1:]
        if not self._has_rounds:
            for link in others:
                link.send(Kind.PUSH, flags | _sent(link, sent), self.push_id, tail, payloads[link.index])
        elif others and is_finite:
            for link in others:  # 1
                link.send(Kind.STAGE, flags | _sent(link, sent), self.push_id, tail, payloads[link.index])
            for link in others:
                self._await(link, link.frame)
        if wants_ticket:
            flags |= Flag.WANTS_TICKET
        flags |= _sent(self.links[0], sent)
        self.links[0].send(Kind.PUSH, flags, self.push_id, tail, payloads[0])  # 2
        self.is_pending = True

    def take(self) -> Taken:
        """Wait for the answer and bring the newest parameters into the arena."""
        link = self.links[0]
        has_tail = self._has_rounds and len(self.links) > 1
        first = self._await(link, link.frame if has_tail else link.answer)  # 3
        if first.outcome == Outcome.ADDED:
            self._say_counted()
        else:
            link.read(self.push_id)
            if has_tail:
                carried = m.decode(first.tail) if first.tail else m.Carried(())
                assert isinstance(carried, m.Carried)
                self.carry(carried.decisions, first_is_read=True)  # 4
            elif len(self.links) > 1:
                self._take_others(was_held=bool(first.flags & Flag.WAITED))
        self.is_pending = False
        has_ticket = bool(first.flags & Flag.TICKET)
        if first.flags & Flag.SWITCH:
            turn = self.dial.turn
            self.ask(m.Ready())
            self.pull()
            has_ticket = has_ticket and self.dial.turn == turn
        return Taken(Outcome(first.outcome), has_ticket)

    def _say_counted(self) -> None:
        """The round is still open and we may add to it: every shard keeps what was counted before the slot is
        written again."""
        for link in self.links[1:]:
            link.send(Kind.PULL, Flag.COUNTED, self.push_id)
        for link in self.links[1:]:
            self._await(link, link.frame)

    def _take_others(self, was_held: bool) -> None:
        """The answers of ps:1..n, where every push is an update. If ps:0 held us back, theirs are old by now."""
        for link in self.links[1:]:
            self._await(link, link.answer)
            if was_held and not link.shares_memory:
                self._pull(link, ())
            else:
                link.read(self.push_id)

    def adopt(self, dial: m.Dial) -> None:
        """Another mode holds: bring it to the other shards, after what was decided before it. Whoever wants parameters
        of that mode pulls."""
        if dial.turn == self.dial.turn:
            self._take_dial(dial)  # ours is what we were started with; ps:0's counts
            return
        for link in self.links[1:]:
            if dial.decisions:
                self._pull(link, dial.decisions)
            reply = link.ask(m.Align(dial))
            if not isinstance(reply, m.Aligned):
                raise ProtocolError(f"ps:{link.index} answered Align with {type(reply).__name__}")
            link.offset = reply.offset
        self._take_dial(dial)

    def _take_dial(self, dial: m.Dial) -> None:
        self.dial = dial
        self._has_rounds = make_mode(dial.spec, len(self._me.worker_devices)).has_rounds

    def carry(self, decisions: tuple[Decision, ...], first_is_read: bool = False) -> None:
        """Bring ps:0's decisions to the other shards and read all; in rounds until all are at one version."""
        for _ in range(REFRESH_TRIES):
            for link in self.links[1:] if first_is_read else self.links:
                self._pull(link, decisions if link.index else ())
            if not self._has_rounds or len({link.version - link.offset for link in self.links}) == 1:
                return
            first_is_read = False
            reply = self.links[0].ask(m.AskDecisions())
            assert isinstance(reply, m.Carried)
            decisions = reply.decisions
        raise ClusterError(
            f"the shards do not come to one round: {[link.version - link.offset for link in self.links]}"
        )

    def pull(self) -> None:
        """The newest parameters, now."""
        decisions: tuple[Decision, ...] = ()
        if self._has_rounds and len(self.links) > 1:
            reply = self.links[0].ask(m.AskDecisions())
            assert isinstance(reply, m.Carried)
            decisions = reply.decisions
        self.carry(decisions)

    def _pull(self, link: Link, decisions: tuple[Decision, ...]) -> None:
        if decisions or not link.shares_memory:
            link.send(Kind.PULL, 0, self.push_id, m.encode(m.Carried(decisions)) if decisions else b"")
            self._await(link, link.frame)
        link.read(self.push_id)

    def _await(self, link: Link, answer: Callable[[int], Frame]) -> Frame:
        """The answer of one ps; while it does not come, say for whom we wait, and give up at the deadline."""
        waiting: Patience | None = None
        while True:
            try:
                return answer(self.push_id)
            except WaitTimeout:
                waiting = self._still_waiting(waiting, link)

    def _still_waiting(self, waiting: Patience | None, link: Link) -> Patience:
        status = self.status()
        names = [self._me.worker_devices[w] for w in status.waiting_for if w != self._me.worker]
        if status.lacks:
            names = [f"{status.lacks} more worker(s), as --min-workers asks"]
        names = names or [f"/job:ps/replica:0/task:{link.index}"]
        waiting = waiting or Patience(self._me.wait_s, names, self._say, first_after_s=SAY_EVERY_S)
        waiting.names = names
        waiting.again(f"{', '.join(names)} did not answer")
        return waiting

    def ask(self, request: m.Request) -> m.Reply:
        """A request to ps:0 that may be answered late (a barrier, a ticket): waits like everything else here."""
        link = self.links[0]
        link.channel.say(request)
        waiting: Patience | None = None
        while True:
            try:
                reply = m.decode(link.channel.recv_cold().tail)
                break
            except WaitTimeout:
                waiting = self._still_waiting(waiting, link)
        if isinstance(reply, m.Failed):
            raise Refused(reply.reason)
        if isinstance(reply, m.Dial | m.Ticket):
            self.adopt(reply if isinstance(reply, m.Dial) else reply.dial)
        return reply  # type: ignore[return-value]

    # --- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all connections; without a Close message before, the ps takes it as a death."""
        self._ended.set()
        for link in self.links:
            link.close()
        if self._watch is not None:
            self._watch.close()

    def _slice(self, index: int) -> memoryview:
        base = self._plan.base(index)
        return self._arena[base : base + self._plan.shard_bytes[index]]


def _sent(link: Link, sent: Collection[int]) -> int:
    return Flag.SENT if link.index in sent else 0
