"""Everything that one ps decides: events come in, with the time they happen at; actions go out.

Driven by server/service with sockets and threads, and by the simulation of the tests with neither. Connections are
numbers here. Events of gradients are methods of Control; all others are functions of the modules beside this one
(starting, joining, waiting, leaving, switching, saving, rewinding). An event raises Refused before it has changed
anything, and returns what is to be done (actions.py).
"""

from dataclasses import dataclass, field
from math import inf

import msgspec

from paceline.checkpoint.policy import SavePolicy
from paceline.cluster.membership import Membership, Phase
from paceline.errors import ConnectionLost, Refused
from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec
from paceline.params.layout import Layout
from paceline.server.control import starting, switching, waiting
from paceline.server.control.actions import (
    Action,
    Answer,
    Entered,
    Left,
    Say,
)
from paceline.server.control.budget import Budget
from paceline.server.control.config import PsConfig
from paceline.server.control.kept import COUNTED, KNOWN
from paceline.server.control.rewinding import Rewinding
from paceline.server.control.saving import Saving
from paceline.server.control.state import ShardState
from paceline.telemetry.records import ModeChange
from paceline.wire import messages as m
from paceline.wire.decisions import Decision, Key
from paceline.wire.frames import Flag

LEAVES = (Phase.PAUSED, Phase.CLOSED, Phase.GONE, Phase.LOST)


class Model(msgspec.Struct, array_like=True):
    """What the first worker that joined trains; it never changes."""

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
                    out[place] = action._replace(flags=action.flags | waiting.ticket_flag(self, action.key))
        return out

    def do(self, actions: list[Action], now_s: float) -> None:
        """Add what the shard's state has decided, and announce, copy and mark what is to be saved."""
        self.out += self.saving.follow(self, actions, now_s)

    def say(self, connection: int, message: m.Reply) -> None:
        """Send a reply, after the journal is written."""
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
        """Look again at rounds and at workers that wait, because others train now."""
        self.do(self.state.changed(now_s), now_s)
        switching.switch_if_still(self, now_s)
        waiting.release_barrier(self)
        waiting.release_tickets(self)
        starting.release_starters(self, now_s)

    def _changes(self, worker: int, incarnation: int, phase: Phase) -> None:
        if phase in LEAVES:
            self.out.append(Left(worker, incarnation, phase))

    def enter(self, worker: int) -> None:
        """Let a worker train from now on."""
        state = self.state
        state.entered(worker)
        clock, incarnation = state.clocks.get(worker, 0), self.members[worker].incarnation
        self.out.append(Entered(worker, incarnation, clock, state.version))

    # --- gradients --------------------------------------------------------------------------------------------

    def pushed(self, connection: int, key: Key, push_id: int, base: int, flags: int, now_s: float) -> list[Action]:
        """Count, stage or discard a gradient that lies whole in its worker's slot."""
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
        waiting.release_tickets(self)
        waiting.release_barrier(self)
        return self.take()

    def staged(self, connection: int, key: Key, push_id: int, round_: int, now_s: float) -> list[Action]:
        """Hold a gradient in its slot until its round is decided, on every shard but ps:0."""
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
        """Answer a worker that asks for parameters, after the decisions that it carries; or, if ps:0 has counted what
        it staged last, after counting that."""
        self.check_current(key, connection)
        state = self.state
        self.do(state.count(key, push_id) if is_counted else state.carry(key, push_id, decisions), now_s)
        return self.take()

    def is_late(self, flags: int) -> bool:
        """Return whether this is a step of ctx.steps(total) that comes when the cluster has made them all."""
        return bool(flags & Flag.WANTS_TICKET) and self.budget.is_spent(self.state.version)

    def take_model(self, layout: Layout, optimizer: m.OptimizerSpec) -> None:
        """Note for which model the shard is made, if it was not before."""
        if self.model is None:
            self.model = Model(layout, optimizer)

    def woken(self, now_s: float) -> list[Action]:
        """Look again at the open round, whose grace may be over."""
        self.do(self.state.look_again(now_s), now_s)
        return self.take()

    # --- questions --------------------------------------------------------------------------------------------

    @property
    def is_last(self) -> bool:
        """Whether no worker trains any more, or is still to come."""
        return not self.members.live and not self.members.missing

    @property
    def open_decisions(self) -> tuple[Decision, ...]:
        """The decisions that some shard may not have seen yet. Those of the dial have been carried everywhere once
        there was an update in its mode: before that all who go on carry them, into the next mode too."""
        return self.dial.decisions if self.state.version == self.dial.version else self.state.rounds.open_decisions

    def lacks(self) -> int:
        """Return how many more workers are needed before training goes on; 0 on a shard that only obeys."""
        return self.state.lacks if self.config.index == 0 and self.is_started else 0

    # --- after a death ----------------------------------------------------------------------------------------

    def recall(self, now_s: float) -> None:
        """Make the rest agree with what an earlier process of this ps knew, which has been set."""
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
