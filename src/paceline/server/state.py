"""WHAT counts, and who is answered? The deciding half of a ps: events in, actions out.

Driven by server/service with real sockets and by tests with thousands of simulated interleavings. It must never
see a clock, a socket, a thread or a tensor: `Apply` and `Answer` are words here, service and shard make them true.

INVARIANT I2: a (worker, incarnation, push id) is applied at most once: ids of one incarnation only grow, and
`applied` remembers the last one, whatever happened to it.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.cluster.membership import Membership
from paceline.errors import ProtocolError
from paceline.modes.base import Mode
from paceline.server.rounds import Rounds, Vote
from paceline.wire.decisions import Decision, Key
from paceline.wire.frames import Outcome


class Apply(NamedTuple):
    """Make one update from the staged gradients of these, in this order."""

    contributors: tuple[Key, ...]


class Answer(NamedTuple):
    """Tell this worker what became of its push, and that it may read `version` now."""

    key: Key
    push_id: int
    outcome: Outcome
    version: int
    decisions: tuple[Decision, ...] = ()


class Free(NamedTuple):
    """Nobody will read this gradient slot again."""

    key: Key


Action = Apply | Answer | Free


@dataclass(slots=True)
class ShardState:
    """One shard's bookkeeping. `rounds` stays empty except on ps:0 of a mode that has rounds."""

    mode: Mode
    members: Membership
    is_coordinator: bool
    version: int = 0
    applied: dict[int, Key] = field(default_factory=dict)  # worker -> (incarnation, push id) last dealt with
    staged: dict[Key, tuple[int, int]] = field(default_factory=dict)  # key -> (round, push id)
    waiting: dict[Key, int] = field(default_factory=dict)  # key -> push id that waits for the round to close
    discarded: Counter[int] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    rounds: Rounds = field(default_factory=Rounds)

    def push(self, key: Key, push_id: int, base: int, is_finite: bool = True, is_late: bool = False) -> list[Action]:
        """A whole gradient has arrived: in async it counts now; on ps:0 of a round mode it is staged and voted.
        `is_late`: all steps that were asked for are made, so it does not count."""
        worker, incarnation = key
        if not self.members.is_current(worker, incarnation):
            return [Answer(key, push_id, Outcome.FENCED, self.version)]
        if (incarnation, push_id) <= self.applied.get(worker, (0, 0)):
            return [Answer(key, push_id, Outcome.DUPLICATE, self.version, self.rounds.open_decisions)]
        if is_late:
            self.applied[worker] = (incarnation, push_id)
            return self._discard(key, push_id, Outcome.DISCARDED)
        if not self.mode.has_rounds:
            return self._count_now(key, push_id, base, is_finite)
        return self._vote(key, push_id, base, is_finite)

    def _count_now(self, key: Key, push_id: int, base: int, is_finite: bool) -> list[Action]:
        self.applied[key[0]] = (key[1], push_id)
        if not is_finite:
            return self._discard(key, push_id, Outcome.NOT_FINITE)
        if not self.mode.admits(base, self.version):
            return self._discard(key, push_id, Outcome.DISCARDED)
        self.staleness[self.version - base] += 1
        self.version += 1
        return [Apply((key,)), Answer(key, push_id, Outcome.APPLIED, self.version)]

    def _discard(self, key: Key, push_id: int, outcome: Outcome) -> list[Action]:
        self.discarded[key[0]] += 1
        return [Answer(key, push_id, outcome, self.version, self.rounds.open_decisions)]

    def _vote(self, key: Key, push_id: int, base: int, is_finite: bool) -> list[Action]:
        worker, incarnation = key
        if not self.mode.admits(base, self.version):
            self.applied[worker] = (incarnation, push_id)
            return self._discard(key, push_id, Outcome.DISCARDED)
        if self.rounds.vote(worker, Vote(incarnation, push_id, is_finite), base) and is_finite:
            self.staged[key] = (base, push_id)
        self.waiting[key] = push_id
        return self.close_if_due()

    def close_if_due(self) -> list[Action]:
        """Close the open round if the mode says so; called after every vote and every change of who trains."""
        votes = self.rounds.votes
        if not votes or not self.mode.is_due(votes.keys(), self.members.training):
            return []
        for worker, vote in votes.items():
            self.applied[worker] = max(self.applied.get(worker, (0, 0)), (vote.incarnation, vote.push_id))
        voters = {(w, v.incarnation): v for w, v in votes.items()}
        contributors = self.rounds.close(self.version)
        actions: list[Action] = self._apply(contributors) if contributors else []
        for key, push_id in self.waiting.items():
            outcome = self._outcome(voters.get(key))
            if outcome is not Outcome.APPLIED:
                self.discarded[key[0]] += 1
                self.applied[key[0]] = max(self.applied.get(key[0], (0, 0)), (key[1], push_id))
            actions.append(Answer(key, push_id, outcome, self.version, self.rounds.open_decisions))
        self.waiting.clear()
        return actions

    @staticmethod
    def _outcome(vote: Vote | None) -> Outcome:
        if vote is None:
            return Outcome.DISCARDED
        return Outcome.APPLIED if vote.is_finite else Outcome.NOT_FINITE

    def stage(self, key: Key, push_id: int, round_: int) -> list[Action]:
        """On every shard but ps:0: hold the gradient until its round is decided; an ack, nothing else."""
        if not self.members.is_current(*key):
            return [Answer(key, push_id, Outcome.FENCED, self.version)]
        if round_ > self.version:
            raise ProtocolError(f"worker:{key[0]} staged round {round_} on a shard at version {self.version}")
        if round_ == self.version:
            self.staged[key] = (round_, push_id)
        return [Answer(key, push_id, Outcome.STAGED, self.version)]

    def carry(self, key: Key, push_id: int, decisions: tuple[Decision, ...]) -> list[Action]:
        """A pull that brings ps:0's decisions: apply those not seen yet, once, in order; then answer."""
        actions: list[Action] = []
        for round_, contributors in decisions:
            if round_ < self.version:
                continue
            lacking = [k for k in contributors if self.staged.get(k, (-1, 0))[0] != round_]
            if round_ > self.version or lacking:
                raise ProtocolError(
                    f"round {round_} decided with {contributors}, shard at {self.version} lacks {lacking}"
                )
            for k in contributors:
                self.applied[k[0]] = max(self.applied.get(k[0], (0, 0)), (k[1], self.staged[k][1]))
            actions += self._apply(contributors)
        actions.append(Answer(key, push_id, Outcome.APPLIED, self.version))
        return actions

    def _apply(self, contributors: tuple[Key, ...]) -> list[Action]:
        """One update. A staged gradient is dropped here, because its round is decided, and nowhere else."""
        self.staleness[0] += len(contributors)
        self.version += 1
        dropped = [k for k, (round_, _) in self.staged.items() if round_ < self.version]
        for k in dropped:
            del self.staged[k]
        free: list[Action] = [Free(k) for k in dropped if not self.members.is_current(*k)]
        return [Apply(contributors), *free]

    def left(self, key: Key) -> list[Action]:
        """A connection ended or a lease ran out. What it staged stays; the round may be due without it."""
        self.waiting.pop(key, None)
        self.members.leave(*key)
        free: list[Action] = [] if key in self.staged else [Free(key)]
        return free + self.changed()

    def changed(self) -> list[Action]:
        """Who trains has changed (pause, barrier, close, loss)."""
        return self.close_if_due() if self.is_coordinator and self.mode.has_rounds else []
