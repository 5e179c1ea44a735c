"""HOW does the cost of a push grow with the number of workers? What null workers tell, and the slope of it.

Written by lab/scripts/scale_script, read by lab/matrices/scale. Pure: no clock, no file.
"""

from collections.abc import Sequence
from statistics import median

import msgspec


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    """What one null worker did."""

    count: int
    passed_s: float
    took_us: list[float]  # of the last ones
    ready_at_s: float


class Pushes(msgspec.Struct, frozen=True, kw_only=True):
    """What all of them did at the same time."""

    workers: list[Pushed]
    started_s: float  # from the first fork to the last one joined and warm

    @property
    def wait_us(self) -> float:
        """How long a worker waits for a push and its parameters: the median of all."""
        return median(us for worker in self.workers for us in worker.took_us)

    @property
    def per_s(self) -> float:
        """Pushes of all workers a second."""
        return sum(worker.count / worker.passed_s for worker in self.workers)

    @property
    def cost_us(self) -> float:
        """What a push costs the cluster: time by number, of all workers together."""
        return 1e6 / self.per_s


def growth(points: Sequence[tuple[int, float]]) -> float | None:
    """What each further worker adds, by least squares through (workers, value); None for fewer than two numbers of
    workers. Only the slope is told: a queue bends the line, and what it has at no worker at all may be below 0.

    >>> growth([(1, 110.0), (4, 140.0), (16, 260.0)])
    10.0
    """
    if len({workers for workers, _ in points}) < 2:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
