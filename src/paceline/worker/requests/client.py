"""Push gradients to all ps and pull parameters from them, in the order of the one-decision protocol.

Used by worker/step/training_step. No framework: memory is bytes. One request at a time, always from the thread that
trains; only heartbeats (and with --overlap, buckets) come from a thread of their own.

A step in a mode with rounds and several ps (server/control/rounds has the other side):

1. stage the gradient on ps:1..n, wait for all acks,
2. stage and vote at ps:0, in one message,
3. ps:0's answer brings the contributor set,
4. carry it to ps:1..n; each answers with parameters of that round.

A connection that ends is made again (worker/requests/joining), and what was not answered is sent again with the same
push id, so it counts once. A push is *void* when its outcome is unknown: the mode has changed without this worker, it
was evicted meanwhile, or its gradient is gone. Then the worker pulls and goes on with the next one.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from paceline.errors import ClusterError, ConnectionLost, ProtocolError, WaitTimeout
from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec
from paceline.params.layout import Layout
from paceline.params.placement import Plan
from paceline.telemetry import ledger as led
from paceline.telemetry import losses
from paceline.telemetry.steps import StepClock
from paceline.transport.base import Buffer
from paceline.transport.channel import Channel, connect
from paceline.wire import messages as m
from paceline.wire.decisions import Decision
from paceline.wire.frames import Flag, Kind, Outcome
from paceline.worker.requests.deadline import SAY_EVERY_S, Deadline, awaited
from paceline.worker.requests.identity import Identity
from paceline.worker.requests.joining import Joining, NoRecovery, Recovery, device
from paceline.worker.requests.link import Answered, Link
from paceline.worker.requests.rpc import call

REFRESH_TRIES = 1000
SILENT_LEASES = 3  # a ps that says nothing for so long, where no worker is waited for, is connected to again
SILENT_S = 5.0  # at least
CLOSE_S = 10.0  # how long a worker that leaves looks for a ps, which may have ended too

PUSH, ADDED, OUTCOMES = int(Kind.PUSH), int(Outcome.ADDED), tuple(Outcome)  # plain numbers cost less, every step
TICKET, WANTS_TICKET, SWITCH = int(Flag.TICKET), int(Flag.WANTS_TICKET), int(Flag.SWITCH)
LATE: tuple[type[Any], ...] = (m.Dial, m.Ticket, m.Done)  # replies that a ps may hold back
Payloads = Sequence[Sequence[Buffer]]


class Taken(NamedTuple):
    """What became of a push; `flags` and `version` are those of ps:0's answer."""

    outcome: Outcome
    has_ticket: bool
    flags: int = 0
    version: int = 0


class Voided(Exception):
    """The outcome of this push is unknown; `dial`: because another mode holds since."""

    def __init__(self, dial: m.Dial | None = None) -> None:
        self.dial = dial


class Model(Protocol):
    """What a client trains."""

    @property
    def spec(self) -> m.OptimizerSpec | None:
        """The optimizer as it is now; None: as it was when the client joined."""
        ...

    @property
    def weight(self) -> float:
        """The samples in a push, as last said."""
        ...

    def reconnected(self) -> None:
        """Find the slots anew: gradients go elsewhere from now on."""
        ...

    def returned(self) -> None:
        """Take the parameters that the others have made without this worker."""
        ...


class NoModel:
    """No model: the caller pushes and pulls memory by hand."""

    spec, weight = None, 0.0

    def __init__(self, client: "Client") -> None:
        self._client = client

    def reconnected(self) -> None:
        """Do nothing: no gradient has a place."""

    def returned(self) -> None:
        self._client.pull()


class Client:
    """The worker's end of the cluster. `arena` is the memory of all trained parameters, shard after shard."""

    def __init__(
        self,
        me: Identity,
        layout: Layout,
        plan: Plan,
        arena: memoryview,
        say: Callable[[str], None],
        beat: Callable[[], bytes] = bytes,
        recovery: Recovery | None = None,
        model: "Model | None" = None,
        clock: StepClock | None = None,
    ) -> None:
        self._me = me
        self._say = say
        self.dial = m.Dial(0, me.spec, 0)
        self._take_dial(self.dial)
        self._layout = layout
        self._plan = plan
        self._arena = arena
        dials = connect if me.trouble is None else me.trouble.around(connect)
        self.joining = Joining(me, dials, self._join_message, say, beat, recovery or NoRecovery())
        self.links: list[Link] = self.joining.links
        self._others: list[Link] = []  # all but ps:0's, once it has joined
        self.heartbeat = self.joining.heartbeat
        self._ledger: led.Ledger | None = None  # once it joins
        self._model = model or NoModel(self)
        self._optimizer = m.OptimizerSpec("", [])
        self.push_id = 0
        self.is_pending = False
        self.waited_s = 0.0  # in join
        self.clock = clock or StepClock()
        self._barriers = 0
        self._awaits_others = False  # every push is an update, and ps:1..n are still to answer this one
        self._late_dial: m.Dial | None = None  # so another mode is taken up after that
        self._pushed_as = me.incarnation
        self._void: Voided | None = None
        self._flags, self._tail, self._wants_ticket = 0, b"", 0
        self._payloads: Payloads = ()
        self._again: Callable[[int], Sequence[Buffer] | None] | None = None

    def lineage_of(self, index: int) -> int:
        """Return the lineage in which this worker trains with a ps."""
        return self.links[index].lineage

    @property
    def incarnation(self) -> int:
        """Return this worker's incarnation, which grows when it was evicted and has come back."""
        return self.joining.incarnation

    # --- joining ----------------------------------------------------------------------------------------------

    def join(
        self,
        optimizer: m.OptimizerSpec,
        carried: Callable[[], bytes],
        initialise_slots: Callable[[], None],
        initial: Callable[[int], m.Init] = lambda index: m.Init(),
    ) -> m.Started:
        """Connect to every ps in any start order, join, initialise (the chief), and wait for all others."""
        me = self._me
        began = time.monotonic()
        self._optimizer, self._ledger = optimizer, _ledger_of(me)
        # ps:0 last: from its answer on the rounds count on this worker.
        for index in [*range(1, self._plan.num_ps), 0]:
            channel = self.joining.connect(index)
            into = self._slice(index)
            link = Link(channel, index, into, me.worker, self.incarnation, self._ledger, self.clock, self.recover)
            self.joining.enter(link)
        self.links.sort(key=lambda each: each.index)
        self._others = self.links[1:]
        empty = [link for link in self.links if link.joined is not None and not link.joined.is_initialised]
        is_on = any(link.joined is not None and link.joined.trained_in >= 0 for link in empty)
        if empty and (is_on or any(link.version or link.lineage for link in self.links)):
            self.joining.wait_for_values(empty)  # a run is on: a ps of it has lost its memory
        elif empty and me.is_chief:
            for link in reversed(empty):
                init = initial(link.index)  # may lay a checkpoint on the arena first
                extra = [carried()] if link.index == 0 and self._layout.carried_bytes else []
                link.ask(init, bulk=[self._slice(link.index), *extra])
            initialise_slots()  # to all: those that have values have trained nothing yet
        started = self._begin()
        self.adopt(started.dial)
        self.carry(started.decisions)
        if started.is_first:  # no script may change the first values before all workers have them
            dial = self._begin(has_values=True).dial
            if dial.turn != self.dial.turn:
                self.adopt(dial)
                self.pull()
        self.waited_s = time.monotonic() - began
        return started

    def _join_message(self, incarnation: int) -> m.Join:
        me = self._me
        return m.Join(
            me.job, me.worker, incarnation, me.run_id, me.is_chief, me.spec.name, me.placement, self._plan.num_ps,
            self._layout, self._model.spec or self._optimizer, me.wire, self._model.weight,
        )  # fmt: skip

    def _begin(self, has_values: bool = False) -> m.Started:
        """Attach and start, however often ps:0 is started again meanwhile."""
        link = self.links[0]
        while True:
            try:
                self.heartbeat.attach(self.incarnation)
                return self.joining.start(has_values)
            except (ConnectionLost, ProtocolError) as error:
                link.reconnect(error)

    def status(self) -> m.Status:
        """Ask beside a connection that waits which workers are missing, and for whom the round waits."""
        return self.heartbeat.status() or m.Status([], [], 0)  # else ps:0 itself is what we wait for

    def switch_mode(self, spec: ModeSpec) -> None:
        """Ask ps:0 for another mode, beside the connection that trains; a refusal is raised."""
        self.heartbeat.ask(m.SwitchMode(spec, waits=False), m.Switched, self._me.wait_s)

    # --- the two verbs ----------------------------------------------------------------------------------------

    def push(
        self,
        payloads: Payloads,
        tail: bytes = b"",
        is_finite: bool = True,
        wants_ticket: bool = False,
        sent: Collection[int] = (),
        again: Callable[[int], Sequence[Buffer] | None] | None = None,
    ) -> None:
        """Send one gradient: `payloads` holds each shard's buffers, empty where the slot is shared memory, and on the
        `sent` shards, which have it already. `again` gives a shard's buffers once more, bit for bit, or None."""
        self.push_id += 1
        self._pushed_as = self.joining.incarnation
        self._flags = 0
        if not is_finite:
            self._flags, payloads = Flag.NOT_FINITE, [()] * len(self.links)
        self._tail, self._payloads, self._again = tail, payloads, again
        self._wants_ticket = WANTS_TICKET if wants_ticket else 0
        self.is_pending = True
        others = self._others
        try:
            if not self._has_rounds:
                self._awaits_others = bool(others)
                for link in others:
                    self._send_gradient(link, PUSH, sent)
            elif others and is_finite:
                for link in others:  # 1
                    self._send_gradient(link, Kind.STAGE, sent)
                for link in others:
                    self._await(link, link.frame, self._gradient_again)
            self._send_gradient(self.links[0], PUSH, sent)  # 2
        except Voided as void:
            self._void = void  # told when the answer is taken

    def _send_gradient(self, link: Link, kind: int, sent: Collection[int]) -> None:
        flags = self._flags | (Flag.SENT if link.index in sent else 0)
        if not link.index:
            flags |= self._wants_ticket
        try:
            link.copied_in += link.slot_bytes
            link.send(kind, flags, self.push_id, self._tail, self._payloads[link.index])
        except ConnectionLost:
            return  # it is sent again where the answer is waited for

    def _gradient_again(self, link: Link) -> None:
        """Send the same push on another connection: whole, also what went in buckets before."""
        payload = self._payloads[link.index]
        if self._again is not None and not self._flags & Flag.NOT_FINITE:
            kept = self._again(link.index)
            if kept is None:
                raise Voided
            payload = link.as_it_takes(kept)
        kind = Kind.STAGE if link.index and self._has_rounds else Kind.PUSH
        flags = self._flags if link.index else self._flags | self._wants_ticket
        link.send(kind, flags, self.push_id, self._tail, payload)

    def take(self) -> Taken:
        """Wait for the answer and bring the newest parameters into the arena."""
        link, others = self.links[0], self._others
        try:
            if self._void is not None:
                raise self._void
            has_tail = self._has_rounds and bool(others)
            answer = link.frame if has_tail else link.answer
            outcome, flags, version, tail = self._await(link, answer, self._gradient_again)  # 3
            has_ticket = flags & TICKET != 0
            if outcome == ADDED:
                self._say_counted()
            else:
                link.read(self.push_id)
                if others:
                    self._take_others(flags, tail)  # 4
            if flags & SWITCH:
                turn = self.dial.turn
                self.ask(m.Ready())
                self.pull()
                has_ticket = has_ticket and self.dial.turn == turn
            taken = Taken._make((OUTCOMES[outcome], has_ticket, flags, version))
        except Voided as void:
            taken = self._give_up_push(void)
        self.is_pending = False
        self._void, self._again, self._payloads = None, None, ()
        return taken

    def _give_up_push(self, void: Voided) -> Taken:
        while True:
            try:
                if void.dial is not None and self._awaits_others:
                    self._late_dial = void.dial
                    self._take_answers(was_held=False)  # where every push is an update it may count there
                elif (dial := void.dial or self._late_dial) is not None:
                    self.adopt(dial)
                self._awaits_others, self._late_dial = False, None
                self.pull()
                return Taken(Outcome.FENCED, has_ticket=False)
            except Voided as another:
                void = another

    def _say_counted(self) -> None:
        """Have every shard keep what was counted before the slot is written again: the round is still open, and this
        worker may add to it."""
        for link in self._others:
            self._post(link, _counted, self.push_id)
        for link in self._others:
            self._await(link, link.frame, lambda link: _counted(link, self.push_id), is_gradient=False)

    def _take_others(self, flags: int, tail: bytes) -> None:
        """Take ps:1..n's parameters; in rounds once they have ps:0's decisions, which `tail` brings."""
        if not self._has_rounds:
            self._take_answers(was_held=bool(flags & Flag.WAITED))
            return
        carried = m.decode(tail) if tail else m.Carried(())
        assert isinstance(carried, m.Carried)
        self.carry(carried.decisions, first_is_read=True)

    def _take_answers(self, was_held: bool) -> None:
        """Take the answers of ps:1..n, where every push is an update. If ps:0 held its answer back, theirs are old."""
        for link in self._others:
            if self.incarnation != self._pushed_as:
                raise Voided  # this worker was evicted since: no answer comes, and it must not be sent as another one
            self._await(link, link.answer, self._gradient_again)
            if was_held and not link.shares_memory:
                self._pull(link, ())
            else:
                link.read(self.push_id)
        dial, self._awaits_others, self._late_dial = self._late_dial, False, None
        if dial is not None:
            self.adopt(dial)
            self.pull()

    def adopt(self, dial: m.Dial) -> None:
        """Take up another mode, and bring it to the other shards, after what was decided before it. It brings no
        parameters: the caller pulls."""
        if dial.turn == self.dial.turn:
            self._take_dial(dial)  # ours is what we were started with; ps:0's counts
            return
        for link in self._others:
            self._deliver(link, dial.decisions)
            link.offset = link.ask(m.Align(dial), m.Aligned).offset
        self._take_dial(dial)

    def _take_dial(self, dial: m.Dial) -> None:
        self.dial = dial
        self._has_rounds = make_mode(dial.spec, len(self._me.worker_devices)).has_rounds

    def carry(self, decisions: tuple[Decision, ...], first_is_read: bool = False) -> None:
        """Bring ps:0's decisions to the other shards and read all; in rounds until all are at one version."""
        for _ in range(REFRESH_TRIES):
            lineage = self.links[0].lineage  # if it goes back meanwhile, so do all, and these decisions are void
            for link in self.links[1:] if first_is_read else self.links:
                self._pull(link, decisions if link.index and self.links[0].lineage == lineage else ())
            if not self._has_rounds or len({link.version - link.offset for link in self.links}) == 1:
                return
            first_is_read = False
            decisions = self._open_decisions()
        raise ClusterError(
            f"the shards do not come to one round: {[link.version - link.offset for link in self.links]}"
        )

    def pull(self) -> None:
        """Pull the newest parameters now."""
        self.carry(self._open_decisions() if self._has_rounds and len(self.links) > 1 else ())

    def _open_decisions(self) -> tuple[Decision, ...]:
        return self.links[0].ask(m.AskDecisions(), m.Carried).decisions

    def _pull(self, link: Link, decisions: tuple[Decision, ...]) -> None:
        if decisions or not link.shares_memory:
            tail = m.encode(m.Carried(decisions)) if decisions else b""
            self._post(link, _asks_pull, self.push_id, tail)
            self._await(link, link.frame, lambda link: _asks_pull(link, self.push_id, tail), is_gradient=False)
        link.read(self.push_id)

    def _deliver(self, link: Link, decisions: tuple[Decision, ...]) -> None:
        """Bring decisions, and read nothing."""
        while decisions:
            try:
                return link.deliver(self.push_id, decisions)
            except ConnectionLost as error:
                link.reconnect(error)

    # --- waiting ----------------------------------------------------------------------------------------------

    def _post(self, link: Link, send: Callable[..., None], *args: object) -> None:
        """Send now. A lost connection is noticed where the answer is waited for."""
        try:
            send(link, *args)
        except ConnectionLost:
            return

    def _await(
        self, link: Link, answer: Callable[[int], Answered], send: Callable[[Link], None], is_gradient: bool = True
    ) -> Answered:
        """The answer of one ps; while it does not come, say for whom we wait, and give up at the deadline. After a
        lost connection `send` asks once more."""
        waiting: Deadline | None = None
        while True:
            try:
                answered = answer(self.push_id)
                link.losses = 0
                return answered
            except WaitTimeout:
                waiting = self.still_waiting(waiting, link, waits_for_others=False)
            except ConnectionLost as error:
                lineage = link.lineage
                self.recover(link, link.note_loss(error), is_gradient)
                if link.lineage != lineage:  # it went back to a checkpoint: what was decided or pushed before is void
                    if self.is_pending and not is_gradient:
                        raise Voided from None
                    send = lambda link: _asks_pull(link, self.push_id, b"")  # noqa: E731
                self._post(link, send)
                waiting = None

    def recover(self, link: Link, error: ConnectionLost, is_gradient: bool = False) -> None:
        """Make a lost connection again. A gradient on its way is void if its outcome is unknown; else take what the
        others have made meanwhile."""
        was, is_leaving = self.incarnation, link.is_leaving
        waited_s, began_s = self.clock.wait_s, time.perf_counter()
        started = self.joining.again(link, error, CLOSE_S if is_leaving else None)
        self.clock.wait_s = waited_s + time.perf_counter() - began_s
        self._model.reconnected()
        if self.incarnation != was:
            self._awaits_others, self._late_dial = False, None  # whatever was on its way is void
        elif started is None or started.dial.turn == self.dial.turn:
            return
        elif is_gradient:
            raise Voided(started.dial)
        elif self._awaits_others:
            self._late_dial = started.dial
            return
        elif is_leaving:
            for other in self._others:
                self.joining.again(other, error)  # this worker has closed there, and must tell of another mode
        if started is not None:
            self.adopt(started.dial)
            for other in self._others:
                self._deliver(other, started.decisions)
        if is_gradient:
            raise Voided
        if not self.is_pending:  # else it is about to be done
            self._model.returned()

    def still_waiting(self, waiting: Deadline | None, link: Link, waits_for_others: bool) -> Deadline:
        """Say for whom this worker waits. Take a ps for lost that is silent though it waits for no other worker."""
        status = self.heartbeat.status()
        names, more = ([], []) if status is None or link.index else awaited(status, self._me)
        waiting = waiting or Deadline(
            self._me.wait_s, names or [device(link.index)], self._say, SAY_EVERY_S, style=self._me.log_style
        )
        waiting.names = names or [device(link.index)]
        is_silent = status is None or not (names or waits_for_others)
        if is_silent and waiting.waited_s > max(SILENT_S, SILENT_LEASES * self._me.lease_s):
            link.channel.stream.shutdown()  # the next read sees the end
        waiting.again(f"{', '.join(waiting.names)} did not answer", more)
        return waiting

    def ask(self, request: m.Request) -> m.Dial | m.Ticket | m.Done:
        """Ask ps:0 for a reply that may be held back (a barrier, a ticket), and wait as for the answer to a push."""
        if isinstance(request, m.Barrier):
            self._barriers += 1
            request = m.Barrier(self._barriers)
        waited_s, began_s = self.clock.wait_s, time.perf_counter()
        late = _Late(self, self.links[0], isinstance(request, m.Barrier))
        try:
            reply: m.Dial | m.Ticket | m.Done = call(late, request, LATE, on_wait=late.wait)[0]
        except _Evicted:
            return self.dial  # the others did not wait at a barrier for one that was evicted
        self.links[0].losses = 0
        self.clock.wait_s = waited_s + time.perf_counter() - began_s
        if isinstance(reply, m.Dial | m.Ticket):
            self.adopt(reply if isinstance(reply, m.Dial) else reply.dial)
        return reply

    # --- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all connections; without a Close message before, the ps takes it as a death."""
        self.joining.close()
        if self._ledger is not None:
            self._ledger.close()

    def _slice(self, index: int) -> memoryview:
        base = self._plan.base(index)
        return self._arena[base : base + self._plan.shard_bytes[index]]


def _ledger_of(me: Identity) -> led.Ledger | None:
    if me.ledger is None:
        return None
    try:
        ledger = led.Ledger(me.ledger)
    except OSError as error:
        losses.tell(me.ledger, error, led.LOST)
        return None
    ledger.write(led.Kind.START, led.START_EMPTY, me.worker, me.incarnation)
    return ledger


def _counted(link: Link, push_id: int) -> None:
    link.send(Kind.PULL, Flag.COUNTED, push_id)


def _asks_pull(link: Link, push_id: int, tail: bytes) -> None:
    link.send(Kind.PULL, 0, push_id, tail)


class _Evicted(Exception):
    """This worker was evicted while it asked, and has come back."""


class _Late:
    """ps:0 for a request whose reply may be held back: it says for whom it waits."""

    name = "ps:0"

    def __init__(self, client: Client, link: Link, is_barrier: bool) -> None:
        self._client = client
        self._link = link
        self._is_barrier = is_barrier
        self._incarnation = client.incarnation
        self._waiting: Deadline | None = None

    @property
    def channel(self) -> Channel:
        return self._link.channel

    def reconnect(self, error: ClusterError) -> None:
        self._client.recover(self._link, self._link.note_loss(error))
        if self._is_barrier and self._client.incarnation != self._incarnation:
            raise _Evicted
        self._waiting = None

    def wait(self) -> None:
        """Say for whom this worker waits; raise at the deadline."""
        self._waiting = self._client.still_waiting(self._waiting, self._link, waits_for_others=True)
