"""HOW is a matrix measured? Everything is started once and idles on a pipe; one scenario at a time is told to run.

Called by `paceline lab run`. A failing scenario must never stop the rest, and nothing may be left running.

1. start all scenarios, wait until each is ready, warm each up,
2. look how much the idle processes use, all together,
3. each repetition: the rows in an order of its own, each between two runs of what it is compared with,
4. end everything, sum up.
"""

import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
import numpy as np

from paceline.cluster.spelling import hint
from paceline.datasets import mnist
from paceline.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TRAINING, ClusterError, UsageError
from paceline.lab import MATRICES, scenario, tables
from paceline.lab.processes import CpuMeter, Group
from paceline.lab.progress import Progress, duration
from paceline.lab.result import ResultFile, provenance
from paceline.lab.scenario import Amounts, Kind, Matrix, Pair, Segment
from paceline.lab.starting import Starter
from paceline.launchers.closing import shown
from paceline.launchers.ports import Reserved

STARTING = 2  # scenarios that start at the same time
READY_S = 180.0
SEGMENT_S = 120.0
END_S = 10.0
IDLE_S = 2.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure, how much of it, and where the results go."""

    matrix: str
    amounts: Amounts
    out: str = "runs/lab"
    only: str = ""  # rows with this in their title


def main(request: Request) -> int:
    """Measure a matrix from start to table; the exit code comes back."""
    matrix = checked(request)
    now_s = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
    out = Path(request.out).absolute()
    results = ResultFile(out, stamp)
    results.begin(provenance(matrix.name, request.amounts, now_s))
    measuring = Measuring(matrix, request.amounts, results, Progress())
    try:
        with interruptible():
            return measuring.run(out / stamp)
    except KeyboardInterrupt:
        measuring.progress.say("Interrupted: everything was ended.")
        return EXIT_INTERRUPTED
    finally:
        measuring.progress.close()
        results.close()
        print(f"Results: {shown(results.path)}", flush=True)


def checked(request: Request) -> Matrix:
    """The matrix that was asked for, or a UsageError before anything is made."""
    if request.matrix not in MATRICES:
        raise UsageError(f"There is no matrix {request.matrix!r}; {hint(request.matrix, MATRICES)}.")
    if request.amounts.reps < 1 or request.amounts.steps < 1:
        raise UsageError("--reps and --steps must be at least 1.")
    whole = MATRICES[request.matrix]()
    matrix = scenario.only(whole, request.only)
    if all(row.is_noise for row in matrix.rows):
        titles = "; ".join(row.title for row in whole.rows)
        raise UsageError(f"No row of {whole.name} has {request.only!r} in its title; the rows are: {titles}.")
    return matrix


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end the run as Ctrl+C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A second Ctrl+C while everything is being ended does not leave half of it running."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Measuring:
    """One run of one matrix."""

    def __init__(self, matrix: Matrix, amounts: Amounts, results: ResultFile, progress: Progress) -> None:
        self.progress = progress
        self._matrix = matrix
        self._amounts = amounts
        self._results = results
        self._kinds = {each.name: each.kind for each in matrix.scenarios}
        self._groups: dict[str, Group] = {}
        self._failures: dict[str, str] = {}
        self._last_s: dict[str, float] = {}
        self._pairs: list[Pair] = []
        self._others = 0.0  # cores that other programs used meanwhile

    def run(self, folder: Path) -> int:
        try:
            with Reserved() as ports:
                self._start(folder, ports)  # 1
                self._warm_up()
                self._look_idle()  # 2
                self._repeat()  # 3
                self._end()
        finally:
            with undisturbed():  # 4
                for group in self._groups.values():
                    group.kill()
        return self._sum_up()

    # --- 1 ----------------------------------------------------------------------------------------------------

    def _start(self, folder: Path, ports: Reserved) -> None:
        self.progress.update(f"{self._matrix.name}: starting {len(self._matrix.scenarios)} scenarios")
        with tempfile.TemporaryDirectory(prefix="paceline-lab-") as data:
            write_data(Path(data))
            starter = Starter(folder, Path(data), self._amounts.carrier_bytes, ports)
            names = [each.name for each in self._matrix.scenarios]
            for number, each in enumerate(self._matrix.scenarios):
                self._groups[each.name] = Group()
                try:
                    starter.start(each, self._groups[each.name])
                except (ClusterError, OSError) as error:
                    self._fail(each.name, error)
                if number >= STARTING:  # as many imports of torch at once as a small machine bears
                    self._await(names[number - STARTING])
            for name in names[-STARTING:]:
                self._await(name)

    def _await(self, name: str) -> None:
        if name in self._failures:
            return
        self.progress.update(f"{self._matrix.name}: waiting for {name}")
        try:
            self._groups[name].await_ready(time.monotonic() + READY_S)
        except ClusterError as error:
            self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> None:
        """This scenario is over; the rest goes on."""
        cause = str(error)
        self._failures[name] = cause
        self._results.failed(name, cause)
        self.progress.say(f"{name}: {cause}")
        self._groups[name].kill()

    def _warm_up(self) -> None:
        """Everything once, without keeping the times: allocators, caches, and how long a segment will take."""
        for name, kind in self._kinds.items():
            self.progress.update(f"{self._matrix.name}: warming up {name}")
            self._run(name, 0, 3 if kind is Kind.CARRIER else self._amounts.warmup_steps)

    # --- 2 ----------------------------------------------------------------------------------------------------

    def _look_idle(self) -> None:
        alive = self._alive()
        meter = CpuMeter(alive)
        time.sleep(IDLE_S)  # this is the measurement: nothing is waited for
        ours, _ = meter.cores()
        count = sum(len(group.processes) for group in alive)
        self._results.idle(ours, count)
        self.progress.say(f"Idle, {count} processes together use {100 * ours:.1f} % of one core.")

    def _alive(self) -> list[Group]:
        return [group for name, group in self._groups.items() if name not in self._failures]

    # --- 3 ----------------------------------------------------------------------------------------------------

    def _repeat(self) -> None:
        reps, seed = self._amounts.reps, self._amounts.seed
        plans = [scenario.plan(self._matrix.rows, repetition, seed) for repetition in range(reps)]
        meter = CpuMeter(self._alive())
        for repetition, segments in enumerate(plans):
            later = [segment for plan in plans[repetition + 1 :] for segment in plan]
            times: list[float | None] = []
            for at, segment in enumerate(segments):
                left_s = scenario.seconds_left([*segments[at:], *later], self._last_s)
                self.progress.update(
                    f"{self._matrix.name}: repetition {repetition + 1} of {reps}, {segment.scenario}, "
                    f"about {duration(left_s)} left"
                )
                times.append(self._measure(repetition, at, segment))
            self._pairs += scenario.pairs(segments, times)
        _, self._others = meter.cores()
        self._results.others(self._others)
        self.progress.say(f"Meanwhile other programs used {self._others:.2f} cores; 0 is what a measurement wants.")

    def _measure(self, repetition: int, at: int, segment: Segment) -> float | None:
        """The step time of the slowest worker: a step of the cluster is done when all have done theirs."""
        untimed, timed = self._amounts.of(self._kinds[segment.scenario])
        times = self._run(segment.scenario, untimed, timed)
        self._results.segment(repetition, at, segment, times)
        return None if times is None else max(times)

    def _run(self, name: str, untimed: int, timed: int) -> list[float] | None:
        if name in self._failures:
            return None
        try:
            times = self._groups[name].run(untimed, timed, SEGMENT_S)
        except ClusterError as error:
            self._fail(name, error)
            return None
        self._last_s[name] = max(times) * 1e-6 * sum(self._amounts.of(self._kinds[name]))
        return times

    # --- 4 ----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self.progress.update(f"{self._matrix.name}: ending all processes")
        for name, group in self._groups.items():
            late = [] if name in self._failures else group.end(END_S)
            if late:
                self.progress.say(f"{name}: {', '.join(late)} did not end within {END_S:g} s and was killed.")

    def _sum_up(self) -> int:
        rows = self._matrix.rows
        summaries = [tables.summarise(row, self._of(index)) for index, row in enumerate(rows)]
        cells = tables.cells(rows, summaries, self._failures, self._others)
        for summary, line in zip(summaries, cells, strict=True):
            if summary is not None:
                self._results.row(summary, line[-1])
        self.progress.table(cells)
        self.progress.say(explanation(self._amounts))
        is_broken = any(not cause.startswith("missing: ") for cause in self._failures.values())
        return EXIT_TRAINING if is_broken else EXIT_OK

    def _of(self, row: int) -> Sequence[Pair]:
        return [pair for pair in self._pairs if pair.row == row]


def explanation(amounts: Amounts) -> str:
    """How to read the table."""
    return (
        f"ratio: lower quartile over {amounts.reps} interleaved repetitions of {amounts.steps} steps, each against the "
        "mean of what ran right before and right after it (beside: the single process, or what the name says); "
        "step and beside: lower quartiles; spread: between the quartiles; two workers: the slower one."
    )


def write_data(folder: Path) -> None:
    """The training images of document 000, where every process, also a peer, can read them."""
    split = mnist.load().tensorflow_split()
    np.save(folder / "x.npy", split.train_x)
    np.save(folder / "y.npy", split.train_y)
