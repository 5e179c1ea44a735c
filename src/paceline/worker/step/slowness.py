"""Slow a worker down (`--slow`) by a sleep in every step, for studies of stragglers.

Made for one worker; called once a step by the thread that trains. Must never count time in which the worker waited for
others: a machine that is five times slower computes, sends and receives five times as long, and waits as long as it
must. In mode async it makes a fifth of the steps.
"""

import time
from collections import deque
from collections.abc import Callable

from paceline.cluster.slow import parse
from paceline.cluster.spec import Task

FIRST_STEPS = 10
PROBE_EVERY, PROBE_STEPS = 100, 5  # after so many steps, so many without sleeps
PROBE_SKIPS = 2  # of those, the first, which run from a cold cache
KEPT = 60  # steps without sleeps whose times are kept
PAYS = 10  # steps in which what a probe left out is slept
NEWEST = 0.05  # weight of the newest step in the mean of the others


class Slowness:
    """Makes steps take `factor` times as long as without it, less the time reported to `waited`.

    `hold_back` belongs between the gradient and its push. There, and only there, the parameters that the gradient
    rests on grow old while the worker sleeps, as they do on a slow machine; a sleep after the push would end with
    fresh parameters, and the next gradient would come in time.

    A worker that sleeps computes from a cold cache, so its own time grows by sleeping alone. Its first steps are left
    as they are, to know how long they take, and a few now and then, which are made up for afterwards; what sleeping
    adds to the others is taken off the sleep. Of these times the lower quartile counts: the first ones are those of a
    host on which all tasks compute at once, and a task that waits for a core is not slow.
    """

    def __init__(
        self,
        factor: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.factor = factor
        self.slept_s = 0.0  # in all; marked in what is measured
        self._clock = clock
        self._sleep = sleep
        self._waited_s = 0.0
        self._warm: deque[float] = deque(maxlen=KEPT)  # own time of steps without sleeps
        self._cold_s = 0.0  # own time of the others, an exponential mean
        self._steps = 0
        self._owed_s, self._pays = 0.0, 0
        self._since_s = clock()

    def begin(self) -> None:
        """Begin the next step now; leave out the time before."""
        self._since_s, self._waited_s = self._clock(), 0.0

    def waited(self, seconds: float) -> None:
        """Leave out so many seconds, for which this worker has just waited for others."""
        self._waited_s += seconds

    def hold_back(self) -> None:
        """Sleep for this step, which lasts since the last call or `begin`."""
        own_s = max(0.0, self._clock() - self._since_s - self._waited_s)
        self._steps += 1
        after_first = self._steps - FIRST_STEPS
        probe = (after_first - 1) % (PROBE_EVERY + PROBE_STEPS) - PROBE_EVERY  # 0, 1, …: which step of a probe
        if after_first <= 0:
            self._warm.append(own_s)
        elif probe < 0:
            self._sleep_for(own_s)
        else:
            if probe >= PROBE_SKIPS:
                self._warm.append(own_s)
            owed_s = self.factor * min(own_s, self._warm_s) - own_s
            self._owed_s, self._pays = self._owed_s + owed_s, PAYS
        self.begin()

    def _sleep_for(self, own_s: float) -> None:
        sleep_s = self.factor * own_s * self._share(own_s) - own_s
        if self._pays:
            sleep_s += self._owed_s / self._pays
            self._owed_s, self._pays = self._owed_s * (1 - 1 / self._pays), self._pays - 1
        if sleep_s > 0:
            self._sleep(sleep_s)
            self.slept_s += sleep_s

    @property
    def _warm_s(self) -> float:
        return sorted(self._warm)[len(self._warm) // 4]

    def _share(self, own_s: float) -> float:
        """Return how much of its own time a step would take without the sleeps."""
        self._cold_s += (own_s - self._cold_s) * (NEWEST if self._cold_s else 1.0)
        return min(1.0, self._warm_s / self._cold_s) if self._cold_s else 1.0


def of(text: str, task: Task) -> Slowness | None:
    """Return the slowness that `--slow` gives this task; None if it gives none.

    >>> of("worker:1=5x", Task("worker", 0)) is None
    True
    """
    factor = parse(text).get(task, 1.0)
    return Slowness(factor) if factor > 1 else None


def mark(factor: float) -> str:
    """Return what a slowed worker's lines say about it.

    >>> mark(5.0)
    'slowed 5x by --slow'
    """
    return f"slowed {factor:g}x by --slow"
