"""WHO is alive, and who takes part in rounds? One record a worker, kept by every ps; ps:0's is the one that decides.

Pure: the time comes in, facts go out. A worker that trains is joined and not in barrier(), pause() or close().

Two limits, not one. Silence of the heartbeat for longer than the lease: `expired`. A heartbeat without progress (no
push, no question) for longer than the stall limit: `stalled`. Whoever is evicted by one of them is *fenced*: its
process may live, so this incarnation of it counts no more, and it joins again with a higher one.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from statistics import median

import msgspec

STALL_S = 300.0  # nobody is evicted sooner, unless it is asked for
STALL_STEPS = 20  # and nobody within so many steps of its own
STEPS_KEPT = 31  # of which the median is taken
STARTS_SHIFT = 16  # incarnations of one start: so many bits
BY_HAND = 1 << 30  # from here on an incarnation is the time of a start by hand, in seconds


def first_incarnation(start: int) -> int:
    """The incarnation of a task's start-th start by a launcher; there is room for those that follow a fence.

    >>> first_incarnation(1), first_incarnation(2)
    (1, 65537)
    """
    return (start - 1 << STARTS_SHIFT) + 1


def last_incarnation(incarnation: int) -> int:
    """The highest that the same start can have come to. By hand (the clock's seconds) there is no telling: itself.

    >>> last_incarnation(1) == last_incarnation(5) == first_incarnation(2) - 1
    True
    """
    return incarnation if incarnation >= BY_HAND else (incarnation - 1 >> STARTS_SHIFT) + 1 << STARTS_SHIFT


def incarnation_by_hand(now_s: float) -> int:
    """Where nobody counts starts, the clock does: a later start has a larger one, unless the clock was set back.

    >>> incarnation_by_hand(1_790_000_000.5), incarnation_by_hand(60.0) == BY_HAND
    (1790000000, True)
    """
    return max(BY_HAND, int(now_s))


class Phase(Enum):
    """What a worker is doing, as its ps knows it."""

    ABSENT = "absent"  # not joined yet
    TRAINING = "training"
    PAUSED = "paused"  # in pause() or barrier(): alive, but no round waits for it
    CLOSED = "closed"  # ended by itself
    GONE = "gone"  # its connection ended; it may come back
    FENCED = "fenced"  # evicted, though its process may live: this incarnation is void, a newer one may come
    LOST = "lost"  # gone for good: nobody will start it again


LIVE = {Phase.TRAINING, Phase.PAUSED}
AWAY = {Phase.GONE, Phase.FENCED, Phase.LOST}
OVER = {Phase.CLOSED, Phase.LOST, Phase.ABSENT}  # ABSENT: unless it is expected


class Member(msgspec.Struct, array_like=True):
    """What must be known of a worker, also by a ps that was killed."""

    phase: Phase = Phase.ABSENT
    incarnation: int = 0


@dataclass(slots=True)
class Pulse:
    """When a worker was heard, and how long its steps take."""

    heard_s: float = 0.0
    progress_s: float = 0.0  # when it last pushed or asked for anything
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))  # between its last pushes

    def stall_limit_s(self, stall_s: float | None) -> float:
        """How long it may make no progress; None asks for the default, which knows how long its steps take."""
        if stall_s is not None:
            return stall_s
        return max(STALL_S, STALL_STEPS * median(self.steps_s)) if self.steps_s else STALL_S


@dataclass(init=False, eq=False)
class Membership:
    """The workers of one cluster. The first `expected` must come before training starts; the others may join later.

    >>> members = Membership(3, expected=2)
    >>> members.join(0, incarnation=1, now_s=0.0)
    True
    >>> sorted(members.training), members.missing, members.lacks(min_workers=2)
    ([0], [1], 1)
    """

    members: list[Member] = field(metadata={"kept": "known"})  # server/control/kept
    expected: int = field(metadata={"kept": "known"})

    def __init__(self, num_workers: int, expected: int | None = None) -> None:
        self.members = [Member() for _ in range(num_workers)]
        self.pulses = [Pulse() for _ in range(num_workers)]
        self.expected = num_workers if expected is None else expected
        self.training: frozenset[int] = frozenset()
        self.current: frozenset[tuple[int, int]] = frozenset()  # all that `is_current` is true of
        self.on_change: Callable[[int, int, Phase], None] | None = None  # (worker, incarnation, phase), for a ledger

    def __getitem__(self, worker: int) -> Member:
        return self.members[worker]

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def knows(self, worker: int) -> bool:
        return 0 <= worker < len(self.members)

    def join(self, worker: int, incarnation: int, now_s: float) -> bool:
        """False: this one is fenced, because it was evicted or given up, or a newer incarnation of it has joined."""
        if not self.admits(worker, incarnation):
            return False
        self.recall(worker, Phase.TRAINING, incarnation, now_s)
        return True

    def admits(self, worker: int, incarnation: int) -> bool:
        """Return whether this incarnation may join."""
        member = self.members[worker]
        is_void = member.phase in (Phase.LOST, Phase.FENCED)
        return incarnation > member.incarnation or (incarnation == member.incarnation and not is_void)

    def is_taken(self, worker: int, incarnation: int) -> bool:
        """Of one that may not join: whether a later start has its place. Else it may come as a newer incarnation.

        By hand, where the clock counts, one that was set back makes a later start look like an earlier one: then only
        somebody who is there has taken the place."""
        member = self.members[worker]
        is_later = member.incarnation > last_incarnation(incarnation)
        return is_later and (incarnation < BY_HAND or member.phase in LIVE)

    def is_given_up(self, worker: int, incarnation: int) -> bool:
        """Of one that may not join: whether it was said that this start of it will not come back."""
        known = self.members[worker].incarnation
        is_of_it = incarnation == known or (incarnation < BY_HAND and incarnation < known)
        return self.members[worker].phase is Phase.LOST and is_of_it

    def fence(self, worker: int, incarnation: int) -> None:
        """This one is evicted: it has left, and comes back as a newer incarnation only."""
        member = self.members[worker]
        if member.incarnation == incarnation and member.phase is Phase.GONE:
            self._set(worker, Phase.FENCED)

    def is_current(self, worker: int, incarnation: int) -> bool:
        member = self.members[worker]
        return member.incarnation == incarnation and member.phase in LIVE

    def counts(self, worker: int, incarnation: int) -> bool:
        """Whether this is the incarnation that is in, or was in last and has left by itself; never one that is void."""
        if not self.knows(worker) or self.members[worker].incarnation != incarnation:
            return False
        return self.members[worker].phase not in (Phase.ABSENT, Phase.FENCED, Phase.LOST)

    def may_come(self, worker: int, incarnation: int) -> bool:
        """Whether nobody newer than this one is known, and it was not given up, nor has closed."""
        if not self.knows(worker) or incarnation < max(1, self.members[worker].incarnation):
            return False
        return self.members[worker].phase not in (Phase.CLOSED, Phase.LOST)

    def heard(self, worker: int, incarnation: int, now_s: float) -> None:
        if self.members[worker].incarnation == incarnation:
            self.pulses[worker].heard_s = now_s

    def progressed(self, worker: int, now_s: float) -> None:
        """It has asked for something, or waits for somebody else: no step, but no stall either."""
        self.pulses[worker].progress_s = now_s

    def pause(self, worker: int) -> None:
        if self.members[worker].phase is Phase.TRAINING:
            self._set(worker, Phase.PAUSED)

    def resume(self, worker: int) -> None:
        if self.members[worker].phase is Phase.PAUSED:
            self._set(worker, Phase.TRAINING)

    def close(self, worker: int) -> None:
        self._set(worker, Phase.CLOSED)

    def stand_aside(self, worker: int, incarnation: int) -> bool:
        """It trains nothing, and counts as one that has closed. False: it is in, or this is not the newest of it."""
        if not self.may_come(worker, incarnation) or self.members[worker].phase in LIVE:
            return False
        self.members[worker].incarnation = incarnation
        self._set(worker, Phase.CLOSED)
        return True

    def leave(self, worker: int, incarnation: int) -> bool:
        """The connection of this incarnation ended. False: it was not the current one, or it had closed."""
        if not self.is_current(worker, incarnation):
            return False
        self._set(worker, Phase.GONE)
        return True

    def lose(self, worker: int, incarnation: int | None = None) -> None:
        """Whoever starts tasks says: this incarnation will not come back. A newer one may."""
        member = self.members[worker]
        if member.phase is not Phase.CLOSED:
            member.incarnation = max(member.incarnation, incarnation or 1)  # one that is on its way comes too late
            self._set(worker, Phase.LOST)

    def recall(self, worker: int, phase: Phase, incarnation: int, now_s: float) -> None:
        """What was known of a worker before; silence counts from now."""
        self.members[worker].incarnation = incarnation
        pulse = self.pulses[worker]
        pulse.heard_s = pulse.progress_s = now_s
        self._set(worker, phase)

    def expired(self, now_s: float, lease_s: float) -> list[tuple[int, int]]:
        """Live workers that were silent for longer than the lease, as (worker, incarnation)."""
        return [
            (w, m.incarnation)
            for w, m in enumerate(self.members)
            if m.phase in LIVE and now_s - self.pulses[w].heard_s > lease_s
        ]

    def stalled(self, now_s: float, stall_s: float | None) -> list[tuple[int, int]]:
        """Training workers that make no progress though they are alive, as (worker, incarnation); 0 means: never."""
        if stall_s == 0:
            return []
        return [
            (w, m.incarnation)
            for w, m in enumerate(self.members)
            if m.phase is Phase.TRAINING and now_s - self.pulses[w].progress_s > self.pulses[w].stall_limit_s(stall_s)
        ]

    def still_s(self, worker: int, now_s: float) -> float:
        """For how long it has made no progress."""
        return max(0.0, now_s - self.pulses[worker].progress_s)

    @property
    def missing(self) -> list[int]:
        """Workers that have not joined yet and without which training does not start; never an optional one."""
        return [w for w, m in enumerate(self.members[: self.expected]) if m.phase is Phase.ABSENT]

    @property
    def live(self) -> list[int]:
        return [w for w, m in enumerate(self.members) if m.phase in LIVE]

    @property
    def gone(self) -> list[int]:
        return [w for w, m in enumerate(self.members) if m.phase in AWAY]

    @property
    def is_over(self) -> bool:
        """Every worker of the cluster has closed or is lost; an optional one that never came needs no end."""
        return not self.missing and all(m.phase in OVER for m in self.members)

    @property
    def are_done(self) -> bool:
        """Every worker that there can be has come, and has closed or is lost."""
        return all(m.phase in (Phase.CLOSED, Phase.LOST) for m in self.members)

    def lacks(self, min_workers: int) -> int:
        """How many more are needed before training goes on; one that has done its share is none to wait for."""
        there = sum(m.phase in LIVE or m.phase is Phase.CLOSED for m in self.members)
        return max(0, min_workers - there)

    def _set(self, worker: int, phase: Phase) -> None:
        self.members[worker].phase = phase
        if self.on_change is not None:
            self.on_change(worker, self.members[worker].incarnation, phase)
        self.training = frozenset(w for w, m in enumerate(self.members) if m.phase is Phase.TRAINING)
        self.current = frozenset((w, m.incarnation) for w, m in enumerate(self.members) if m.phase in LIVE)
