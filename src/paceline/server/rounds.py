"""WHOSE gradients make this round? The one decision of ps:0 that every shard obeys.

Used by server/state on ps:0 only. Pure. The decision is two-phase commit with the workers as carriers:

1. a worker stages its gradient on every shard but ps:0 and waits for all acks,
2. then it stages and votes at ps:0 in one message,
3. ps:0 closes the round and keeps the contributor set until every shard is known to have applied it,
4. workers carry the set in their next pulls; a shard applies it on first sight, once.
"""

from typing import NamedTuple

from paceline.wire.decisions import Decision, Key


class Vote(NamedTuple):
    incarnation: int
    push_id: int
    is_finite: bool


class Rounds:
    """Votes of the open round and the decisions that some shard may not have seen yet."""

    def __init__(self) -> None:
        self.votes: dict[int, Vote] = {}
        self._open: dict[int, tuple[Key, ...]] = {}

    def vote(self, worker: int, vote: Vote, round_: int) -> bool:
        """False: another incarnation of this worker has voted in this round already; the first one counts."""
        first = self.votes.setdefault(worker, vote)
        # A vote for round r says that its worker pulled r from every shard: older decisions are applied everywhere.
        for old in [r for r in self._open if r < round_]:
            del self._open[old]
        return first.incarnation == vote.incarnation

    def close(self, round_: int) -> tuple[Key, ...]:
        """End the round. INVARIANT: a round has one contributor set, written down before anybody is told (I1)."""
        contributors = tuple((w, v.incarnation) for w, v in sorted(self.votes.items()) if v.is_finite)
        self.votes = {}
        if contributors:
            self._open[round_] = contributors
        return contributors

    @property
    def open_decisions(self) -> tuple[Decision, ...]:
        """What whoever joins, pulls or ends must carry to the other shards, oldest first."""
        return tuple(sorted(self._open.items()))
