"""HOW is a task of this run started, the first time and again? Its incarnation, its environment, a ps's old memory.

Called by launchers/supervisor. launchers/restart decides whether, launchers/children starts; this knows all starts.
"""

import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline import files
from paceline.cluster.discovery import Assignment
from paceline.cluster.membership import first_incarnation
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import EXIT_OK
from paceline.launchers import closing, here
from paceline.launchers.entry import Program
from paceline.launchers.here import Here, Start, Starter
from paceline.launchers.notice import tell_lost
from paceline.launchers.restart import Again, Ended, Over, decide, will_repeat
from paceline.telemetry import losses
from paceline.telemetry.lines import FailedAt, read_failed
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.records import OVER
from paceline.telemetry.sink import append

STEPPED = re.compile(rb"training step \d+ done|traing step \d+ dome")  # in either --log-style
LOOK_BYTES = 1 << 20
RECORDS = ".jsonl"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose folder has been made."""

    program: Program
    cluster: ClusterSpec
    settings: Settings
    paths: RunPaths
    threads: str
    resume: str = ""  # the command that goes on with this run
    shows_logs: bool = False

    @property
    def started(self) -> list[Task]:
        """The workers that the launcher starts; in an elastic run others may join."""
        return self.cluster.workers[: self.settings.started_workers]

    @property
    def environ(self) -> dict[str, str]:
        """What every task has in its environment, apart from its own assignment."""
        return here.environ(os.environ, self.threads)


class Begun(msgspec.Struct, frozen=True):
    """One start of a task."""

    at_s: float
    log_bytes: int  # what its log held already
    had_memory: bool


class Crew:
    """All tasks that the launcher starts, over all their starts. `restarts` counts those who are on their way too."""

    def __init__(self, run: Run, starter: Starter | None = None) -> None:
        """`starter`: on other hosts, too; None: on this one."""
        self._starter = starter or Here(run.environ, run.program, run.settings, run.cluster.ps)
        self.children = self._starter.children
        self.secret = run.paths.read_secret()  # the run folder may be gone when a task is started again
        self.restarts: dict[Task, int] = {}
        self.lacks_records = False  # what tasks tell of their end may be missing
        self.model = ""  # where the last checkpoint lies, if not in the run folder
        self._run = run
        self._ends: dict[Task, list[Ended]] = {}
        self._begun: dict[Task, Begun] = {}
        self._due_s: dict[Task, float] = {}
        self._over: set[Task] = set()  # workers that will not be started again

    def start_all(self) -> None:
        """The ps first, then the workers; any order would do."""
        for task in [*self._run.cluster.ps, *self._run.started]:
            if not self.children.is_interrupted:
                self.start(task)

    def start(self, task: Task) -> None:
        """Start a task once more than before."""
        run, log = self._run, self._run.paths.logs(task)
        assignment = Assignment(run.cluster, task, self.incarnation(task), run.settings, self.secret, "launcher")
        program = None if task.job == "ps" else run.program
        self._begun[task] = Begun(time.monotonic(), size_bytes(log), self._starter.has_memory(task))
        self._starter.start(Start(assignment, program, log))
        if task.job == "ps" and task in self._ends and not self._begun[task].had_memory:
            for worker in [each for each in run.started if each in self._over]:  # it waits for all, and they are done
                self._tell_lost(worker)

    def ended(self, task: Task, code: int) -> Again | Over:
        """Note how a task ended, and see to what follows: it is started again, or the ps hear that it will not be."""
        begun, reason = self._begun[task], self.reason(task)
        end = Ended(
            code=code,
            lived_s=time.monotonic() - begun.at_s,
            gist=closing.gist(reason) if code != EXIT_OK else "",
            has_stepped=has_stepped(self._run.paths.logs(task), begun.log_bytes),
            failed_at=failed_at(self._run.paths.logs(task), begun.log_bytes),
            had_memory=begun.had_memory,
        )
        self._ends.setdefault(task, []).append(end)
        decision = decide(self._ends[task], self._run.settings.max_restarts)
        if isinstance(decision, Again) and (why := self._starter.refusal(task)):
            decision = Over(why)
        if isinstance(decision, Again):
            self._await(task, code, decision)
        elif task.job != "ps":  # no news for a ps with which it has closed
            self._over.add(task)
            self._tell_lost(task)
            append(self._run.paths.telemetry(task), OVER, task=str(task))  # for those who only serve it
        return decision

    def _await(self, task: Task, code: int, again: Again) -> None:
        self.children.codes.pop(task, None)  # it has not ended for good
        self.restarts[task] = self.restarts.get(task, 0) + 1
        self._due_s[task] = time.monotonic() + again.after_s
        if again.is_empty:
            self._starter.forget(task)
        told = {"number": self.restarts[task], "code": code, "after_s": again.after_s, "is_empty": again.is_empty}
        append(self._run.paths.telemetry(task), "restart", task=str(task), **told)

    def _tell_lost(self, task: Task) -> None:
        run = self._run
        last = first_incarnation(len(self._ends[task]))
        args = (run.cluster, self.secret, task, last)
        where = {"run_dir": run.paths.root}
        threading.Thread(target=tell_lost, args=args, kwargs=where, daemon=True, name=f"lost-{task}").start()

    def incarnation(self, task: Task) -> int:
        """Of the next start."""
        return first_incarnation(len(self._ends.get(task, ())) + 1)

    def reason(self, task: Task) -> list[str]:
        """Why its last process ended, from its log."""
        begun = self._begun.get(task)
        return closing.reason(self._run.paths.logs(task), begun.log_bytes if begun else 0)

    def will_repeat(self, task: Task) -> bool:
        """Whether the command that started it would only end it the same way."""
        return will_repeat(self._ends.get(task, []))

    @property
    def awaited(self) -> list[Task]:
        """Who will be started again."""
        return list(self._due_s)

    @property
    def due_s(self) -> float:
        """When the next one is."""
        return min(self._due_s.values(), default=float("inf"))

    def start_due(self) -> None:
        """Start again whose time has come."""
        now_s = time.monotonic()
        for task in [task for task, due_s in self._due_s.items() if due_s <= now_s]:
            del self._due_s[task]
            self.start(task)

    def losses(self) -> list[str]:
        """Return lines about files that tasks could not write since the last call."""
        found = self._starter.losses()
        for loss in found:
            self.lacks_records = self.lacks_records or Path(loss.file).suffix == RECORDS
            self.model = loss.model or self.model
        return losses.lines(msgspec.structs.replace(each, file=closing.shown(Path(each.file))) for each in found)

    @property
    def has_model_here(self) -> bool:
        """Tell whether the last checkpoint lies outside of the run folder, on this host."""
        return bool(self.model) and Path(self.model).is_dir()

    def close(self) -> bool:
        """The run is over, and all processes have ended; whether all that they left is in the run folder now."""
        return self._starter.close()


def size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def has_stepped(log: Path, begin: int) -> bool:
    """Whether a worker's log, from there on, tells of a step."""
    with suppress(OSError), files.reading(log.parent.parent, log) as file:
        file.seek(begin)
        return STEPPED.search(file.read(LOOK_BYTES)) is not None
    return False


def failed_at(log: Path, begin: int) -> FailedAt | None:
    """Read from a worker's log where its script failed, from this byte on."""
    with suppress(OSError), files.reading(log.parent.parent, log) as file:
        file.seek(max(begin, file.seek(0, 2) - LOOK_BYTES))
        return read_failed(file.read(LOOK_BYTES).decode(errors="replace"))
    return None
