"""HOW are scenarios measured side by side? All are started once and idle on a pipe; one at a time is told to run.

Called by lab/run. A failing scenario must never stop the rest, and nothing may be left running.
Repetitions that an interrupted run of the same matrix has brought to their end are taken from it.
What no row can use any more, because the row or what is beside it has failed, does not run.
One group of rows after the other, each with processes of its own:

1. start its scenarios, wait until each is ready, warm each up,
2. look how much the idle processes use, all together,
3. each repetition: the rows in an order of its own, each between two runs of what it is compared with,
4. end everything.

When the last group is done: the tables.
"""

import tempfile
import time
from collections.abc import Container, Sequence
from pathlib import Path

import numpy as np

from paceline.datasets import mnist
from paceline.errors import ClusterError
from paceline.lab import scenario, tables
from paceline.lab.cells import REMARK
from paceline.lab.estimate import GUESS_START_S, Ahead
from paceline.lab.measuring.interrupts import undisturbed
from paceline.lab.measuring.meters import CpuMeter
from paceline.lab.measuring.processes import Group, Times
from paceline.lab.measuring.starting import Starter
from paceline.lab.progress import Progress, duration
from paceline.lab.results.kept import Kept
from paceline.lab.results.result import ResultFile
from paceline.lab.scenario import Amounts, Matrix, Measured, Pair, RowVerdicts, Segment
from paceline.launchers.ports import Reserved

STARTING = 2  # scenarios that start at the same time
READY_S = 180.0
SEGMENT_S = 120.0
END_S = 10.0
IN_PARTS = (
    "Of the segment at the lower quartile; the parts add up to its step. wait: no thread of the client has anything to "
    "do. feeder: the share of the step that is not waiting; near 100 %, a faster worker, or one more, brings nothing."
)
IDLE_S = 2.0


class Repetitions:
    """The rows of one matrix."""

    def __init__(
        self, matrix: Matrix, results: ResultFile, progress: Progress, ahead: Ahead, kept: Kept | None = None
    ) -> None:
        self.failures: dict[str, str] = {}
        self._kept = kept or Kept()
        self._progress = progress
        self._matrix = matrix
        self._name = matrix.name
        self._amounts = matrix.amounts
        self._results = results
        self._kinds = {each.name: each.kind for each in matrix.scenarios}
        self._loads = {each.name: each.load_bytes for each in matrix.scenarios}
        self._groups: dict[str, Group] = {}
        self._last_s = dict(ahead.segments_s)  # of each scenario; at first what is expected
        self._pairs: list[Pair] = []
        self._divided: dict[str, list[Times]] = {}  # of scenarios that say where their time goes
        self._others = dict(self._kept.others)  # by group: cores that other programs used meanwhile
        self._plans = {  # by group and repetition
            (group, each): scenario.plan(matrix.rows, each, self._amounts.seed, group)
            for group in scenario.groups(matrix.rows)
            for each in range(self._amounts.reps)
        }
        self._left = [key for key, each in self._plans.items() if self._kept.repetition(*key, len(each)) is None]

    def run(self, folder: Path) -> None:
        """From the first process to the last table."""
        parts = scenario.groups(self._matrix.rows)
        for number, group in enumerate(parts):
            self._name = self._matrix.name + (f", part {number + 1} of {len(parts)}" if len(parts) > 1 else "")
            self._take_kept(group)
            left = [repetition for each, repetition in self._left if each == group]
            if left:
                self._run_group(folder, group, left)
            else:
                needed = {each.name for each in scenario.of_group(self._matrix, group)}
                self.failures |= {name: why for name, why in self._kept.failures.items() if name in needed}
        self._sum_up()

    def _take_kept(self, group: int) -> None:
        """Repetitions that were measured before count."""
        for repetition in range(self._amounts.reps):
            segments = self._plans[group, repetition]
            ran = self._kept.repetition(group, repetition, len(segments)) or []
            if not ran:
                continue
            self._pairs += scenario.pairs(segments, [max(each.us) if each.us else None for each in ran])
            for each in ran:
                if each.us and each.parts:
                    self._divided.setdefault(each.scenario, []).append(Times(us=each.us, parts=each.parts))

    def _run_group(self, folder: Path, group: int, left: Sequence[int]) -> None:
        self._groups = {}
        try:
            with Reserved() as ports, tempfile.TemporaryDirectory(prefix="paceline-lab-") as data:
                write_data(Path(data))
                starter = Starter(folder, Path(data), self._amounts.carrier_bytes, ports)
                self._start(starter, group)  # 1
                self._warm_up(group)
                if self._useful(group):
                    self._look_idle()  # 2
                    self._repeat(group, left)  # 3
                else:
                    self._leave_out(group, left)
                self._end()
        finally:
            with undisturbed():  # 4
                for each in self._groups.values():
                    each.kill()

    # --- 1 ----------------------------------------------------------------------------------------------------

    def _start(self, starter: Starter, group: int) -> None:
        scenarios = scenario.of_group(self._matrix, group)
        self._prepare(group, f"starting {len(scenarios)} scenarios")
        names = [each.name for each in scenarios]
        for number, each in enumerate(scenarios):
            self._groups[each.name] = Group(is_stopped_between=each.is_stopped_between)
            try:
                starter.start(each, self._groups[each.name])
            except (ClusterError, OSError) as error:
                self._fail(each.name, error)
            if number >= STARTING:  # as many imports of torch at once as a small machine bears
                self._await(group, names[number - STARTING])
        for name in names[-STARTING:]:
            self._await(group, name)

    def _prepare(self, group: int, what: str) -> None:
        """What is going on before the group is measured; all of it is still left."""
        self._progress.update(f"{self._name}: {what}, about {duration(self._later_s(group - 1))} left")

    def _await(self, group: int, name: str) -> None:
        if name in self.failures:
            return
        self._prepare(group, f"waiting for {name}")
        try:
            self._groups[name].await_ready(time.monotonic() + READY_S)
        except ClusterError as error:
            self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> None:
        """This scenario is over; the rest goes on."""
        cause = str(error)
        self.failures[name] = cause
        self._results.failed(name, cause)
        self._progress.say(f"{name}: {cause}")
        self._groups[name].kill()

    def _useful(self, group: int) -> set[str]:
        """The scenarios of a group that a row still needs: not those that could only stand beside what has failed."""
        return {each.scenario for each in useful(self._plans[group, 0], self.failures)}

    def _warm_up(self, group: int) -> None:
        """Everything once, without keeping the times: allocators, caches, and how long a segment will take."""
        for name in [name for name in self._groups if name in self._useful(group)]:
            self._prepare(group, f"warming up {name}")
            self._run(name, 0, self._amounts.warm_up(self._kinds[name]))

    # --- 2 ----------------------------------------------------------------------------------------------------

    def _look_idle(self) -> None:
        alive = self._alive()
        meter = CpuMeter(alive)
        time.sleep(IDLE_S)  # this is the measurement: nothing is waited for
        ours, _ = meter.cores()
        count = sum(len(group.processes) for group in alive)
        self._results.idle(ours, count)
        self._progress.say(f"Idle, {count} processes together use {100 * ours:.1f} % of one core.")

    def _alive(self) -> list[Group]:
        return [group for name, group in self._groups.items() if name not in self.failures]

    # --- 3 ----------------------------------------------------------------------------------------------------

    def _repeat(self, group: int, left: Sequence[int]) -> None:
        meter = CpuMeter(self._alive())
        try:
            for number, repetition in enumerate(left):
                later = [segment for each in left[number + 1 :] for segment in self._plans[group, each]]
                self._once(repetition, self._plans[group, repetition], later, self._later_s(group))
        finally:
            _, others = meter.cores()
            self._others[group] = max(self._others.get(group, 0.0), others)
            self._results.others(self._others[group], "rows", group)
        told = f"{self._others[group]:.2f}"
        self._progress.say(f"Meanwhile other programs used {told} cores; 0 is what a measurement wants.")

    def _leave_out(self, group: int, left: Sequence[int]) -> None:
        """Nothing of the group can be measured here: it is said, and a run that goes on need not try again."""
        self._progress.say(f"{self._name}: skipped, because none of its rows can be measured here.")
        for repetition in left:
            self._once(repetition, self._plans[group, repetition])

    def _later_s(self, group: int) -> float:
        """How long the groups after this one will take: what is left of each, and its start."""
        later = [key for key in self._left if key[0] > group]
        starts = [each for number in {key[0] for key in later} for each in scenario.of_group(self._matrix, number)]
        segments = [segment for key in later for segment in useful(self._plans[key], self.failures)]
        return GUESS_START_S * len(starts) + scenario.seconds_left(segments, self._last_s)

    def _once(
        self, repetition: int, segments: Sequence[Segment], later: Sequence[Segment] = (), later_s: float = 0.0
    ) -> None:
        """`later`: the segments of the group after these; `later_s`: how long the groups after it will take."""
        times: list[float | None] = []
        for at, segment in enumerate(segments):
            if not is_useful(segments, at, self.failures):
                self._results.segment(repetition, at, segment, None)
                times.append(None)
                continue
            remaining = useful(segments, self.failures, at) + useful(later, self.failures)
            left_s = scenario.seconds_left(remaining, self._last_s) + later_s
            self._progress.update(
                f"{self._name}: repetition {repetition + 1} of {self._amounts.reps}, {segment.scenario}, "
                f"about {duration(left_s)} left"
            )
            times.append(self._measure(repetition, at, segment))
        self._pairs += scenario.pairs(segments, times)

    def _measure(self, repetition: int, at: int, segment: Segment) -> float | None:
        """The step time of the slowest worker: a step of the cluster is done when all have done theirs."""
        untimed, timed = self._amounts.of(self._kinds[segment.scenario], self._loads[segment.scenario])
        times = self._run(segment.scenario, untimed, timed)
        self._results.segment(repetition, at, segment, times)
        if times is not None and times.parts:
            self._divided.setdefault(segment.scenario, []).append(times)
        return None if times is None else max(times.us)

    def _run(self, name: str, untimed: int, timed: int) -> Times | None:
        if name in self.failures:
            return None
        try:
            times = self._groups[name].run(untimed, timed, SEGMENT_S)
        except ClusterError as error:
            self._fail(name, error)
            return None
        self._last_s[name] = max(times.us) * 1e-6 * sum(self._amounts.of(self._kinds[name], self._loads[name]))
        return times

    # --- 4 ----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self._progress.update(f"{self._name}: ending all processes")
        for name, group in self._groups.items():
            late = [] if name in self.failures else group.end(END_S)
            if late:
                self._progress.say(told_late(name, late))

    def _sum_up(self) -> None:
        rows = self._matrix.rows
        summaries = [tables.summarise(row, self._of(index)) for index, row in enumerate(rows)]
        judged = max((self._others.get(row.group, 0.0) for row in rows if row.bar is not None), default=0.0)
        cells = tables.cells(rows, summaries, self.failures, judged)
        for row, summary, line in zip(rows, summaries, cells, strict=True):
            if summary is not None:
                self._results.row(row, summary, line[-1])
        self._progress.table(self._matrix.title, tables.COLUMNS, cells)
        self._progress.say(explanation(self._amounts))
        if self._divided:
            self._progress.table("Where the client's step goes, µs", *tables.divided(self._in_order()))
            self._progress.say(IN_PARTS)
        measured = Measured(pairs={row.title: self._of(index) for index, row in enumerate(rows)}, others=self._others)
        for verdicts in self._matrix.verdicts:
            self._judge(verdicts, measured)

    def _judge(self, verdicts: RowVerdicts, measured: Measured) -> None:
        """What the rows say together."""
        head, lines = (*verdicts.columns, REMARK), verdicts.lines(measured)
        self._progress.table(verdicts.title, head, lines)
        self._results.verdicts(verdicts.title, head, lines)
        if verdicts.note:
            self._progress.say(verdicts.note)

    def _in_order(self) -> list[tuple[str, list[tuple[float, dict[str, float]]]]]:
        """Scenario by scenario: the times of all segments, each with its parts."""
        measured = [(name, self._divided.get(name, [])) for name in self._kinds]
        return [(name, [(max(each.us), each.parts) for each in times]) for name, times in measured if times]

    def _of(self, row: int) -> Sequence[Pair]:
        return [pair for pair in self._pairs if pair.row == row]


def is_useful(segments: Sequence[Segment], at: int, failed: Container[str]) -> bool:
    """Whether a row can still have its time from this segment: nothing of it has failed, nor what is beside it.

    >>> both = [Segment("a"), Segment("b", 0), Segment("a"), Segment("c", 1), Segment("a")]
    >>> [is_useful(both, at, {"b"}) for at in range(5)]
    [False, False, True, True, True]
    """

    def is_whole(row: int) -> bool:
        if not 0 <= row < len(segments) or segments[row].row is None:
            return False
        return not any(each.scenario in failed for each in segments[max(0, row - 1) : row + 2])

    return is_whole(at) if segments[at].row is not None else is_whole(at - 1) or is_whole(at + 1)


def useful(segments: Sequence[Segment], failed: Container[str], begin: int = 0) -> list[Segment]:
    """Those from there on of which a row can still have its time."""
    return [segments[at] for at in range(begin, len(segments)) if is_useful(segments, at, failed)]


def told_late(name: str, late: Sequence[str]) -> str:
    """
    >>> told_late("Ray", ["Ray"]), told_late("async", ["ps:0", "worker:0"])
    ('Ray did not end within 10 s and was killed.', 'async: ps:0, worker:0 did not end within 10 s and were killed.')
    """
    who = name if list(late) == [name] else f"{name}: {', '.join(late)}"
    return f"{who} did not end within {END_S:g} s and {'was' if len(late) == 1 else 'were'} killed."


def explanation(amounts: Amounts) -> str:
    """How to read the table."""
    return (
        f"ratio: lower quartile over {amounts.reps} interleaved repetitions of {amounts.steps} steps, each against the "
        "mean of what ran right before and right after it (beside: the single process, or what the name says); "
        "step and beside: lower quartiles; spread: between the quartiles; several workers: the slowest one, without "
        "those that are slow on purpose."
    )


def write_data(folder: Path) -> None:
    """The training images of document 000, where every process, also a peer, can read them."""
    split = mnist.load().tensorflow_split()
    np.save(folder / "x.npy", split.train_x)
    np.save(folder / "y.npy", split.train_y)
