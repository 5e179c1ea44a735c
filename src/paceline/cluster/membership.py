"""WHO is alive, and who takes part in rounds? One record a worker, kept by every ps; ps:0's is the one that decides.

Pure: the time comes in, facts go out. A worker that trains is joined and not in barrier(), pause() or close().
"""

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """What a worker is doing, as its ps knows it."""

    ABSENT = "absent"  # not joined yet
    TRAINING = "training"
    PAUSED = "paused"  # in pause() or barrier(): alive, but no round waits for it
    CLOSED = "closed"  # ended by itself
    GONE = "gone"  # its connection ended or its lease ran out; it may come back
    LOST = "lost"  # gone for good: nobody will start it again


LIVE = {Phase.TRAINING, Phase.PAUSED}
OVER = {Phase.CLOSED, Phase.LOST, Phase.ABSENT}  # ABSENT: unless it is expected


@dataclass(slots=True)
class Member:
    phase: Phase = Phase.ABSENT
    incarnation: int = 0
    heard_s: float = 0.0


class Membership:
    """The workers of one cluster. The first `expected` must come before training starts; the others may join later.

    >>> members = Membership(3, expected=2)
    >>> members.join(0, incarnation=1, now_s=0.0)
    True
    >>> sorted(members.training), members.missing, members.lacks(min_workers=2)
    ([0], [1], 1)
    """

    def __init__(self, num_workers: int, expected: int | None = None) -> None:
        self._members = [Member() for _ in range(num_workers)]
        self.expected = num_workers if expected is None else expected
        self.training: frozenset[int] = frozenset()

    def __getitem__(self, worker: int) -> Member:
        return self._members[worker]

    def __len__(self) -> int:
        return len(self._members)

    def knows(self, worker: int) -> bool:
        return 0 <= worker < len(self._members)

    def join(self, worker: int, incarnation: int, now_s: float) -> bool:
        """False: this one is fenced, because a newer incarnation of it has joined or it was given up for good."""
        member = self._members[worker]
        is_lost = member.phase is Phase.LOST and incarnation == member.incarnation
        if incarnation < member.incarnation or is_lost:
            return False
        member.incarnation, member.heard_s = incarnation, now_s
        self._set(worker, Phase.TRAINING)
        return True

    def is_current(self, worker: int, incarnation: int) -> bool:
        member = self._members[worker]
        return member.incarnation == incarnation and member.phase in LIVE

    def heard(self, worker: int, incarnation: int, now_s: float) -> None:
        if self._members[worker].incarnation == incarnation:
            self._members[worker].heard_s = now_s

    def pause(self, worker: int) -> None:
        if self._members[worker].phase is Phase.TRAINING:
            self._set(worker, Phase.PAUSED)

    def resume(self, worker: int) -> None:
        if self._members[worker].phase is Phase.PAUSED:
            self._set(worker, Phase.TRAINING)

    def close(self, worker: int) -> None:
        self._set(worker, Phase.CLOSED)

    def leave(self, worker: int, incarnation: int) -> bool:
        """The connection of this incarnation ended. False: it was not the current one, or it had closed."""
        if not self.is_current(worker, incarnation):
            return False
        self._set(worker, Phase.GONE)
        return True

    def lose(self, worker: int, incarnation: int | None = None) -> None:
        """Whoever starts tasks says: this incarnation will not come back. A newer one may."""
        member = self._members[worker]
        if member.phase is not Phase.CLOSED:
            member.incarnation = max(member.incarnation, incarnation or 1)  # one that is on its way comes too late
            self._set(worker, Phase.LOST)

    def expired(self, now_s: float, lease_s: float) -> list[tuple[int, int]]:
        """Live workers that were silent for longer than the lease, as (worker, incarnation)."""
        return [
            (w, m.incarnation) for w, m in enumerate(self._members) if m.phase in LIVE and now_s - m.heard_s > lease_s
        ]

    @property
    def missing(self) -> list[int]:
        """Workers that have not joined yet and without which training does not start; never an optional one."""
        return [w for w, m in enumerate(self._members[: self.expected]) if m.phase is Phase.ABSENT]

    @property
    def live(self) -> list[int]:
        return [w for w, m in enumerate(self._members) if m.phase in LIVE]

    @property
    def gone(self) -> list[int]:
        return [w for w, m in enumerate(self._members) if m.phase in (Phase.GONE, Phase.LOST)]

    @property
    def is_over(self) -> bool:
        """Every worker of the cluster has closed or is lost; an optional one that never came needs no end."""
        return not self.missing and all(m.phase in OVER for m in self._members)

    def lacks(self, min_workers: int) -> int:
        """How many more are needed before training goes on; one that has done its share is none to wait for."""
        there = sum(m.phase in LIVE or m.phase is Phase.CLOSED for m in self._members)
        return max(0, min_workers - there)

    def _set(self, worker: int, phase: Phase) -> None:
        self._members[worker].phase = phase
        self.training = frozenset(w for w, m in enumerate(self._members) if m.phase is Phase.TRAINING)
