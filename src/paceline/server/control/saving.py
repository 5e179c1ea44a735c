"""Save an update: ps:0 announces it, and every shard copies itself when it is made.

1. `--save-every` says that the next update is due: answers carry SAVE from now on, to one worker also WRITES,
2. in modes with rounds the decision about that round has a mark, so that every shard copies itself at the same round;
   elsewhere each does when the writer asks,
3. workers tell where they are after it (wire/messages Position); besides, every heartbeat says it roughly,
4. the writer fetches the copies and frees them; until then nothing else is announced. It says which copy it means, so
   what it fetches is of one version: another copy may have been asked for meanwhile.

The copied numbers are in server/copies.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from paceline.checkpoint.policy import SavePolicy
from paceline.cluster.membership import Phase
from paceline.errors import Refused
from paceline.server.control.actions import Action, Add, Answer, Apply, Copy, Restored, SayCopied, SetVersion, Store
from paceline.server.control.kept import COUNTED
from paceline.server.control.step_counts import StepCounts
from paceline.telemetry.ledger import FROM_RESUME
from paceline.wire import messages as m
from paceline.wire.frames import Flag

if TYPE_CHECKING:
    from paceline.server.control.control import Control

GIVE_UP_S = 900.0  # a writer that has not freed its copies after so long is forgotten


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy without its numbers, which server/copies has."""

    number: int
    version: int
    round: int
    lineage: int
    turn: int
    applied: dict[int, tuple[int, int]]
    steps: dict[int, int]  # each worker's that are in it, where that is known


@dataclass(slots=True)
class Saving:
    """The announced update and its copy; on ps:0 also where each worker is in its data."""

    policy: SavePolicy | None  # None: this ps announces nothing
    saved_s: float | None = field(default=None, metadata=COUNTED)  # when the last one was announced
    newest: dict[int, m.Position] = field(default_factory=dict, metadata=COUNTED)  # where each worker was last
    step_counts: StepCounts = field(default_factory=StepCounts)
    told: dict[int, tuple[int, float | None]] = field(default_factory=dict)  # its steps and samples with its buffers
    has_buffers: set[int] = field(default_factory=set)  # workers but the chief whose own buffers are here
    target: int | None = None  # the version that was announced
    due: tuple[float, float] = (0, 0.0)  # before this version and this time there is nothing to announce or to mark
    is_taken: bool = False
    flags: int = 0  # for answers that are about to leave
    copy: Snapshot | None = None
    _since_s: float = 0.0
    _writer: int = -1
    _announced: int = 0  # the number of its copy
    _copies: int = 0
    _has_heard: set[int] = field(default_factory=set)  # of the announcement; late workers, in k of n, may not
    _awaited: set[int] = field(default_factory=set)
    _collected: dict[int, m.Position] = field(default_factory=dict)

    # --- announcing -------------------------------------------------------------------------------------------

    def follow(self, control: "Control", actions: list[Action], now_s: float) -> list[Action]:
        """Announce, copy and mark as the actions of an event ask for."""
        has_jobs = False
        for place, action in enumerate(actions):
            if type(action) is Copy:
                actions[place] = self._take(control, action.version)
            has_jobs = has_jobs or type(action) is Apply or type(action) is Add
        if has_jobs:
            self.updated(control, now_s)
        if self.flags:
            for place, action in enumerate(actions):
                if type(action) is Answer and action.is_push and action.key in control.at:  # a pull reads no flags
                    actions[place] = self.marked(action)
        return actions

    def updated(self, control: "Control", now_s: float) -> None:
        """Announce the next update of ps:0 if it is to be saved; called after each update, and before the first."""
        if self.policy is None:
            return
        version = control.state.version
        is_due = self.policy.is_due(version + 1, now_s)
        if self.target is not None:
            if now_s - self._since_s < GIVE_UP_S and self._writer in control.members.live:
                return
            self.forget(control)
        if is_due and control.members.live:
            self.policy.saved(now_s)
            self.target, self._since_s, self._writer = version + 1, now_s, min(control.members.live)
            self.is_taken, self._collected, self._has_heard, self.due = False, {}, set(), (0, 0.0)
            control.state.copy_at = self.target
            self.flags = Flag.SAVE
        self.saved_s = self.policy.last_s
        if self.target is None:
            self.due = self.policy.next_due(version + 1)

    def forget(self, control: "Control") -> None:
        """Announce nothing any more."""
        self.target, self.is_taken, self.flags, control.state.copy_at = None, False, 0, None

    def marked(self, answer: Answer) -> Answer:
        """Return an answer that says that the next update will be saved, and by whom. A writer without which that
        update was made, in k of n, hears of it afterwards."""
        worker, is_late = answer.key[0], self.is_taken
        if is_late and worker != self._writer:
            return answer
        self._has_heard.add(worker)
        flags = self.flags | (Flag.WRITES if worker == self._writer else 0)
        if is_late:
            self.flags = 0
        return answer._replace(flags=answer.flags | flags)

    def started(self, control: "Control", worker: int, now_s: float) -> m.Started:
        """Return what a worker is told when it may begin: beside all else, where its predecessor was."""
        state = control.state
        if state.version == 0:
            self.updated(control, now_s)
        position = self.step_counts.goes_on(state, worker, self.newest.get(worker))
        is_next = bool(self.flags) and not self.is_taken
        if is_next:
            self._has_heard.add(worker)
        is_again = self.step_counts.has_trained(state, worker)
        decisions, dial = control.open_decisions, control.dial
        return m.Started(control.seed, state.version, decisions, dial, position, is_next, is_again)

    def ended(self, control: "Control") -> dict[int, tuple[int, int]]:
        """Return the whole passes and the steps of each worker that has closed."""
        closed = [w for w, member in enumerate(control.members) if member.phase is Phase.CLOSED]
        return {w: (self.newest[w].done, self.newest[w].steps) for w in closed if w in self.newest}

    def resumed(self, control: "Control", init: m.Init) -> None:
        """Go on counting where a checkpoint was, if the chief's first values are of one."""
        if init.seed is not None:
            control.seed = init.seed
        if init.version == 0 and init.lineage == 0:
            return
        control.lineage, control.state.version = init.lineage, init.version
        control.out.append(SetVersion(init.version))
        self.newest.update({position.worker: position for position in init.positions})
        self.told.update({position.worker: (position.steps, position.samples) for position in init.positions})
        self.step_counts.resumed(init.version, init.positions)
        control.out.append(Restored(init.version, init.lineage, FROM_RESUME))

    # --- copying ----------------------------------------------------------------------------------------------

    def _take(self, control: "Control", version: int) -> Copy:
        """Copy the announced update, which is made."""
        copy = self._copied(control, version)
        if self.target is not None and control.config.index == 0:
            self.is_taken, control.state.copy_at = True, None
            self.flags = 0 if self._writer in self._has_heard else self.flags
            # Where every push is an update, who heard of it says where it is; of the others the last heartbeat does.
            is_told = control.state.mode.has_rounds
            self._awaited = self._has_heard & set(control.members.live) if is_told else set()
            self._announced = self._copies
        return copy

    def _copied(self, control: "Control", version: int) -> Copy:
        state = control.state
        self._copies += 1
        round_ = version - state.offset
        self.copy = Snapshot(
            self._copies,
            version,
            round_,
            control.lineage,
            state.turn,
            dict(state.applied),
            self.step_counts.exact(state),
        )
        return Copy(version, self._copies, round_)

    def asked(self, control: "Control", message: m.Copy, now_s: float) -> m.Copied:
        """Return what the writer of a checkpoint is told about the copy, which may be made now."""
        state = control.state
        has_rounds = state.mode.has_rounds
        if message.is_now and not control.is_initialised:
            raise Refused("there is nothing to save yet: no chief has brought its model")
        if message.position is not None and message.position.worker == message.worker:
            self.note(message.position, has_rounds)
        if message.decisions:  # the writer carries ps:0's open decisions first
            control.do(state.carry((message.worker, message.incarnation), 0, message.decisions)[:-1], now_s)
        if message.is_now:
            control.out.append(self._copied(control, state.version))
        copy = self.copy
        if copy is not None and (message.is_now or message.is_again):
            return self._told(control, copy, list(self.newest.values()), self._behind(control, copy.version))
        if control.config.index != 0:
            return self._told(control, copy, (), ()) if copy is not None else m.Copied(False, True)
        if self.target is None:
            return m.Copied(is_taken=False)
        if not self.is_taken and not has_rounds:
            control.out.append(self._take(control, state.version))
        if self.is_taken and self._announced != self._copies:
            self.forget(control)  # another worker had a newer one made, and saves that
            return m.Copied(is_taken=False)
        if not self.is_taken:
            is_missed = state.copy_at != self.target or state.version >= self.target
            if is_missed:
                self.forget(control)
            return m.Copied(is_taken=False, is_wanted=not is_missed, has_rounds=has_rounds)
        awaited = self._awaited & set(control.members.live) - self._collected.keys()
        assert self.copy is not None
        return self._told(control, self.copy, {**self.newest, **self._collected}.values(), awaited)

    def _behind(self, control: "Control", version: int) -> list[int]:
        """Return the workers that have not said where they are at this version."""
        known = {w for w, position in list(self.newest.items()) if position.version == version}
        return sorted(set(control.members.live) - known)

    def _told(
        self, control: "Control", copy: Snapshot, positions: Iterable[m.Position], awaited: Iterable[int]
    ) -> m.Copied:
        where = [msgspec.structs.replace(p, steps=copy.steps.get(p.worker, p.steps)) for p in positions]
        return m.Copied(
            is_taken=True,
            is_wanted=True,
            version=copy.version,
            round=copy.round,
            has_rounds=control.state.mode.has_rounds,
            lineage=copy.lineage,
            seed=control.seed,
            turn=copy.turn,
            spec=control.state.mode.spec,
            applied=copy.applied,
            awaited=sorted(awaited),
            positions=sorted(where, key=lambda p: p.worker),
            decisions=control.open_decisions if control.config.index == 0 else (),
            buffers_of={worker: self.told.get(worker, (0, 0.0)) for worker in (0, *sorted(self.has_buffers))},
            number=copy.number,
        )

    # --- where workers are ------------------------------------------------------------------------------------

    def note(self, position: m.Position, has_rounds: bool) -> None:
        """Note where a worker is; its buffers have come before."""
        self.newest[position.worker] = position
        self.told[position.worker] = position.steps, position.samples
        if self.target is not None and (not has_rounds or position.version >= self.target):
            self._collected[position.worker] = position

    def heard(self, position: m.Position) -> None:
        """Note where a heartbeat says that a worker is; one that stands where it stood keeps what it said in full.

        Called without the lock, so all that iterates over `newest` takes a copy of it first."""
        known = self.newest.get(position.worker)
        is_newer = known is not None and not known.at and position.groups is not None
        if known is None or known.numbers != position.numbers or is_newer:
            self.newest[position.worker] = position

    def carried(self, control: "Control", worker: int) -> None:
        """Store a worker's buffers, which came with its request, as they are after the update that is to be saved."""
        if worker:
            self.has_buffers.add(worker)
        control.out.append(Store(worker))


# --- events -----------------------------------------------------------------------------------------------------------


def position(
    control: "Control", connection: int, message: m.Position, now_s: float, has_buffers: bool = False
) -> list[Action]:
    """Take a worker's position after the update that is to be saved, without an answer. It may bring its buffers; the
    chief's are all carried tensors."""
    key = control.keys.get(connection)
    if key is not None and key[0] == message.worker:
        control.saving.note(message, control.state.mode.has_rounds)
        if has_buffers:
            control.saving.carried(control, message.worker)
    return control.take()


def copy(control: "Control", connection: int, message: m.Copy, now_s: float, has_buffers: bool = False) -> list[Action]:
    """Answer the worker that writes a checkpoint, on a connection of its own."""
    check_writer(control, connection, message.worker, message.incarnation)
    reply = control.saving.asked(control, message, now_s)
    if has_buffers:
        control.saving.carried(control, message.worker)
    if reply.is_taken:
        control.out.append(SayCopied(connection, reply))
    else:
        control.say(connection, reply)
    return control.take()


def free_copy(control: "Control", connection: int, message: m.FreeCopy, now_s: float) -> list[Action]:
    """Let the next update be announced: the writer is done. The memory stays for the next copy."""
    check_writer(control, connection, message.worker, message.incarnation)
    if control.saving.target is not None and control.saving.is_taken:
        control.saving.forget(control)
    return control.done(connection)


def save_soon(control: "Control", connection: int, message: m.SaveSoon, now_s: float) -> list[Action]:
    """Save one of the next updates, for a launcher whose terminal was closed."""
    saving = control.saving
    if not control.is_started or not control.members.training or saving.policy is None:
        raise Refused("no worker trains here, or nothing is saved")
    saving.policy.want()
    saving.due = 0, 0.0
    return control.done(connection)


def check_writer(control: "Control", connection: int, worker: int, incarnation: int) -> None:
    """Refuse to save for a worker that is none of the run. It saves on a connection of its own, also while its other
    one is away for a moment, or has closed."""
    is_other = control.keys.get(connection) not in (None, (worker, incarnation))
    if is_other or not control.members.counts(worker, incarnation):
        raise Refused(f"worker:{worker} is another one by now, or none: only a worker of the run may save")
