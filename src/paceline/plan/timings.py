"""WHAT did a stopwatch see, and what does it say about costs? From the timings of short runs to one set of costs.

Made by plan/timed_script, read by plan/calibrate and bench/plan. Pure: numbers in, numbers out.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from paceline.errors import UsageError
from paceline.plan.costs import LEAST_MS, MESSAGE_MS, Costs, LaneCosts, Seen

PARTS = ("push", "settle", "compute")
LEAST_STEPS = 20
LONGEST = 10.0  # times the median: more than a step (an evaluation, a save)
THREADED = 1.15  # processor time over the training thread's: from there on others compute too


class Part(msgspec.Struct, frozen=True):
    """One part of a step: milliseconds on the wall and on a core, mean of the usual steps; and quantiles."""

    wall_ms: float = 0.0
    cpu_ms: float = 0.0
    off_ms: float = 0.0  # wall less cpu where it slept by itself, lower quartile: what it waits for undisturbed
    p10_ms: float = 0.0  # cpu
    p90_ms: float = 0.0


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker measured in its window."""

    steps: int
    all_steps: int  # with those before the window: its warm-up
    wall_s: float  # up to the end of the last step
    step_ms: float  # mean of the usual steps
    process_ms: float  # processor time of the whole process in them
    ps_cpu_s: float | None
    parts: dict[str, Part]
    batch: float
    size_bytes: int

    @property
    def worker_ms(self) -> float:
        """Processor time of the training thread in a step."""
        return sum(part.cpu_ms for part in self.parts.values())


Step = Mapping[str, Sequence[float]]  # seconds by part: [wall, cpu, how often it went to sleep, cpu of the process]


def usual(steps: Sequence[Step]) -> Sequence[Step]:
    """Without those that were more than a step; whole ones, so that the parts of the others still add up.

    >>> len(usual([{"push": [wall, wall, 0, wall]} for wall in (1.0, 2.0, 9.0, 21.0)]))  # the upper median is 2 here
    3
    """
    walls = [whole_s(step) for step in steps]
    most = LONGEST * sorted(walls)[(len(walls) - 1) // 2] if walls else 0.0
    return [step for step, wall in zip(steps, walls, strict=True) if wall <= most]


def whole_s(step: Step, at: int = 0) -> float:
    """All parts of a step, by the clock; `at` 3: processor time of the whole process."""
    return sum(part[at] for part in step.values())


def mean_ms(steps: Sequence[Step], at: int = 0) -> float:
    return 1e3 * sum(whole_s(step, at) for step in steps) / len(steps) if steps else 0.0


def parts_of(steps: Sequence[Step]) -> dict[str, Part]:
    """
    >>> parts_of([{"push": [0.002, 0.001, 1, 0.001]}])["push"]
    Part(wall_ms=2.0, cpu_ms=1.0, off_ms=1.0, p10_ms=1.0, p90_ms=1.0)
    >>> parts_of([{"push": [0.002, 0.001, 0, 0.001]}])["push"].off_ms  # another program had its core
    0.0
    """
    return {name: _part([step.get(name, (0.0, 0.0, 0.0, 0.0)) for step in steps]) for name in PARTS}


def _part(seen: Sequence[Sequence[float]]) -> Part:
    if not seen:
        return Part()
    cpus = sorted(cpu for _, cpu, _, _ in seen)
    off = sorted(max(0.0, wall - cpu) if slept else 0.0 for wall, cpu, slept, _ in seen)
    at = len(cpus) - 1
    return Part(
        wall_ms=1e3 * sum(wall for wall, _, _, _ in seen) / len(seen),
        cpu_ms=1e3 * sum(cpus) / len(cpus),
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
    push, settle = timings.parts["push"], timings.parts["settle"]
    ps_ms = 1e3 * timings.ps_cpu_s / timings.steps if timings.ps_cpu_s is not None else run.apply_ms + MESSAGE_MS
    beyond = max(LEAST_MS, ps_ms - min(run.apply_ms, ps_ms))
    message = beyond if message_ms is None else min(message_ms, beyond)
    wake = max(0.0, push.off_ms + settle.off_ms - ps_ms)  # the ps may run inside the push
    return LaneCosts(
        push_ms=push.cpu_ms, read_ms=settle.cpu_ms, message_ms=message, bulk_ms=beyond - message, wake_ms=wake / 2
    )


def check_steps(workers: Sequence[Timings]) -> None:
    """A run goes on until there are enough, unless the script ends."""
    fewest = min(workers, key=lambda each: each.steps)
    if fewest.steps < LEAST_STEPS:
        raise UsageError(
            f"Your script ended by itself after {fewest.all_steps} steps, {fewest.steps} of them after the warm-up; a "
            f"calibration needs {LEAST_STEPS} of every worker: let it train longer, such as paceline plan train.py "
            "--epochs 200."
        )


def mean_step_ms(workers: Sequence[Timings]) -> float:
    """Of all workers of a run: as many over their steps a second, each in its own window."""
    check_steps(workers)
    return len(workers) / sum(1 / each.step_ms for each in workers)


def costs_of(shm: Measured, tcp: Measured | None, cores: int) -> Costs:
    """The parts, from 1 ps + 1 worker on one or two lanes."""
    timings = shm.timings
    check_steps([timings])
    compute = timings.parts["compute"]
    lane = lane_costs(shm)
    spread = math.log(compute.p90_ms / compute.p10_ms) / 2.563 if compute.p10_ms > 0 else 0.0
    threads = timings.process_ms / max(LEAST_MS, timings.worker_ms)
    busy = threads if threads > THREADED else 1.0
    ps_ms = 1e3 * (timings.ps_cpu_s or 0.0) / timings.steps
    return Costs(
        compute_ms=compute.cpu_ms,
        device_ms=compute.off_ms if compute.off_ms > 0.02 * compute.cpu_ms else 0.0,
        compute_cores=min(float(cores), busy),
        spread=min(1.0, max(0.0, spread)),
        apply_ms=min(shm.apply_ms, ps_ms) if ps_ms else shm.apply_ms,
        size_bytes=timings.size_bytes,
        batch=timings.batch or 1.0,
        lanes={"shm": lane, **({"tcp": lane_costs(tcp, lane.message_ms)} if tcp else {})},
        cores=cores,
        seen=Seen(alone_ms={"shm": timings.step_ms, **({"tcp": tcp.timings.step_ms} if tcp else {})}),
    )
