"""One shard's gradients: which count, which wait for a round, and when their workers are answered.

Driven by control.py. The time comes in as an argument, and `Apply` and `Answer` are values that server/core performs.

INVARIANT I2: a (worker, incarnation, push id) is applied at most once: ids of one incarnation only grow, and
`applied` remembers the last one, whatever happened to it.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.cluster.membership import Membership
from paceline.errors import ProtocolError
from paceline.modes.base import Mode
from paceline.server.control.actions import Action, Add, Answer, Apply, Copy, Free, Part, Wake
from paceline.server.control.kept import COUNTED, KNOWN
from paceline.server.control.rounds import Ballot, Rounds
from paceline.wire.decisions import COPY, Contributor, Decision, Key
from paceline.wire.frames import Flag, Outcome

EARLY_S = 1e-4  # a grace that ends so soon has ended
ROUND_SHARE = 0.2  # how much the newest round moves the measured time of a round


class Staged(NamedTuple):
    """What a worker has staged for `round` (in this shard's versions): `counted` gradients in its sum, the last of
    them `counted_id`, and one in its slot, `push_id`, that may or may not count (0: none)."""

    round: int
    push_id: int
    counted: int = 0
    counted_id: int = 0


class Held(NamedTuple):
    """A push whose answer waits; `outcome` is None until its round closes."""

    push_id: int
    since_s: float
    outcome: Outcome | None = None


@dataclass(slots=True)
class ShardState:
    """One shard's bookkeeping. `rounds` stays empty except on ps:0 of a mode that has rounds."""

    mode: Mode
    members: Membership
    is_coordinator: bool
    min_workers: int = 1
    version: int = field(default=0, metadata=KNOWN)
    offset: int = field(default=0, metadata=KNOWN)  # this shard's version less ps:0's, when rounds began
    turn: int = field(default=0, metadata=KNOWN)  # switches of the mode so far
    is_switching: bool = False
    applied: dict[int, Key] = field(default_factory=dict, metadata=KNOWN)  # by worker: the last push dealt with
    staged: dict[Key, Staged] = field(default_factory=dict, metadata=KNOWN)
    waiting: dict[Key, Held] = field(default_factory=dict)
    ready: set[Key] = field(default_factory=set)  # those who stand still until the mode has changed
    clocks: dict[int, int] = field(default_factory=dict, metadata=KNOWN)  # bounded: worker -> steps done
    floor: int = field(default=0, metadata=KNOWN)  # what the slowest had done, at most
    discarded: Counter[int] = field(default_factory=Counter, metadata=COUNTED)
    not_finite: Counter[int] = field(default_factory=Counter, metadata=COUNTED)
    staleness: defaultdict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter), metadata=COUNTED)
    waited_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float), metadata=COUNTED)
    rounds: Rounds = field(default_factory=Rounds)
    round_s: float = 0.0  # how long a round takes until it is due
    closed_s: float | None = None  # when the last round of this mode closed
    due_s: float | None = None  # since when the open round is due
    copy_at: int | None = None  # the version that is to be saved, where rounds make versions

    # --- a gradient -------------------------------------------------------------------------------------------

    def push(
        self, key: Key, push_id: int, base: int, is_finite: bool = True, is_late: bool = False, now_s: float = 0.0
    ) -> list[Action]:
        """A whole gradient has arrived: in async it counts now; on ps:0 of a round mode it is staged and voted.
        `is_late`: all steps that were asked for are made, so it does not count."""
        worker, incarnation = key
        if key not in self.members.current:
            return [Answer(key, push_id, Outcome.FENCED, self.version)]
        if (incarnation, push_id) <= self.applied.get(worker, (0, 0)):
            return self._again(key, push_id, now_s)
        if self.mode.has_rounds and self.is_coordinator and not is_late:
            return self._vote(key, push_id, base, is_finite, now_s)
        self.applied[worker] = (incarnation, push_id)
        actions: list[Action] = []
        is_old = self.mode.has_rounds  # on a shard that obeys: it was sent before the mode changed
        outcome = Outcome.DISCARDED if is_late or is_old else self._count(actions, key, push_id, base, is_finite)
        if outcome is not Outcome.APPLIED:
            self._note(worker, outcome)
        may_wait = self.is_coordinator and (self.mode.keeps_clocks or self.min_workers > 1)
        if may_wait and not is_late and self._must_wait(worker):
            self.waiting[key] = Held(push_id, now_s, outcome)
            return actions + self.release(now_s)
        actions.append(self._answer(key, push_id, outcome))
        return actions + self.release(now_s) if self.waiting else actions

    def _again(self, key: Key, push_id: int, now_s: float) -> list[Action]:
        """Answer a retry of what was dealt with. One that must wait waits as its first try did."""
        if key in self.waiting:
            return []
        if self.is_coordinator and not self.mode.has_rounds and not self._may_go_on(key[0]):
            self.waiting[key] = Held(push_id, now_s, Outcome.DUPLICATE)
            return []
        ballot = self.rounds.ballot_of(*key, push_id)
        outcome = Outcome.DUPLICATE
        if ballot is not None:
            outcome = Outcome.ADDED if ballot.is_finite else Outcome.NOT_FINITE
        return [self._answer(key, push_id, outcome)]

    def _count(self, actions: list[Action], key: Key, push_id: int, base: int, is_finite: bool) -> Outcome:
        """Count a gradient where every push is an update; only one that is not finite makes none."""
        if not is_finite:
            return Outcome.NOT_FINITE
        staleness = self.version - base
        self.staleness[key[0]][staleness] += 1
        self.version += 1
        actions.append(Apply((Part(key, push_id),), 1 + staleness if self.mode.spec.staleness_scale else 1))
        return Outcome.APPLIED

    def _note(self, worker: int, outcome: Outcome) -> None:
        self.discarded[worker] += 1
        if outcome is Outcome.NOT_FINITE:
            self.not_finite[worker] += 1

    def _answer(self, key: Key, push_id: int, outcome: Outcome, flags: int = 0) -> Answer:
        if self.is_switching:
            flags |= Flag.SWITCH
        return Answer(key, push_id, outcome, self.version, self.rounds.open_decisions, flags)

    # --- waiting for others, where every push is an update ----------------------------------------------------

    def _must_wait(self, worker: int) -> bool:
        """Return whether this worker, which has just done a step, must wait for slower or for missing ones."""
        if self.mode.keeps_clocks:
            self.clocks[worker] = self.clocks.get(worker, 0) + 1
        return not self._may_go_on(worker)

    def _may_go_on(self, worker: int) -> bool:
        if self.lacks:
            return False
        if not self.mode.keeps_clocks or self.is_switching:
            return True
        return self.mode.may_read(self.clocks.get(worker, 0) - self._slowest())

    def _slowest(self) -> int:
        slowest = min((self.clocks.get(w, 0) for w in self.members.training), default=0)
        self.floor = max(self.floor, slowest)
        return slowest

    @property
    def lacks(self) -> int:
        """How many more workers are needed before training goes on."""
        return self.members.lacks(self.min_workers) if self.min_workers > 1 else 0

    def release(self, now_s: float) -> list[Action]:
        """Answer those who waited for others and need not any more."""
        free = [k for k, held in self.waiting.items() if held.outcome is not None and self._may_go_on(k[0])]
        return [self._let_go(key, now_s) for key in free]

    def _let_go(self, key: Key, now_s: float, outcome: Outcome | None = None) -> Answer:
        held = self.waiting.pop(key)
        self.waited_s[key[0]] += now_s - held.since_s
        told = held.outcome if held.outcome is not None else outcome
        assert told is not None
        return self._answer(key, held.push_id, told, Flag.WAITED)

    def entered(self, worker: int) -> None:
        """Set the clock of a worker that joins or trains again, in bounded mode: no slower than the slowest, and if no
        other one trains, no slower than the slowest was before."""
        self.closed_s = None
        if self.mode.keeps_clocks:
            others = [self.clocks.get(w, 0) for w in self.members.training if w != worker]
            self.clocks[worker] = max(self.clocks.get(worker, 0), min(others, default=self.floor))

    # --- rounds, on ps:0 --------------------------------------------------------------------------------------

    def _vote(self, key: Key, push_id: int, base: int, is_finite: bool, now_s: float) -> list[Action]:
        worker, incarnation = key
        if not self.mode.admits(base, self.version):
            self.applied[worker] = (incarnation, push_id)
            self._note(worker, Outcome.DISCARDED)
            return [self._answer(key, push_id, Outcome.DISCARDED)]
        if key in self.waiting:
            return []  # a retry: it is counted, and waits for its round
        ballot = self.rounds.vote(worker, incarnation, push_id, is_finite, base)
        if ballot is not None and is_finite:
            self._stage(key, push_id, base)
        if ballot is not None and self.mode.adds_up and self._may_add(ballot):
            return self._added(key, push_id, is_finite) + self.close_if_due(now_s)
        self.waiting[key] = Held(push_id, now_s)
        return self.close_if_due(now_s)

    def _may_add(self, ballot: Ballot) -> bool:
        """Return whether this worker goes on at once, into the same round. Not if its vote closes the round."""
        if self.is_switching or self.due_s is not None:
            return False
        return self.mode.may_read(ballot.given) and not self.mode.is_due(self.rounds.given, self.members.training)

    def _added(self, key: Key, push_id: int, is_finite: bool) -> list[Action]:
        self.applied[key[0]] = (key[1], push_id)
        if not is_finite:
            self._note(key[0], Outcome.NOT_FINITE)
            return [self._answer(key, push_id, Outcome.NOT_FINITE)]
        return [*self._counted(key, push_id), self._answer(key, push_id, Outcome.ADDED)]

    def close_if_due(self, now_s: float = 0.0) -> list[Action]:
        """Close the open round if the mode says so; called after every vote and every change of who trains."""
        given, training = self.rounds.given, self.members.training
        if not given or self.lacks or not (self.mode.is_due(given, training) or self._waits_for_none()):
            self.due_s = None
            return []
        if self.due_s is None:
            self.due_s = now_s
            if self.closed_s is not None:
                took_s = now_s - self.closed_s
                self.round_s += (took_s - self.round_s) * (ROUND_SHARE if self.round_s else 1.0)
            grace_s = self._grace_s()
            if grace_s > 0:
                return [Wake(grace_s)]
        else:
            left_s = self.due_s + self._grace_s() - now_s
            if left_s > EARLY_S:
                return [Wake(left_s)]
        return self._close(now_s)

    def _waits_for_none(self) -> bool:
        """Return whether no worker can put more into the round, though the mode would take it: all wait, or (while the
        mode changes) all who have not stood still yet are in."""
        if self.is_switching:
            return self.members.training - {k[0] for k in self.ready} <= self.rounds.given.keys()
        return self.mode.adds_up and not self._may_grow()

    def _may_grow(self) -> bool:
        """Return whether any worker that trains can add to the round. One that waits for it cannot: a successor, say,
        of one that voted in it."""
        given, waiting = self.rounds.given, {k[0] for k in self.waiting}
        return any(w not in waiting and self.mode.may_read(given.get(w, 0)) for w in self.members.training)

    def _grace_s(self) -> float:
        """Return how long a round that is due waits for those who could still add to it."""
        grace_s = self.mode.grace_s(self.round_s)
        return grace_s if grace_s > 0 and not self.is_switching and self._may_grow() else 0.0

    def _close(self, now_s: float) -> list[Action]:
        self.due_s, self.closed_s = None, now_s
        voters = {(w, b.incarnation): b for w, b in self.rounds.votes.items()}
        for (worker, incarnation), ballot in voters.items():
            self.applied[worker] = max(self.applied.get(worker, (0, 0)), (incarnation, ballot.push_id))
        is_copied = self.copy_at == self.version + 1
        contributors = self.rounds.close(self.version, is_copied)
        actions: list[Action] = self._apply(contributors, self.version) if contributors else []
        if contributors and is_copied:
            actions.append(Copy(self.version))
        for key in list(self.waiting):
            outcome = self._outcome(voters.get(key))
            if outcome is not Outcome.APPLIED:
                self._note(key[0], outcome)
                dealt_with = (key[1], self.waiting[key].push_id)
                self.applied[key[0]] = max(self.applied.get(key[0], (0, 0)), dealt_with)
            actions.append(self._let_go(key, now_s, outcome))
        return actions

    @staticmethod
    def _outcome(ballot: Ballot | None) -> Outcome:
        if ballot is None:
            return Outcome.DISCARDED
        return Outcome.APPLIED if ballot.is_finite else Outcome.NOT_FINITE

    # --- rounds, on every shard -------------------------------------------------------------------------------

    def stage(self, key: Key, push_id: int, round_: int) -> list[Action]:
        """Hold a gradient until its round is decided, on every shard but ps:0; only acknowledge it."""
        if not self.members.is_current(*key):
            return [Answer(key, push_id, Outcome.FENCED, self.version)]
        if round_ > self.version:
            raise ProtocolError(f"worker:{key[0]} staged round {round_} on a shard at version {self.version}")
        if round_ == self.version and self.mode.has_rounds:
            self._stage(key, push_id, round_)
        return [Answer(key, push_id, Outcome.STAGED, self.version)]

    def _stage(self, key: Key, push_id: int, round_: int) -> None:
        old = self.staged.get(key)
        if old is None or old.round != round_:
            self.staged[key] = Staged(round_, push_id)
        elif push_id > old.counted_id:
            self.staged[key] = Staged(round_, push_id, old.counted, old.counted_id)

    def count(self, key: Key, push_id: int) -> list[Action]:
        """Add up what this worker staged last, which ps:0 has counted: its slot is needed for the next one."""
        staged = self.staged.get(key)
        ack = Answer(key, push_id, Outcome.ADDED, self.version)
        if staged is None or staged.push_id != push_id or staged.round != self.version:
            return [ack]
        return [*self._counted(key, push_id), ack]

    def _counted(self, key: Key, push_id: int) -> list[Action]:
        old = self.staged[key]
        self.staged[key] = Staged(old.round, 0, old.counted + 1, push_id)
        return [Add(key, old.counted == 0, push_id)]

    def carry(self, key: Key, push_id: int, decisions: tuple[Decision, ...]) -> list[Action]:
        """Apply the decisions of ps:0 that a pull brings and that are new here, once, in order; then answer."""
        actions: list[Action] = []
        for decided, contributors in decisions:
            round_ = decided + self.offset
            if round_ < self.version:
                continue
            is_copied = contributors[-1:] == (COPY,)
            contributors = contributors[:-1] if is_copied else contributors
            lacking = [c for c in contributors if not self._has(c, round_)]
            if round_ > self.version or lacking:
                raise ProtocolError(
                    f"round {round_} decided with {contributors}, shard at {self.version} lacks {lacking}"
                )
            for worker, incarnation, _ in contributors:
                staged = self.staged[worker, incarnation]
                dealt_with = (incarnation, max(staged.push_id, staged.counted_id))
                self.applied[worker] = max(self.applied.get(worker, (0, 0)), dealt_with)
            actions += self._apply(contributors, round_)
            if is_copied:
                actions.append(Copy(self.version))
        actions.append(Answer(key, push_id, Outcome.APPLIED, self.version, is_push=False))
        return actions

    def _has(self, contributor: Contributor, round_: int) -> bool:
        worker, incarnation, count = contributor
        staged = self.staged.get((worker, incarnation))
        if staged is None or staged.round != round_:
            return False
        return count == staged.counted or (count == staged.counted + 1 and staged.push_id > 0)

    def _apply(self, contributors: tuple[Contributor, ...], round_: int) -> list[Action]:
        """Make one update. A staged gradient is dropped here, because its round is decided, and nowhere else."""
        parts = []
        for worker, incarnation, count in contributors:
            self.staleness[worker][0] += count
            staged = self.staged[worker, incarnation]
            has_slot = count > staged.counted
            push_id = staged.push_id if has_slot else staged.counted_id
            parts.append(Part((worker, incarnation), push_id, count, staged.counted > 0, has_slot))
        self.version += 1
        return [Apply(tuple(parts), round=self.version - 1 - self.offset), *self._drop_staged(round_)]

    def _drop_staged(self, up_to: int) -> list[Action]:
        dropped = [k for k, staged in self.staged.items() if staged.round <= up_to]
        for k in dropped:
            del self.staged[k]
        return [Free(k) for k in dropped if not self.members.is_current(*k)]

    # --- who takes part ---------------------------------------------------------------------------------------

    def left(self, key: Key, now_s: float = 0.0) -> list[Action]:
        """Take out a worker. What it staged stays; the round may be due without it."""
        self.waiting.pop(key, None)
        self.ready.discard(key)
        self.members.leave(*key)
        free: list[Action] = [] if key in self.staged else [Free(key)]
        return free + self.changed(now_s)

    def changed(self, now_s: float = 0.0) -> list[Action]:
        """Look again at the open round, or at workers that wait, because others train now."""
        self.closed_s = None  # how long this round takes says nothing about others
        return self.look_again(now_s)

    def look_again(self, now_s: float = 0.0) -> list[Action]:
        """Close the round if it is due, or answer those who need not wait any more."""
        if not self.is_coordinator:
            return []
        return self.close_if_due(now_s) if self.mode.has_rounds else self.release(now_s)

    # --- beginning anew ---------------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Void what was staged, voted for or waited for: the shard is given other values."""
        self.rounds.votes, self.rounds.given, self.rounds.open_decisions = {}, {}, ()
        self.staged.clear()
        self.waiting.clear()
        self.clocks.clear()
        self.floor, self.due_s, self.closed_s, self.copy_at = 0, None, None, None

    # --- another mode -----------------------------------------------------------------------------------------

    def begin_switch(self, now_s: float = 0.0) -> list[Action]:
        """Have every worker stand still before its next step; the answer to its push says so."""
        self.is_switching = True
        return self.changed(now_s)

    def switch(self, mode: Mode) -> list[Action]:
        """Take the new mode, as no worker is between two steps. Open decisions are carried with its dial."""
        assert not self.rounds.votes and not self.waiting
        self.is_switching = False
        self.ready.clear()
        self.rounds.forget()
        return self._take_mode(mode, self.turn + 1)

    def align(self, mode: Mode, turn: int, version: int) -> list[Action]:
        """Obey the new mode, on every shard but ps:0. `version` is ps:0's: rounds are counted from there."""
        if turn <= self.turn:
            return []
        self.offset = self.version - version
        return self._take_mode(mode, turn)

    def _take_mode(self, mode: Mode, turn: int) -> list[Action]:
        self.mode, self.turn, self.closed_s = mode, turn, None
        self.clocks.clear()
        self.floor = 0
        return self._drop_staged(self.version)
