"""WHAT did a stopwatch see, and what does it say about costs? From the timings of short runs to one set of costs.

Made by plan/timed_script, read by plan/calibrate and bench/plan. Pure: numbers in, numbers out.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from paceline.errors import UsageError
from paceline.plan.costs import LEAST_MS, MESSAGE_MS, Costs, LaneCosts

PARTS = ("push", "overlap", "settle", "compute")
LEAST_STEPS = 20
TRIMMED = 0.02  # of the longest: something else ran
THREADED = 1.15  # processor time over the training thread's: from there on others compute too
MOST_CONTENTION = 2.0


class Part(msgspec.Struct, frozen=True):
    """One part of a step: milliseconds on the wall and on a core, mean without the longest; and quantiles."""

    wall_ms: float = 0.0
    cpu_ms: float = 0.0
    off_ms: float = 0.0  # wall less cpu where it slept by itself, lower quartile: what it waits for undisturbed
    p10_ms: float = 0.0  # cpu
    p90_ms: float = 0.0


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker measured in its window."""

    steps: int
    wall_s: float
    cpu_s: float  # of the whole process
    ps_cpu_s: float | None
    lazy: dict[str, Part]
    eager: dict[str, Part]
    batch: float
    size_bytes: int

    @property
    def step_ms(self) -> float:
        return 1e3 * self.wall_s / self.steps if self.steps else 0.0

    @property
    def worker_ms(self) -> float:
        """Processor time of the training thread in a step."""
        return sum(part.cpu_ms for part in self.lazy.values())


def parts_of(steps: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Part]:
    """Of seconds, per step and part: [wall, cpu, how often it went to sleep].

    >>> parts_of([{"push": [0.002, 0.001, 1]}])["push"]
    Part(wall_ms=2.0, cpu_ms=1.0, off_ms=1.0, p10_ms=1.0, p90_ms=1.0)
    >>> parts_of([{"push": [0.002, 0.001, 0]}])["push"].off_ms  # another program had its core
    0.0
    """
    return {name: _part([step.get(name, (0.0, 0.0, 0.0)) for step in steps]) for name in PARTS}


def _part(seen: Sequence[Sequence[float]]) -> Part:
    if not seen:
        return Part()
    walls, cpus = sorted(w for w, _, _ in seen), sorted(c for _, c, _ in seen)
    off = sorted(max(0.0, wall - cpu) if slept else 0.0 for wall, cpu, slept in seen)
    kept = max(1, math.ceil(len(seen) * (1 - TRIMMED)))
    at = len(cpus) - 1
    return Part(
        wall_ms=1e3 * sum(walls[:kept]) / kept,
        cpu_ms=1e3 * sum(cpus[:kept]) / kept,
        off_ms=1e3 * off[at // 4],
        p10_ms=1e3 * cpus[round(0.1 * at)],
        p90_ms=1e3 * cpus[round(0.9 * at)],
    )


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One calibrating run: its first worker, and what its ps report."""

    timings: Timings
    apply_ms: float


def lane_costs(run: Measured, message_ms: float | None = None) -> LaneCosts:
    """What an exchange costs on the lane of this run. `message_ms`: a ps' work on a message, where it is known
    already; then what goes beyond is the bytes."""
    timings = run.timings
    push, read = timings.lazy["push"].cpu_ms, timings.lazy["settle"].cpu_ms
    ps_ms = 1e3 * timings.ps_cpu_s / timings.steps if timings.ps_cpu_s is not None else run.apply_ms + MESSAGE_MS
    beyond = max(LEAST_MS, ps_ms - min(run.apply_ms, ps_ms))
    message = beyond if message_ms is None else min(message_ms, beyond)
    answered = timings.eager if timings.eager["settle"].wall_ms else timings.lazy
    wake = max(0.0, answered["push"].off_ms + answered["settle"].off_ms - ps_ms)  # the ps may run inside the push
    return LaneCosts(push_ms=push, read_ms=read, message_ms=message, bulk_ms=beyond - message, wake_ms=wake)


def costs_of(shm: Measured, tcp: Measured | None, crowd: Measured | None, cores: int, num_crowd: int) -> Costs:
    """Everything, from 1 ps + 1 worker on one or two lanes and from a run that keeps all cores busy."""
    timings = shm.timings
    if timings.steps < LEAST_STEPS:
        raise UsageError(
            f"The script made {timings.steps} steps in the time; a calibration needs {LEAST_STEPS}: raise --seconds, "
            "or let the script train longer."
        )
    compute, overlap = timings.lazy["compute"], timings.lazy["overlap"]
    lane = lane_costs(shm)
    spread = math.log(compute.p90_ms / compute.p10_ms) / 2.563 if compute.p10_ms > 0 else 0.0
    threads = timings.cpu_s / timings.steps * 1e3 / max(LEAST_MS, timings.worker_ms)
    busy = threads if threads > THREADED else 1.0
    ps_ms = 1e3 * (timings.ps_cpu_s or 0.0) / timings.steps
    return Costs(
        compute_ms=compute.cpu_ms,
        device_ms=compute.off_ms if compute.off_ms > 0.02 * compute.cpu_ms else 0.0,
        compute_cores=min(float(cores), busy),
        overlap_ms=overlap.cpu_ms,
        spread=min(1.0, max(0.0, spread)),
        apply_ms=min(shm.apply_ms, ps_ms) if ps_ms else shm.apply_ms,
        size_bytes=timings.size_bytes,
        batch=timings.batch or 1.0,
        lanes={"shm": lane, **({"tcp": lane_costs(tcp, lane.message_ms)} if tcp else {})},
        contention=contention(timings, crowd.timings, cores, num_crowd) if crowd else 0.0,
        cores=cores,
        measured_step_ms=timings.step_ms,
    )


def contention(alone: Timings, crowded: Timings, cores: int, num_workers: int) -> float:
    """By how much more processor time a step takes when the other cores work too, for all of them busy."""
    if cores < 2 or not alone.worker_ms or not crowded.steps:
        return 0.0
    more = crowded.worker_ms / alone.worker_ms - 1
    total_s = crowded.cpu_s * num_workers + (crowded.ps_cpu_s or 0.0)
    others = (min(float(cores), total_s / crowded.wall_s) - 1) / (cores - 1)
    return min(MOST_CONTENTION, max(0.0, more / others)) if others > 0.1 else 0.0
