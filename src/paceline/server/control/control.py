"""Everything that one ps decides: events come in, with the time they happen at; actions go out.

Driven by server/service with sockets and threads, and by the simulation of the tests with neither. Connections are
numbers here. An event is a method, or a function of switching.py, saving.py and rewinding.py; it raises Refused before
it has changed anything, and returns what is to be done (actions.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

import msgspec

from paceline.checkpoint.policy import SavePolicy
from paceline.cluster.membership import Membership, Phase, last_incarnation
from paceline.errors import ConnectionLost, Refused
from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec
from paceline.params.layout import Layout, difference, problems
from paceline.server.control import switching
from paceline.server.control.actions import (
    Action,
    Answer,
    End,
    Entered,
    Evicted,
    Left,
    Refuse,
    Say,
    SayClosed,
    Seat,
)
from paceline.server.control.budget import Budget
from paceline.server.control.config import PsConfig
from paceline.server.control.kept import COUNTED, KNOWN
from paceline.server.control.rewinding import Rewinding
from paceline.server.control.saving import Saving
from paceline.server.control.state import ShardState
from paceline.server.control.validation import options_problem
from paceline.telemetry.records import ModeChange, PsReport
from paceline.wire import messages as m
from paceline.wire.decisions import Decision, Key
from paceline.wire.frames import Flag

COMEBACK_S = 2.0  # for so long, or a lease, workers that were in before a ps was started again may take to come back
LEAVES = (Phase.PAUSED, Phase.CLOSED, Phase.GONE, Phase.LOST)
LOST_WITH_CHIEF = (
    "some workers have trained with values that ps:0 lost together with the chief, and a new chief had begun before "
    "they came: end all tasks and start them again; --resume auto takes the newest checkpoint, if there is one"
)


class Model(msgspec.Struct, array_like=True):
    """What the first worker brought; it never changes."""

    layout: Layout
    optimizer: m.OptimizerSpec


@dataclass(eq=False)
class Control:
    """The control plane of one ps. Fields that are not KNOWN or COUNTED begin anew in the next process."""

    config: PsConfig
    members: Membership
    state: ShardState
    saving: Saving
    began_s: float
    dial: m.Dial = field(metadata=KNOWN)  # the mode that holds
    seed: int = field(metadata=KNOWN)  # of the data's order
    lineage: int = field(default=0, metadata=KNOWN)
    is_initialised: bool = field(default=False, metadata=KNOWN)
    is_started: bool = field(default=False, metadata=KNOWN)
    wanted: ModeSpec | None = field(default=None, metadata=KNOWN)  # the mode that is to hold when all stand still
    budget: Budget = field(default_factory=lambda: Budget())
    # By worker: (incarnation, the number of its last barrier), and of the last one that it was let out of.
    barrier_numbers: dict[int, Key] = field(default_factory=dict, metadata=KNOWN)
    left_barriers: dict[int, Key] = field(default_factory=dict, metadata=KNOWN)
    mode_changes: list[ModeChange] = field(default_factory=list, metadata=COUNTED)
    rewinding: Rewinding = field(default_factory=Rewinding)
    model: Model | None = None
    trained_in: int = -1  # while it has no values: the newest lineage of those who have trained with it
    no_start: str = ""  # why no worker may start here any more
    keys: dict[int, Key] = field(default_factory=dict)  # connection -> the worker that has joined on it
    at: dict[Key, int] = field(default_factory=dict)  # the connection of each worker that is in
    beats: dict[int, Key] = field(default_factory=dict)  # heartbeat connection -> for whom it beats
    starters: dict[Key, int] = field(default_factory=dict)
    takes_first: set[Key] = field(default_factory=set)  # began with the run, and do not have its first values yet
    has_first: dict[Key, int] = field(default_factory=dict)  # have them, and wait for the others
    in_barrier: dict[Key, int] = field(default_factory=dict)
    ticket_waiters: dict[Key, int] = field(default_factory=dict)
    wants_ticket: set[Key] = field(default_factory=set)  # with the answer to its last push
    switchers: list[int] = field(default_factory=list)  # connections that asked for another mode, and wait
    standing: dict[Key, int] = field(default_factory=dict)
    standing_since_s: float = 0.0
    gone_since_s: dict[int, float] = field(default_factory=dict)
    returning: set[Key] = field(default_factory=set)  # in when an earlier process of this ps ended, and to come back
    out: list[Action] = field(default_factory=list)  # what the event under way has decided so far

    def __post_init__(self) -> None:
        self.members.on_change = self._changes

    # --- what all events use ----------------------------------------------------------------------------------

    def take(self) -> list[Action]:
        """Return what the event has decided."""
        out, self.out = self.out, []
        if self.budget.total is not None:
            for place, action in enumerate(out):
                if type(action) is Answer and action.is_push and action.key in self.wants_ticket:
                    out[place] = action._replace(flags=action.flags | self._ticket_flag(action.key))
        return out

    def do(self, actions: list[Action], now_s: float) -> None:
        """Take over what the shard's state has decided, and announce, copy and mark what is to be saved."""
        self.out += self.saving.follow(self, actions, now_s)

    def say(self, connection: int, message: m.Reply) -> None:
        """Send a reply, when what it says is written down."""
        self.out.append(Say(connection, message))

    def done(self, connection: int) -> list[Action]:
        """Return what the event has decided, and that it is done."""
        self.out.append(Say(connection, m.Done()))
        return self.take()

    def worker(self, connection: int) -> Key:
        """Return the worker on this connection; refuse one that has connected again, or was given up."""
        key = self.keys.get(connection)
        if key is None or not self.members.is_current(*key) or self.at.get(key) != connection:
            raise Refused("this connection belongs to no worker of the run any more")
        return key

    def check_current(self, key: Key, connection: int) -> None:
        """End a connection whose frame was received before its worker was dropped, or connected again."""
        if self.at.get(key) != connection:
            raise ConnectionLost("this worker was given up, or has connected again")

    def changed(self, now_s: float) -> None:
        """Who trains has changed: look again at rounds and at workers that wait."""
        self.do(self.state.changed(now_s), now_s)
        switching.switch_if_still(self, now_s)
        self.release_starters(now_s)

    def _changes(self, worker: int, incarnation: int, phase: Phase) -> None:
        if phase in LEAVES:
            self.out.append(Left(worker, incarnation, phase))

    def _enter(self, worker: int) -> None:
        """It trains from now on."""
        state = self.state
        state.entered(worker)
        clock, incarnation = state.clocks.get(worker, 0), self.members[worker].incarnation
        self.out.append(Entered(worker, incarnation, clock, state.version))

    def _resume(self, worker: int) -> None:
        """It trains again, if it did not."""
        if worker not in self.members.training:
            self.members.resume(worker)
            self._enter(worker)

    # --- gradients --------------------------------------------------------------------------------------------

    def pushed(self, connection: int, key: Key, push_id: int, base: int, flags: int, now_s: float) -> list[Action]:
        """A whole gradient lies in its worker's slot."""
        if self.at.get(key) != connection:
            self.check_current(key, connection)
        pulse = self.members.pulses[key[0]]
        pulse.steps_s.append(now_s - pulse.progress_s)
        pulse.progress_s = now_s
        budget, state = self.budget, self.state
        if budget.total is None:
            actions = state.push(key, push_id, base, not flags & Flag.NOT_FINITE, False, now_s)
            version, at_s = self.saving.due
            if state.version + 1 < version and now_s < at_s and not state.mode.has_rounds:
                return actions
            return self.saving.follow(self, actions, now_s)
        if flags & Flag.WANTS_TICKET:
            self.wants_ticket.add(key)
        else:
            self.wants_ticket.discard(key)
        is_late = self.is_late(flags)
        self.do(state.push(key, push_id, base, not flags & Flag.NOT_FINITE, is_late, now_s), now_s)
        budget.give_back(key[0])
        self.release_tickets()
        self.release_barrier()
        return self.take()

    def staged(self, connection: int, key: Key, push_id: int, round_: int, now_s: float) -> list[Action]:
        """On every shard but ps:0: a gradient lies in its slot until its round is decided."""
        self.check_current(key, connection)
        self.do(self.state.stage(key, push_id, round_), now_s)
        return self.take()

    def pulled(
        self,
        connection: int,
        key: Key,
        push_id: int,
        decisions: tuple[Decision, ...],
        is_counted: bool,
        now_s: float,
    ) -> list[Action]:
        """A worker asks for parameters, and may carry decisions, or say that ps:0 has counted what it staged last."""
        self.check_current(key, connection)
        state = self.state
        self.do(state.count(key, push_id) if is_counted else state.carry(key, push_id, decisions), now_s)
        return self.take()

    def is_late(self, flags: int) -> bool:
        """Return whether this is a step of ctx.steps(total) that comes when the cluster has made them all."""
        return bool(flags & Flag.WANTS_TICKET) and self.budget.is_spent(self.state.version)

    # --- joining ----------------------------------------------------------------------------------------------

    def check_join(self, join: m.Join) -> None:
        """Refuse a worker of another run, cluster or model."""
        config, model, name = self.config, self.model, f"worker:{join.worker}"
        if join.run_id != config.run_id:
            raise Refused(f"this ps serves run {config.run_id}, not {join.run_id}")
        if not self.members.knows(join.worker):
            raise Refused(f"there is no worker {join.worker}: this cluster has {len(self.members)}")
        if (join.num_ps, join.placement) != (config.num_ps, config.placement):
            raise Refused(
                f"{name} expects {join.num_ps} ps and placement {join.placement}, "
                f"this cluster has {config.num_ps} and {config.placement}"
            )
        for flag, theirs, ours in (("mode", join.mode, config.mode.spec.name), ("wire", join.wire, config.wire)):
            if theirs != ours:
                raise Refused(
                    f"{name} was started with {flag} {theirs}, this ps with {ours}: give all tasks the same --{flag}"
                )
        if lines := problems(join.layout):
            raise Refused("no ps can hold this worker's model:\n" + "\n".join(lines))
        if model is None:
            return
        if lines := difference(join.layout, model.layout):
            raise Refused("this worker's model differs from the one that is trained:\n" + "\n".join(lines))
        if join.optimizer.name != model.optimizer.name:
            raise Refused(
                f"{name} brings the optimizer {join.optimizer.name}, and the ps run "
                f"{model.optimizer.name}: give all workers the same one"
            )
        if wrong := options_problem(join.optimizer.groups, model.optimizer.groups):
            raise Refused(f"{name} brings an optimizer with {wrong}: give all workers the same groups of parameters")

    def brings_model(self, join: m.Join) -> bool:
        """Return whether the shard must be made for this worker's model before it joins."""
        if self.model is not None or self.no_start or self._has_closed(join):
            return False
        return self.members.admits(join.worker, join.incarnation)

    def take_model(self, layout: Layout, optimizer: m.OptimizerSpec) -> None:
        """The shard is made for this model, if it was not before."""
        if self.model is None:
            self.model = Model(layout, optimizer)

    def joined(self, connection: int, join: m.Join, now_s: float) -> list[Action]:
        """A worker comes, or comes back, after `check_join`."""
        self._check_beginning(join)
        if self.no_start:
            return self._refuse(connection, self.no_start)
        members, worker, key = self.members, join.worker, (join.worker, join.incarnation)
        if self._has_closed(join):
            members[worker].incarnation = join.incarnation  # it may see to what is left to do
            self.out.append(SayClosed(connection, self._is_last))
            return self.take()
        known_as = (worker, members[worker].incarnation)
        if known_as[1] < join.incarnation and members.is_current(*known_as):
            self.drop(known_as, now_s)
        elif key in self.at:
            self.drop(key, now_s)
        never_left = members.is_current(*key) and worker in members.training  # this ps was away
        if not members.join(*key, now_s):
            return self._fence(connection, join)
        self.gone_since_s.pop(worker, None)
        self.returning.discard(key)
        self.beats = {c: k for c, k in self.beats.items() if k[0] != worker or k == key}
        self.keys[connection] = key  # from here on the end of this connection is the end of this worker
        self.at[key] = connection
        if not never_left:
            self._enter(worker)
        self.take_model(join.layout, join.optimizer)
        self.changed(now_s)  # enough workers may be there now
        reply = m.Joined(self.is_initialised, self.state.version, self.lineage, [])
        if not self.is_initialised:
            reply = self.rewinding.asked(self, join, reply, now_s)
        self.out.append(Seat(connection, key, reply, join.optimizer.groups, join.weight))
        return self.take()

    def _check_beginning(self, join: m.Join) -> None:
        """A ps and the chief were lost together. A new chief that comes later than those who have trained hears of
        them; if it came first, it has begun anew, and they must not go on with other values in the same lineage."""
        self.trained_in = -1 if self.is_initialised else max(self.trained_in, join.trained_in)
        is_anew = self.config.index == 0 and self.is_initialised and not self.is_started
        if is_anew and join.trained_in >= self.lineage:
            self.no_start = LOST_WITH_CHIEF
            self._fail_starters(self.no_start)

    def _has_closed(self, join: m.Join) -> bool:
        """Return whether this one, who did not hear the answer, or an earlier start of it is done. ps:0 alone says so:
        one may die between closing at another ps and closing there."""
        member = self.members[join.worker]
        return self.config.index == 0 and member.phase is Phase.CLOSED and join.incarnation >= member.incarnation

    @property
    def _is_last(self) -> bool:
        return not self.members.live and not self.members.missing

    def _fence(self, connection: int, join: m.Join) -> list[Action]:
        """Say why it may not come in like this; one that was given up for good is refused."""
        name, known_as = f"worker:{join.worker}", self.members[join.worker].incarnation
        if self.members.is_given_up(join.worker, join.incarnation):
            return self._refuse(connection, f"{name} is fenced: it was given up for good")
        is_taken = self.members.is_taken(join.worker, join.incarnation)
        why = "another process has taken its place" if is_taken else "it was silent, or stood still, for too long"
        self.say(connection, m.Fenced(known_as, is_taken, f"{name} is fenced: {why}"))
        return self.take()

    def _refuse(self, connection: int, reason: str) -> list[Action]:
        self.out.append(Refuse(connection, reason))
        return self.take()

    def attached(self, connection: int, message: m.Attach, now_s: float) -> list[Action]:
        """A heartbeat begins, or goes on. A worker that is not in (any more) has to join first."""
        key = (message.worker, message.incarnation)
        if not self.members.knows(message.worker) or not self.members.is_current(*key):
            raise Refused(f"worker:{message.worker} is not in, so nobody listens to its heartbeat")
        self.beats[connection] = key
        self.returning.discard(key)
        self.members.heard(*key, now_s)  # making the shard for its Join may have taken longer than a lease
        return self.done(connection)

    def beat(self, connection: int, position: m.Position | None, now_s: float) -> None:
        """A worker lives, and may say where it is in its data."""
        key = self.beats.get(connection)
        if key is not None:
            self.members.heard(*key, now_s)
            if position is not None and position.worker == key[0]:
                self.saving.heard(position)

    def asks(self, connection: int, now_s: float) -> None:
        """A worker makes a cold request, so it does not stand still."""
        key = self.keys.get(connection)
        if key is not None:
            self.members.progressed(key[0], now_s)

    # --- the first values -------------------------------------------------------------------------------------

    def initialises(self, connection: int, message: m.Init) -> bool:
        """Return whether these values count: a second chief's do not."""
        if self.rewinding.is_by(connection):
            return True
        if self.worker(connection)[0] != 0:
            raise Refused("only the chief initialises the model")
        if self.is_initialised:
            return False
        if self.config.index == 0 and message.lineage <= self.trained_in:  # they came after its Join
            self.no_start = LOST_WITH_CHIEF
            raise Refused(self.no_start)
        return True

    def initialised(self, connection: int, message: m.Init, now_s: float) -> list[Action]:
        """The shard has values, unless it had some before."""
        if not self.is_initialised and not self.rewinding.is_by(connection):
            self.saving.resumed(self, message)
            self.is_initialised = True
        return self.done(connection)

    def check_assigner(self, connection: int) -> None:
        """Refuse to let any other worker than the chief write."""
        if not self.rewinding.is_by(connection) and self.worker(connection)[0] != 0:
            raise Refused("only the chief may assign")

    def started(self, connection: int, message: m.Start, now_s: float) -> list[Action]:
        """A worker waits for the run to begin, or for all others to have its first values."""
        key = self.worker(connection)
        if self.no_start:
            raise Refused(self.no_start)
        if message.has_values:
            self.takes_first.discard(key)
            self.has_first[key] = connection
        else:
            self.starters[key] = connection
            if self.wanted is not None and key not in self.takes_first:
                self.state.ready.add(key)  # it has no step to finish: the switch does not wait for it
        self.changed(now_s)
        return self.take()

    def release_starters(self, now_s: float) -> None:
        """Let all go once the chief has initialised all shards and no worker is missing."""
        if self.wanted is not None:  # who joins then joins what holds afterwards; who began with the run goes on
            self._let_go([key for key in self.starters if key in self.takes_first], now_s)
            return
        if not self.is_started:
            phase = self.members[0].phase
            if phase in (Phase.LOST, Phase.CLOSED) and not self.is_initialised:
                is_aside = phase is Phase.CLOSED  # whoever has trained has initialised the model before
                told = "only serves ops, so nobody initialises the model: it must train, too"
                self._fail_starters(f"the chief {told if is_aside else 'ended before it had initialised the model'}")
                return
            chief_is_ready = any(k[0] == 0 for k in self.starters) or phase in (Phase.CLOSED, Phase.LOST)
            if not (self.is_initialised and chief_is_ready) or self.members.missing:
                return
            self.is_started = True
            live = {(worker, self.members[worker].incarnation) for worker in self.members.live}
            self.takes_first = live if len(live) > 1 else set()
        self._let_go(list(self.starters), now_s)

    def _let_go(self, keys: Iterable[Key], now_s: float) -> None:
        """Answer these starters, and those that have the first values, if all have."""
        going = {key: self.starters.pop(key) for key in keys}
        if not self.takes_first:
            going |= self.has_first
            self.has_first.clear()
        for key, connection in going.items():
            reply = self.saving.started(self, key[0], now_s)
            self.say(connection, msgspec.structs.replace(reply, is_first=key in self.takes_first))

    def _fail_starters(self, reason: str) -> None:
        for connection in self.starters.values():
            self.say(connection, m.Failed(reason))
        self.starters.clear()

    # --- waiting for others -----------------------------------------------------------------------------------

    def paused(self, connection: int, message: m.Pause, now_s: float) -> list[Action]:
        """A worker trains no more, until it resumes."""
        self.members.pause(self.worker(connection)[0])
        self.changed(now_s)
        return self.done(connection)

    def resumed(self, connection: int, message: m.Resume, now_s: float) -> list[Action]:
        """A worker trains again."""
        self._resume(self.worker(connection)[0])
        self.say(connection, self.dial)
        return self.take()

    def barrier(self, connection: int, message: m.Barrier, now_s: float) -> list[Action]:
        """A worker waits until every live worker is in its barrier."""
        key = self.worker(connection)
        worker, number = key[0], (key[1], message.number)
        if message.number and number == self.left_barriers.get(worker):
            self.say(connection, self.dial)  # all were let out, but it did not hear of it
            return self.take()
        self.members.pause(worker)
        self.in_barrier[key] = connection
        self.barrier_numbers[worker] = number
        self.changed(now_s)
        self.release_barrier()
        return self.take()

    def release_barrier(self) -> None:
        """Let all out when every live worker is in, or waits for a ticket that one inside may hold (or, if there is
        such a wait, for one that waits for it)."""
        if not self.in_barrier:
            return
        waiting = {key[0] for key in (*self.in_barrier, *self.ticket_waiters)}
        if self.ticket_waiters:
            waiting |= {key[0] for key in self.state.waiting}
        if not waiting >= set(self.members.live):
            return
        for key, connection in self.in_barrier.items():
            self.left_barriers[key[0]] = self.barrier_numbers.get(key[0], key)
            self._resume(key[0])
            self.say(connection, self.dial)
        self.in_barrier.clear()

    def steps(self, connection: int, message: m.Steps, now_s: float) -> list[Action]:
        """A worker waits for a ticket."""
        key, budget = self.worker(connection), self.budget
        if budget.total is None:
            budget.total = message.total
        elif budget.total != message.total:
            raise Refused(
                f"this run is to make {budget.total} steps, not {message.total}: ctx.steps(total) counts "
                "those of the whole cluster since the run began, so every call names the same total"
            )
        self.ticket_waiters[key] = connection
        self.release_tickets()
        self.release_barrier()
        self.changed(now_s)
        return self.take()

    def _grant(self, worker: int) -> bool:
        version = self.state.version
        if self.state.mode.has_rounds:
            return self.budget.grant_round(version)
        return self.budget.grant(worker, version)

    def _ticket_flag(self, key: Key) -> int:
        """Return whether this worker may compute one more step, for the answer that is about to leave."""
        if self.state.is_switching:
            return 0  # leave to join a round is none to make an update of one's own: it asks again in the new mode
        if key not in self.at:
            return 0  # it left since it was answered; nobody would bring this ticket back
        return Flag.TICKET if self._grant(key[0]) else 0

    def release_tickets(self) -> None:
        """Answer those who wait for a ticket, as far as it goes."""
        for key, connection in list(self.ticket_waiters.items()):
            version = self.state.version
            is_granted, is_spent = self._grant(key[0]), self.budget.is_spent(version)
            if is_granted or is_spent:
                del self.ticket_waiters[key]
                self.say(connection, m.Ticket(is_granted, is_spent, version, self.dial))

    def who_waits(self) -> set[Key]:
        """Return those who wait for others, or for the run to begin: they stand still through no fault of their own."""
        at_start = {*self.starters, *self.has_first}
        return {*at_start, *self.in_barrier, *self.ticket_waiters, *self.standing, *self.state.waiting}

    # --- leaving ----------------------------------------------------------------------------------------------

    def drop(self, key: Key, now_s: float) -> None:
        """A worker's connection ended or its lease ran out: look again at all that waited for it."""
        for waiting in (self.starters, self.has_first, self.in_barrier, self.ticket_waiters, self.standing):
            waiting.pop(key, None)
        self.takes_first.discard(key)
        self.wants_ticket.discard(key)
        was_live = self.members.is_current(*key)
        connection = self.at.pop(key, None)
        self.do(self.state.left(key, now_s), now_s)
        if was_live:
            self.gone_since_s[key[0]] = now_s
            self.budget.give_back(key[0])
        if connection is not None:
            self.out.append(End(connection))
        self.release_barrier()
        self.release_tickets()
        switching.switch_if_still(self, now_s)

    def ended(self, connection: int, now_s: float) -> list[Action]:
        """A connection is gone."""
        key = self.keys.pop(connection, None)
        if key is not None and self.at.get(key) == connection:
            self.drop(key, now_s)
        # A heartbeat that ended is no death: its lease runs on, and the worker attaches again.
        beat = self.beats.get(connection)
        if beat is not None and not self.members.is_current(*beat):
            del self.beats[connection]
        if connection in self.switchers:
            self.switchers.remove(connection)
        self.rewinding.left(connection)
        self.release_starters(now_s)
        return self.take()

    def closed(self, connection: int, message: m.Close, now_s: float) -> list[Action]:
        """A worker has done its share."""
        worker = self.worker(connection)[0]
        self.members.close(worker)
        self.changed(now_s)
        self.release_barrier()
        self.budget.give_back(worker)
        self.release_tickets()
        self.release_starters(now_s)
        self.out.append(SayClosed(connection, self._is_last))
        return self.take()

    def serves(self, connection: int, message: m.Serves, now_s: float) -> list[Action]:
        """A worker only serves ops."""
        if self.members.stand_aside(message.worker, message.incarnation):
            self.changed(now_s)
            self.release_barrier()
        return self.done(connection)

    def lost(self, connection: int, message: m.Lost, now_s: float) -> list[Action]:
        """Whoever starts tasks says that this worker will not come back."""
        member = self.members[message.worker] if self.members.knows(message.worker) else None
        last = last_incarnation(message.incarnation) if message.incarnation else None
        if member is not None and member.incarnation <= (last or member.incarnation):
            if member.phase in (Phase.TRAINING, Phase.PAUSED):
                self.drop((message.worker, member.incarnation), now_s)
            self.members.lose(message.worker, last)
            self.changed(now_s)
            self.release_barrier()
            self.release_starters(now_s)
        return self.done(connection)

    # --- time -------------------------------------------------------------------------------------------------

    def woken(self, now_s: float) -> list[Action]:
        """A grace may be over."""
        self.do(self.state.look_again(now_s), now_s)
        return self.take()

    def tick(self, now_s: float) -> list[Action]:
        """Give up workers that are silent or stand still, and those that did not come back to a ps that was started
        again."""
        for key in self.who_waits():
            self.members.progressed(key[0], now_s)
        for key, why in self._overdue(now_s):
            self.drop(key, now_s)
            self.members.fence(*key)
            self.out.append(Evicted(f"worker:{key[0]} {why}"))
        if self.returning and now_s - self.began_s > max(self.config.lease_s, COMEBACK_S):
            for key in self.returning:
                self.drop(key, now_s)  # not fenced: it may still come
            self.returning = set()
        self.rewinding.waited(self, now_s)
        self.release_starters(now_s)
        return self.take()

    def _overdue(self, now_s: float) -> list[tuple[Key, str]]:
        """Return who is to be evicted, and why."""
        members, config, beats = self.members, self.config, set(self.beats.values())
        silent = [key for key in members.expired(now_s, config.lease_s) if key in beats]
        told = [(key, f"was silent for {now_s - members.pulses[key[0]].heard_s:.1f} s") for key in silent]
        if config.index == 0 and self.is_started:
            for key in members.stalled(now_s, config.stall_s):
                if key not in silent:
                    told.append((key, f"made no progress for {members.still_s(key[0], now_s):.0f} s"))
        return told

    def is_over(self, now_s: float, is_released: bool, all_have_ended: bool) -> bool:
        """Return whether all workers have closed or are lost, and their connections have ended; silent ones are given
        up after a while. `is_released`: no launcher starts one again; `all_have_ended`: a launcher has said so."""
        members = self.members
        if self.at or members.live or members.missing:
            return False
        if now_s < self.rewinding.over_s and not (members.are_done or all_have_ended):
            return False
        if not is_released:
            return False
        waits = [
            worker
            for worker in members.gone
            if members[worker].phase in (Phase.GONE, Phase.FENCED)
            and now_s - self.gone_since_s.get(worker, self.began_s) < self.config.rejoin_s  # or gone before we began
        ]
        return members.is_over or not waits

    # --- questions --------------------------------------------------------------------------------------------

    @property
    def open_decisions(self) -> tuple[Decision, ...]:
        """What some shard may not have seen yet. What came with the dial has been carried everywhere once there was
        an update in its mode: before that all who go on carry it, into the next mode too."""
        return self.dial.decisions if self.state.version == self.dial.version else self.state.rounds.open_decisions

    def lacks(self) -> int:
        """Return how many more workers are needed before training goes on; 0 on a shard that only obeys."""
        return self.state.lacks if self.config.index == 0 and self.is_started else 0

    def decisions(self, now_s: float) -> m.Carried:
        """Answer what must be carried to the other shards."""
        return m.Carried(self.open_decisions)

    def describe(self, now_s: float) -> m.Described:
        """Answer what this ps holds."""
        config, state = self.config, self.state
        layout = self.model.layout if self.model is not None and self.is_initialised else None
        return m.Described(
            config.run_id, state.mode.spec, config.placement, config.num_ps, state.version, layout, self.lineage,
            state.turn, config.cluster,
        )  # fmt: skip

    def status(self, now_s: float) -> m.Status:
        """Answer who is missing, and whom the others wait for."""
        members, state = self.members, self.state
        awaited: set[int] = set()
        if state.rounds.votes:
            awaited |= members.training - state.rounds.votes.keys()
        if self.in_barrier:
            awaited |= set(members.live) - {key[0] for key in self.in_barrier}
        if self.wanted is not None:
            awaited |= members.training - {key[0] for key in self.standing}
        if state.waiting and not state.mode.has_rounds:
            awaited |= members.training - {key[0] for key in state.waiting}
        missing = members.missing or sorted(key[0] for key in self.takes_first if self.has_first)
        if not missing and not self.is_started and not any(k[0] == 0 for k in self.starters):
            missing = [0]
        wanted = str(self.wanted) if self.wanted is not None else ""
        told = [self._awaited(worker, now_s) for worker in sorted(awaited)]
        ended = self.saving.ended(self)
        return m.Status(
            missing, sorted(awaited), state.version, members.live, self.lacks(), wanted, told, ended
        )  # fmt: skip

    def _awaited(self, worker: int, now_s: float) -> m.Awaited:
        """Say what a worker that others wait for does, as far as a ps can know."""
        config, members = self.config, self.members
        pulse, phase = members.pulses[worker], members[worker].phase
        silent_s, still_s = now_s - pulse.heard_s, members.still_s(worker, now_s)
        if silent_s > config.lease_s / 2:
            return m.Awaited(worker, "is silent", silent_s, config.lease_s - silent_s)
        if phase is not Phase.TRAINING:
            return m.Awaited(worker, f"is {phase.value}", still_s)
        limit_s = pulse.stall_limit_s(config.stall_s)
        return m.Awaited(worker, "lives, and computes its step", still_s, limit_s - still_s if limit_s else None)

    def report(self, apply_s: float, bytes_in: int, bytes_out: int) -> PsReport:
        """Return what this ps did so far."""
        state, updates = self.state, self.state.version
        return PsReport(
            index=self.config.index,
            updates=updates,
            apply_ms=1e3 * apply_s / updates if updates else None,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            staleness={
                str(worker): {str(s): n for s, n in sorted(counts.items())}
                for worker, counts in sorted(state.staleness.items())
            },
            waited_s={str(worker): waited_s for worker, waited_s in sorted(state.waited_s.items())},
            discarded={str(worker): count for worker, count in sorted(state.discarded.items())},
            not_finite={str(worker): count for worker, count in sorted(state.not_finite.items())},
            modes=list(self.mode_changes),
            pushes={str(worker): push_id for worker, (_, push_id) in sorted(state.applied.items())},
            steps={str(worker): steps for worker, steps in sorted(self.saving.step_counts.all(state).items())},
            global_step=updates,
        )

    # --- after a death ----------------------------------------------------------------------------------------

    def recall(self, now_s: float) -> None:
        """What an earlier process of this ps knew has been set; make the rest agree with it."""
        state, members = self.state, self.members
        state.mode = make_mode(self.dial.spec, self.config.num_workers)
        state.is_switching = self.wanted is not None
        for worker, member in enumerate(list(members)):
            members.recall(worker, member.phase, member.incarnation, now_s)
        self.returning = {(worker, members[worker].incarnation) for worker in members.live}
        self.out.clear()


def make(
    config: PsConfig,
    seed: int,
    now_s: float,
    members: Membership | None = None,
    state: ShardState | None = None,
) -> Control:
    """Return the control plane of a ps that starts; a simulation brings its own parts."""
    members = members or Membership(config.num_workers, config.expected)
    state = state or ShardState(config.mode, members, config.index == 0, config.min_workers)
    announces = config.index == 0 and config.save_every != "none"
    saving = Saving(SavePolicy(config.save_every) if announces else None)
    if not announces:
        saving.due = inf, inf
    return Control(config, members, state, saving, now_s, m.Dial(0, config.mode.spec, 0), seed)
