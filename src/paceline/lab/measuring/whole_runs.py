"""HOW is a mode measured from start to end? Each cell is one `paceline run` of its own, one after the other.

Called by lab/run. A failing run must never stop the rest, and nothing may be left running.
What an interrupted run of the same matrix has measured is taken from it.

1. start `paceline run`, wait until it has ended, or end it when it takes too long,
2. read summary.json and what the script told,
3. when all runs of a table have ended: the table.
"""

import os
import re
import sys
import time
from pathlib import Path

import msgspec
import psutil

from paceline.cluster.spec import Task
from paceline.errors import ClusterError
from paceline.lab import estimate
from paceline.lab.cells import REMARK, Cell, Finished, Runs, Table, Verdicts
from paceline.lab.estimate import Ahead
from paceline.lab.measuring.hosts import lacking
from paceline.lab.measuring.interrupts import undisturbed
from paceline.lab.measuring.meters import RunMeter, telemetry_cost
from paceline.lab.measuring.processes import Failed, Process
from paceline.lab.measuring.starting import check_lane, slug
from paceline.lab.progress import Progress, duration
from paceline.lab.results.kept import Kept
from paceline.lab.results.result import ResultFile
from paceline.lab.scenario import Matrix
from paceline.lab.scripts.curves import TOLD
from paceline.launchers import closing, gpus
from paceline.telemetry.paths import RunPaths

LOOK_S = 1.0
END_S = 10.0
TOLD_LINES = 6  # of a traceback


class WholeRuns:
    """The tables of whole runs of one matrix."""

    def __init__(
        self, matrix: Matrix, results: ResultFile, progress: Progress, ahead: Ahead, kept: Kept | None = None
    ) -> None:
        self.failures: dict[str, str] = {}
        self._matrix = matrix
        self._results = results
        self._progress = progress
        self._ahead = ahead
        self._kept = kept or Kept()
        cells = [cell for table in matrix.tables for cell in table.cells]
        self._count = len(cells)
        self._waiting = [cell.title for cell in cells if self._kept.of(cell) is None]  # those that did not begin yet
        self._is_all_kept = not self._waiting
        self._ended: list[tuple[float, float]] = []  # seconds that were expected, and that it took
        self._environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def run(self, folder: Path) -> None:
        """From the first run to the last table."""
        meter = RunMeter()
        every: list[tuple[Cell, Finished]] = []
        for table in self._matrix.tables:
            lines, ended = [], []
            for cell in table.cells:
                line, done = self._line(table, cell, folder)
                lines.append(line)
                ended.append((cell, done))
            every += ended
            if table.is_listed:
                self._progress.table(table.title, table.head, lines)  # 3
                self._progress.say(table.note)
            if table.verdicts is not None:
                self._judge(table.verdicts, ended)
            if not table.is_listed:
                self._progress.say(table.note)
        if cost := telemetry_cost(every):
            self._progress.say(cost)
        if self._is_all_kept:
            return
        others = meter.others()
        self._results.others(others)
        self._progress.say(f"Meanwhile other programs used {others:.2f} cores; 0 is what a measurement wants.")

    def _judge(self, verdicts: Verdicts, ended: Runs) -> None:
        """What the runs that came to their end say together; with those that did not, where that is asked for."""
        told = [(cell, done) for cell, done in ended if verdicts.has_failed or not done.failed]
        head, lines = (*verdicts.columns, REMARK), verdicts.lines(told)
        self._progress.table(verdicts.title, head, lines)
        self._results.verdicts(verdicts.title, head, lines)

    def _line(self, table: Table, cell: Cell, folder: Path) -> tuple[tuple[str, ...], Finished]:
        """A cell's line; with it what the run left, or why it failed."""
        kept = self._kept.of(cell)
        if kept is not None:
            return (*cell.labels, *table.line(cell, kept)), kept
        paths = RunPaths(unused(folder / slug(cell.title)))
        self._waiting.remove(cell.title)
        began_s = time.monotonic()
        try:
            check_lane(cell.settings)
            check_memory(cell, psutil.virtual_memory().available)
            check_cards(cell, gpus.cards() if cell.needs_gpus else 0)
            check_hosts(cell)
            self._start_and_wait(cell, paths)
            done = read(paths, is_alone=cell.is_alone)
            line = (*cell.labels, *table.line(cell, done))
        except (ClusterError, OSError, msgspec.MsgspecError) as error:
            why = f"{error}{seed_hint(cell, str(error))}"
            self._fail(table, cell, paths, why)
            return table.blank(cell, why), Finished(failed=why)
        took_s = time.monotonic() - began_s
        self._ended.append((self._ahead.cells_s[cell.title], took_s))
        self._results.cell(table, cell, done, line, took_s, paths.root.name)
        return line, done

    def _fail(self, table: Table, cell: Cell, paths: RunPaths, why: str) -> None:
        """This cell is over, and says where its script stood; the rest goes on."""
        self.failures[cell.title] = why
        traceback = last_words(paths)
        self._results.failed(cell.title, why, traceback, table.title)
        self._progress.say("\n".join([f"{cell.title}: {why}", *(f"  {line}" for line in traceback[-TOLD_LINES:])]))

    def _start_and_wait(self, cell: Cell, paths: RunPaths) -> None:
        """1. The launcher ends its tasks; a Ctrl+C here is handed on to it."""
        paths.create()
        log = paths.root / "logs" / "launcher.log"
        process = Process("paceline run", command_of(cell, paths), self._environ, log, speaks=False)
        try:
            self._wait(cell, process)
        finally:
            with undisturbed():
                process.interrupt(END_S)
        if process.code:
            raise Failed(cause(paths, process))

    def _wait(self, cell: Cell, process: Process) -> None:
        began_s = time.monotonic()
        while not process.is_gone(LOOK_S):
            passed_s = time.monotonic() - began_s
            self._progress.update(
                f"{self._matrix.name}: run {self._count - len(self._waiting)} of {self._count}, {cell.title}, "
                f"{duration(passed_s)}, about {duration(self._left_s(cell, passed_s))} left"
            )
            if passed_s > cell.limit_s:
                raise Failed(f"{too_long(cell)}; its log: {closing.shown(process.log)}")

    def _left_s(self, cell: Cell, passed_s: float) -> float:
        """Of the whole matrix: this run, those that wait, and the rows side by side."""
        this_s = estimate.left_s([self._ahead.cells_s[cell.title]], self._ended)
        later_s = estimate.left_s([self._ahead.cells_s[title] for title in self._waiting], self._ended)
        return max(0.0, this_s - passed_s) + later_s + self._ahead.rows_s


def too_long(cell: Cell) -> str:
    """Why a run was ended; of a user's script, with what sets the time."""
    raised = "; raise limit_s in the file" if cell.is_script else ""
    return f"it did not end within {cell.limit_s:g} s{raised}"


def seed_hint(cell: Cell, cause: str) -> str:
    """What to do about a script that does not know the flag that tells it its seed; "" for any other cause."""
    flag, value = cell.program[-2:] if len(cell.program) > 2 else ("", "")
    if not cell.is_script or cell.seed is None or value != str(cell.seed):
        return ""
    said = cause.partition("; its log: ")[0]  # the log's folder has the seed in its name
    if not re.search(rf"(?i)(unrecognized|no such|unknown).*{re.escape(flag.lstrip('-'))}\b", said):
        return ""
    return f'. If the script takes no {flag}, write seed_flag = "" into the file'


def command_of(cell: Cell, paths: RunPaths) -> list[str]:
    """What is started: the cell's own command, and where its results go."""
    if cell.is_alone:
        return [sys.executable, "-P", *cell.command[1:], "--told", str(paths.root / TOLD)]
    python = [sys.executable, "-P", "-m"]
    if cell.hosts:
        return [*python, cell.command[2], "--run-dir", str(paths.root), *cell.command[3:]]
    return [*python, *cell.command[:2], "--run-dir", str(paths.root), *cell.command[2:]]


def unused(folder: Path) -> Path:
    """This folder, or one beside it: in the first an interrupted run may have left something."""
    number, found = 1, folder
    while found.exists():
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found


def check_memory(cell: Cell, available_bytes: int) -> None:
    """Raise Failed when a run would not fit beside what is there."""
    if available_bytes < cell.needs_bytes:
        needs, free = (f"{size / 1e9:.1f} GB" for size in (cell.needs_bytes, available_bytes))
        raise Failed(f"skipped: it needs about {needs} of memory, and {free} are free")


def check_cards(cell: Cell, num_cards: int) -> None:
    """Raise Failed when a run asks for more cards than there are."""
    if num_cards < cell.needs_gpus:
        raise Failed(f"skipped: it needs {cell.needs_gpus} GPUs, and {num_cards or 'none'} can be seen here")


def check_hosts(cell: Cell) -> None:
    """Raise Failed when hosts that a run needs cannot be had on this machine; one host can always be had."""
    why = lacking() if len(cell.hosts) > 1 else ""
    if why:
        raise Failed(f"skipped: two hosts are two network namespaces here, and {why}")


def read(paths: RunPaths, is_alone: bool = False) -> Finished:
    """2. What the run left; a process alone has no summary."""
    done = Finished() if is_alone else msgspec.json.decode(paths.summary.read_bytes(), type=Finished)
    told = paths.root / TOLD
    return msgspec.structs.replace(done, told=msgspec.Raw(told.read_bytes())) if told.exists() else done


class Ended(msgspec.Struct, frozen=True):
    """What summary.json says when a run went wrong."""

    error: str | None = None
    lost: list[str] = []


def last_words(paths: RunPaths) -> list[str]:
    """The traceback of the task that failed first; nothing, if there is none."""
    try:
        ended = msgspec.json.decode(paths.summary.read_bytes(), type=Ended)
        found = closing.reason(paths.logs(Task.parse(ended.lost[0])))
    except (OSError, msgspec.MsgspecError, IndexError):
        return []
    return found if found and closing.TRACEBACK in found[0] else []


def cause(paths: RunPaths, process: Process) -> str:
    """Why a run failed, in a sentence: as the first task that failed told it, else as the launcher did."""
    try:
        ended = msgspec.json.decode(paths.summary.read_bytes(), type=Ended)
    except (OSError, msgspec.MsgspecError):
        return process.cause()
    if not ended.lost:
        told = f"{ended.error}; its log: {closing.shown(process.log)}"
        return told if ended.error else process.cause()
    log = paths.logs(Task.parse(ended.lost[0]))
    reason = closing.reason(log)
    why = closing.gist(reason) or (reason[-1] if reason else "")
    return f"{ended.error}{f' ({why})' if why else ''}; its log: {closing.shown(log)}"
