"""HOW does a worker become slower than it is? By an honest sleep in every step, as long as `--slow` says.

Made for one worker, for studies of stragglers; called once a step by the thread that trains.
Must never count time in which the worker waited for others: a machine that is five times slower computes, sends
and receives five times as long, and waits as long as it must. In async nobody is waited for: it makes a fifth of
the steps.
"""

import time
from collections.abc import Callable
from statistics import median

from paceline.cluster.slow import parse
from paceline.cluster.spec import Task

FIRST_STEPS = 10
NEWEST = 0.05


class Slowness:
    """Makes steps take `factor` times as long as without it; the time that `waited` is told of is left out.

    `hold_back` belongs between the gradient and its push. There, and only there, the parameters that the gradient
    rests on grow old while the worker sleeps, as they do on a slow machine; a sleep after the push would end with
    fresh parameters, and the next gradient would come in time.

    A worker that sleeps computes from a cold cache, so its own time grows by sleeping alone. Its first steps are left
    as they are, to know how long they take; what sleeping adds to them is taken off the sleep.
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
        self._warm: list[float] = []  # own time of the first steps
        self._cold_s = 0.0  # own time of steps since then, an exponential mean
        self._since_s = clock()

    def begin(self) -> None:
        """The next step begins now: what came before is none of its time."""
        self._since_s, self._waited_s = self._clock(), 0.0

    def waited(self, seconds: float) -> None:
        """So long this worker has just waited for others."""
        self._waited_s += seconds

    def hold_back(self) -> None:
        """Sleep for this step, which lasts since the last call or `begin`."""
        own_s = max(0.0, self._clock() - self._since_s - self._waited_s)
        if len(self._warm) < FIRST_STEPS:
            self._warm.append(own_s)
        else:
            sleep_s = self.factor * own_s * self._share(own_s) - own_s
            if sleep_s > 0:
                self._sleep(sleep_s)
                self.slept_s += sleep_s
        self.begin()

    def _share(self, own_s: float) -> float:
        """How much of its own time a step would take without the sleeps."""
        self._cold_s += (own_s - self._cold_s) * (NEWEST if self._cold_s else 1.0)
        return min(1.0, median(self._warm) / self._cold_s) if self._cold_s else 1.0


def of(text: str, task: Task) -> Slowness | None:
    """What `--slow` says about this task; None: it runs as fast as it can.

    >>> of("worker:1=5x", Task("worker", 0)) is None
    True
    """
    factor = parse(text).get(task, 1.0)
    return Slowness(factor) if factor > 1 else None


def mark(factor: float) -> str:
    """What a slowed worker's lines say about it.

    >>> mark(5.0)
    'slowed 5x by --slow'
    """
    return f"slowed {factor:g}x by --slow"
