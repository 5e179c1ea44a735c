"""WHAT does one see while a run goes on? A live table in a terminal, plain lines elsewhere.

Called by launchers/supervisor. Must never wait for a task: it reads what telemetry has written so far.
"""

import os
import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from paceline import files
from paceline.cluster.spec import ClusterSpec, Task
from paceline.launchers.closing import metrics
from paceline.launchers.crew import STEPPED, size_bytes
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.records import RUNS, SERVES, Tick

TAIL_BYTES = 64 * 1024
SHOWN = re.compile(  # by the launcher
    rb"^job_name : |^task_index : |^Cluster: job |^Initialize GrpcChannelCache |^Found by: |" + STEPPED.pattern
)
TOLD = ("warning", "mode")  # events that the user sees at once
NOBODY: Mapping[Task, int] = {}
HAS_BEGUN = Tick(phase="train")  # of a worker that has told nothing itself
COLUMNS = ("task", "step", "global step", "steps/s", "metrics", "phase")


class Line(Tick, frozen=True, kw_only=True):
    """A tick, or an event that is told in words, as it stands in a telemetry file; other kinds are skipped."""

    kind: str = ""
    text: str = ""


class Tail:
    """What was written to a growing file since the last look, in whole lines; of much only the end."""

    def __init__(self, path: Path, is_news_only: bool = False) -> None:
        self._path = path
        self._read_to = size_bytes(path) if is_news_only else 0

    def lines(self) -> list[bytes]:
        try:
            with files.reading(self._path.parent.parent, self._path) as file:
                size = file.seek(0, 2)
                file.seek(max(self._read_to, size - TAIL_BYTES))
                text = file.read()
                complete = text.rfind(b"\n") + 1  # the rest of the last line comes next time
                self._read_to = file.tell() - len(text) + complete
        except OSError:
            return []
        return text[:complete].splitlines()


class Ticks:
    """The newest tick of every task, and what was told in words, read from the ends of growing files. `shows_logs`:
    also what tasks print, from now on, but for what the launcher shows itself."""

    def __init__(self, cluster: ClusterSpec, paths: RunPaths, shows_logs: bool = False) -> None:
        self.newest: dict[Task, Tick] = {}
        tasks = [*cluster.ps, *cluster.workers]
        self._told = {task: Tail(paths.telemetry(task)) for task in tasks}
        self._printed = {task: Tail(paths.logs(task), is_news_only=True) for task in tasks} if shows_logs else {}
        self._decoder = msgspec.json.Decoder(Line)

    def update(self) -> list[str]:
        """Read what was written since the last call; warnings and changes of mode come back, and what was printed, a
        line each with the task's name."""
        told = []
        for task, tail in self._told.items():
            for line in map(self._line, tail.lines()):
                if line.kind == "tick":
                    self.newest[task] = line
                elif line.kind in TOLD and line.text:
                    told.append(f"{task}: {line.text}")
        for task, tail in self._printed.items():
            said = (raw.decode(errors="replace").rstrip() for raw in tail.lines() if not SHOWN.search(raw))
            told += [f"{task}: {text}" for text in said if text]
        return told

    def _line(self, line: bytes) -> Line:
        try:
            return self._decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return Line()


class View(Protocol):
    """What the launcher shows a run with."""

    period_s: float

    def update(self, codes: Mapping[Task, int], restarts: Mapping[Task, int] = NOBODY) -> None:
        """Show how things stand: the exit codes of the tasks that have ended, and how often who was started again."""

    def say(self, text: str) -> None:
        """Print something that stays."""

    def close(self) -> None:
        """Say what was told last, and show nothing more."""


class PlainLines:
    """One line every three seconds, for pipes and CI."""

    period_s = 3.0

    def __init__(
        self, cluster: ClusterSpec, paths: RunPaths, started: int | None = None, shows_logs: bool = False
    ) -> None:
        self._workers = cluster.workers
        self._started = started
        self._ticks = Ticks(cluster, paths, shows_logs)
        self._began = time.monotonic()
        self._shown = ""
        self._shown_s = 0.0

    def update(self, codes: Mapping[Task, int], restarts: Mapping[Task, int] = NOBODY) -> None:
        self._tell()
        newest = counted(self._workers, self._ticks.newest)
        if any(tick.is_seen for tick in newest.values()):
            self._show_plain(codes)
            return
        workers = present(self._workers, self._started, {*newest, *codes})
        parts = [worker_text(task, newest.get(task), codes.get(task), restarts.get(task, 0)) for task in workers]
        trained = [] if runs_ops(workers, newest) else [f"global step {global_step(newest)}"]
        self._show([*trained, *parts])

    def _show_plain(self, codes: Mapping[Task, int]) -> None:
        """Of programs that tell nothing of steps: how busy every task is."""
        newest = self._ticks.newest
        parts = [f"{task} {'ended' if task in codes else busy(newest[task])}" for task in sorted(newest)]
        self._show(parts)

    def _show(self, parts: Sequence[str]) -> None:
        """A line, unless it has just been said: at the end of a run one comes out of turn."""
        now_s, text = time.monotonic(), " | ".join(parts)
        if text != self._shown or now_s - self._shown_s >= self.period_s:
            self._shown, self._shown_s = text, now_s
            self.say(f"[{now_s - self._began:5.0f} s] {text}")

    def say(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        self._tell()

    def _tell(self) -> None:
        for text in self._ticks.update():
            self.say(text)


class LiveTable:
    """A table in a terminal, redrawn only when update() is called, by no thread of its own."""

    period_s = 0.5

    def __init__(
        self,
        cluster: ClusterSpec,
        paths: RunPaths,
        console: Console,
        started: int | None = None,
        shows_logs: bool = False,
    ) -> None:
        self._cluster = cluster
        self._started = started
        self._ticks = Ticks(cluster, paths, shows_logs)
        self._live = Live(console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
        self._live.start()

    def update(self, codes: Mapping[Task, int], restarts: Mapping[Task, int] = NOBODY) -> None:
        self._tell()
        table = Table(*COLUMNS)
        newest = counted(self._cluster.workers, self._ticks.newest)
        for task in [*self._cluster.ps, *present(self._cluster.workers, self._started, {*newest, *codes})]:
            table.add_row(*row(task, newest.get(task), codes.get(task), restarts.get(task, 0)))
        self._live.update(table, refresh=True)

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._tell()
        self._live.stop()

    def _tell(self) -> None:
        for text in self._ticks.update():
            self.say(text)


def make_view(cluster: ClusterSpec, paths: RunPaths, started: int | None = None, shows_logs: bool = False) -> View:
    """The table in a terminal; plain lines in a pipe, and with CI set. `started`: present(), `shows_logs`: Ticks."""
    console = Console()
    if console.is_terminal and sys.stdout.isatty() and not os.environ.get("CI"):
        return LiveTable(cluster, paths, console, started, shows_logs)
    return PlainLines(cluster, paths, started, shows_logs)


def present(workers: Sequence[Task], started: int | None, seen: Collection[Task]) -> list[Task]:
    """Those to show: of an elastic cluster the first `started`, and of the others who has come.

    >>> [str(task) for task in present([Task("worker", i) for i in range(4)], 2, {Task("worker", 3)})]
    ['worker:0', 'worker:1', 'worker:3']
    """
    return [task for place, task in enumerate(workers) if started is None or place < started or task in seen]


def row(task: Task, tick: Tick | None, code: int | None, restarts: int = 0) -> tuple[str, ...]:
    """One task's cells.

    >>> row(Task("worker", 0), Tick(step=5, global_step=9, steps_per_s=2.0, phase="train"), None)
    ('worker:0', '5', '9', '2.0', '', 'train')
    """
    now = ", ".join(part for part in (phase(tick, code), restarted(restarts)) if part)
    if tick is None:
        return str(task), "", "", "", "", now
    if tick.is_seen:
        return str(task), "", "", "", busy(tick), now
    if task.job == "ps":
        stale = "" if tick.staleness_mean is None else f"staleness {tick.staleness_mean:.2f}"
        told = "  ".join(part for part in (tick.mode, stale) if part)
        return (
            str(task),
            str(tick.version),
            str(tick.global_step),
            f"{tick.updates_per_s:.1f}",
            told,
            now,
        )
    if tick.phase in (SERVES, RUNS) or tick is HAS_BEGUN:
        return str(task), "", "", "", "", now
    rate = f"{tick.steps_per_s:.1f}"
    return named(task, tick), str(tick.step), str(tick.global_step), rate, metrics(tick.metrics), now


def busy(tick: Tick) -> str:
    """What the launcher sees of a task that tells nothing itself.

    >>> busy(Tick(cores=0.5, rss_bytes=3 << 20))
    '0.50 cores, 3 MiB'
    """
    return f"{tick.cores or 0.0:.2f} cores, {tick.rss_bytes >> 20} MiB"


def named(task: Task, tick: Tick) -> str:
    """A task's name, with the GPU that it trains on, if any.

    >>> named(Task("worker", 1), Tick(device="/gpu:1 (virtual)")), named(Task("worker", 1), Tick(device="/cpu:0"))
    ('worker:1 on /gpu:1 (virtual)', 'worker:1')
    """
    return f"{task} on {tick.device}" if "gpu" in tick.device else str(task)


def worker_text(task: Task, tick: Tick | None, code: int | None, restarts: int = 0) -> str:
    """One worker's part of a plain line.

    >>> worker_text(Task("worker", 0), None, None)
    'worker:0 starting'
    >>> worker_text(Task("worker", 0), Tick(step=5, steps_per_s=2.0), None, restarts=1)
    'worker:0 step 5 (2/s)  restarted 1x'
    >>> worker_text(Task("worker", 1), Tick(phase="serves"), None)
    'worker:1 serves'
    """
    if tick is HAS_BEGUN and code is None:
        return "  ".join(part for part in (f"{task} training", restarted(restarts)) if part)
    if tick is None or tick.phase in (SERVES, RUNS) or tick is HAS_BEGUN:
        return "  ".join(part for part in (f"{task} {phase(tick, code)}", restarted(restarts)) if part)
    parts = [f"{named(task, tick)} step {tick.step} ({tick.steps_per_s:.0f}/s)", metrics(tick.metrics)]
    parts += [phase(tick, code)] if code is not None else []
    parts += [restarted(restarts)]
    return "  ".join(part for part in parts if part)


def counted(workers: Sequence[Task], newest: Mapping[Task, Tick]) -> Mapping[Task, Tick]:
    """What the tasks told, and of workers that have told nothing yet, but whose steps a ps has counted, that much.

    >>> one, two, ps = Task("worker", 0), Task("worker", 1), Task("ps", 0)
    >>> counted([one, two], {ps: Tick(staleness={"1": {"0": 9}})})[two].phase
    'train'
    """
    seen = {worker for tick in newest.values() for worker in tick.staleness}
    return {**{task: HAS_BEGUN for index, task in enumerate(workers) if str(index) in seen}, **newest}


def runs_ops(workers: Sequence[Task], newest: Mapping[Task, Tick]) -> bool:
    """Whether there is no training to tell of: all who have told anything serve ops, or call them.

    >>> one, two = Task("worker", 0), Task("worker", 1)
    >>> runs_ops([one, two], {two: Tick(phase="serves")}), runs_ops([one], {})
    (True, False)
    """
    phases = [newest[task].phase for task in workers if task in newest]
    return bool(phases) and all(each in (SERVES, RUNS) for each in phases)


def restarted(times: int) -> str:
    """In how many lives, where that is not one."""
    return f"restarted {times}x" if times else ""


def phase(tick: Tick | None, code: int | None) -> str:
    """What a task is doing, in a word."""
    if code is not None:
        return "ended" if code == 0 else "failed"
    if tick is None:
        return "starting"
    return tick.phase or ("paused" if tick.lacks else "serve")


def global_step(newest: Mapping[Task, Tick]) -> int:
    """The newest global step that any task has told."""
    return max((tick.global_step for tick in newest.values()), default=0)
