"""The contributor set of each round: the one decision of ps:0 that every shard obeys.

Used by state.py on ps:0 only. The decision is two-phase commit with the workers as carriers:

1. a worker stages its gradient on every shard but ps:0 and waits for all acks,
2. then it stages and votes at ps:0 in one message,
3. ps:0 closes the round and keeps the contributor set until every shard is known to have applied it,
4. workers carry the set in their next pulls; a shard applies it on first sight, once.

Where one worker may put several gradients into a round, 1 and 2 repeat; between them it tells every shard that the
last one was counted (wire/frames COUNTED), so that each knows which gradients a decision means.
"""

from dataclasses import dataclass, field

import msgspec

from paceline.server.control.kept import KNOWN
from paceline.wire.decisions import COPY, Contributor, Decision


class Ballot(msgspec.Struct, array_like=True):
    """One worker's votes in the open round. The first incarnation to vote is the one that counts."""

    incarnation: int
    push_id: int = 0  # of its last vote
    given: int = 0  # votes
    counted: int = 0  # of them: finite gradients
    is_finite: bool = True  # its last one


@dataclass(slots=True)
class Rounds:
    """Votes of the open round and the decisions that some shard may not have seen yet."""

    votes: dict[int, Ballot] = field(default_factory=dict, metadata=KNOWN)
    given: dict[int, int] = field(default_factory=dict, metadata=KNOWN)  # worker -> its votes: what a mode asks about
    # What a worker that joins, pulls or ends must carry, oldest first.
    open_decisions: tuple[Decision, ...] = field(default=(), metadata=KNOWN)

    def vote(self, worker: int, incarnation: int, push_id: int, is_finite: bool, round_: int) -> Ballot | None:
        """Count a vote, and return the worker's ballot; None if another incarnation of it has voted in this round. A
        retry changes nothing."""
        # A vote for round r says that its worker pulled r from every shard: older decisions are applied everywhere.
        if self.open_decisions:
            self.open_decisions = tuple(decision for decision in self.open_decisions if decision[0] >= round_)
        ballot = self.votes.get(worker)
        if ballot is None:
            ballot = self.votes[worker] = Ballot(incarnation)
        elif ballot.incarnation != incarnation:
            return None
        if push_id > ballot.push_id:
            ballot.push_id, ballot.is_finite = push_id, is_finite
            ballot.given += 1
            ballot.counted += is_finite
            self.given[worker] = ballot.given
        return ballot

    def ballot_of(self, worker: int, incarnation: int, push_id: int) -> Ballot | None:
        """Return the ballot whose last vote this push was."""
        ballot = self.votes.get(worker)
        is_it = ballot is not None and (ballot.incarnation, ballot.push_id) == (incarnation, push_id)
        return ballot if is_it else None

    def close(self, round_: int, is_copied: bool = False) -> tuple[Contributor, ...]:
        """End the round. INVARIANT: a round has one contributor set, written down before a worker is told (I1).
        `is_copied`: what its update makes is to be saved, by every shard."""
        contributors = tuple((w, b.incarnation, b.counted) for w, b in sorted(self.votes.items()) if b.counted)
        self.votes, self.given = {}, {}
        if contributors:
            told = (*contributors, COPY) if is_copied else contributors
            self.open_decisions = (*self.open_decisions, (round_, told))
        return contributors

    def forget(self) -> None:
        """Forget all open decisions: they went into a new dial, and workers carry them with it."""
        self.open_decisions = ()
