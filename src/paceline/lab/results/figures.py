"""WHAT did a run come to? The same few figures of every whole run, from what it left.

Used by lab/matrices/user_matrix for its lines, by lab/results/flat for results.csv, by lab/results/facts. Pure: no
process, no file, no clock.
"""

import msgspec

from paceline.cluster.slow import parse
from paceline.cluster.spec import Task
from paceline.errors import UsageError
from paceline.lab.cells import Finished, middle


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """None where a run did too little to say. Times are those of the slowest worker that is not slow on purpose."""

    first_epoch_s: float | None = None  # with the warm-up in it
    epoch_s: float | None = None  # mean of the epochs after the first; None where there was only one
    step_ms: float | None = None
    samples_per_s: float | None = None  # of all workers together
    staleness_mean: float | None = None
    staleness_p95: float | None = None
    discarded: float | None = None  # share of all steps
    wall_s: float | None = None  # from the first process to the last


def figures(done: Finished, slowed: set[int]) -> Figures:
    """
    >>> from paceline.lab.cells import Worker
    >>> made = figures(Finished(workers=[Worker(index=0, steps=4, first_epoch_s=2.0, epoch_s=1.5)]), set())
    >>> made.first_epoch_s, made.epoch_s, made.discarded
    (2.0, 1.5, 0.0)
    """
    free = done.others_than(slowed) or done.workers
    steady = [worker.epoch_s for worker in free if worker.epoch_s != worker.first_epoch_s]  # equal: there was one epoch
    steps = sum(worker.steps for worker in done.workers)
    rates = [worker.samples_per_s for worker in done.workers if worker.samples_per_s is not None]
    return Figures(
        first_epoch_s=_slowest([worker.first_epoch_s for worker in free]),
        epoch_s=_slowest(steady),
        step_ms=_slowest([worker.step_ms.median for worker in free if worker.step_ms is not None]),
        samples_per_s=sum(rates) if rates else None,
        staleness_mean=done.staleness.mean,
        staleness_p95=done.staleness.p95,
        discarded=sum(worker.discarded for worker in done.workers) / steps if steps else None,
        wall_s=done.wall_s,
    )


def _slowest(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def slowed(text: str) -> dict[Task, float]:
    """Who sleeps on purpose, and how many times as long a step takes; nobody, where an old result says it otherwise.

    >>> slowed("worker:1=4x"), slowed("as it was once written")
    ({Task(job='worker', index=1): 4.0}, {})
    """
    try:
        return dict(parse(text))
    except UsageError:
        return {}


def logged(done: Finished) -> dict[str, float]:
    """What the chief's script logged last, as far as it is a number."""
    found = done.workers[0].metrics if done.workers else {}
    return {name: value for name, value in found.items() if value is not None}


def over(values: list[float | None], digits: int) -> str:
    """The mean of several runs, and between which they lie; a dash where no run can tell.

    >>> over([1.0, 2.0], 1), over([1.0], 1), over([None], 1)
    ('1.5 (1.0-2.0)', '1.0', '-')
    """
    known = [value for value in values if value is not None]
    mean = middle(known)
    if mean is None:
        return "-"
    if len(known) < 2:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ({min(known):.{digits}f}-{max(known):.{digits}f})"
