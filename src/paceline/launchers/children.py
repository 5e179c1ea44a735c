"""WHO is running? The processes of one run: started in groups of their own, waited for, signalled, ended.

Called by launchers/supervisor, and from its own thread by launchers/chaos. Must never decide why or when: it does as
told, and puts every exit into one queue. A pid is not given back to the system before its exit was taken from there,
so that no signal can reach a stranger.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from signal import SIGKILL, Signals
from typing import Protocol

import msgspec

from paceline.cluster.spec import Task
from paceline.launchers.entry import Program
from paceline.launchers.frameworks import brings_tensorflow
from paceline.launchers.nursery import Forked, NoNursery, Nursery, open_log

TWICE_S = 1.0  # an interrupt so soon after another one is the same


class Exited(msgspec.Struct, frozen=True):
    """A task's process is over."""

    task: Task
    code: int


class Interrupted(msgspec.Struct, frozen=True):
    """The user, or the system, wants the run to end."""


class Arrived(msgspec.Struct, frozen=True):
    """There is room now for a task that may join later."""

    task: Task


Event = Exited | Interrupted | Arrived


class Process(Protocol):
    """A process that is our child, or one of another host."""

    pid: int

    def wait(self) -> int:
        """Its exit code, once it has ended."""

    def reap(self) -> None:
        """Nobody will ask for it again."""

    def signal(self, number: Signals) -> None:
        """Send it a signal, as anybody might."""

    def signal_all(self, number: Signals) -> None:
        """The same to it and all that it has started."""

    def status(self) -> str | None:
        """What its system says of it, in psutil's words; None: there is none."""


class Executed:
    """A process that was started by exec; one that `takes_along` all of its group leaves nobody behind."""

    def __init__(self, popen: "subprocess.Popen[bytes]", takes_along: bool = False) -> None:
        self.pid = popen.pid
        self._popen = popen
        self._takes_along = takes_along
        self._like_forked = Forked(popen.pid)

    def wait(self) -> int:
        return self._like_forked.wait() if hasattr(os, "waitid") else self._popen.wait()

    def reap(self) -> None:
        if self._takes_along:
            self.signal_all(SIGKILL)  # while the pid is still its own
        self._popen.wait()

    def signal(self, number: Signals) -> None:
        self._like_forked.signal(number)

    def signal_all(self, number: Signals) -> None:
        self._like_forked.signal_all(number)

    def status(self) -> str | None:
        return self._like_forked.status()


class Children:
    """All processes of a run; `codes` has the exit codes of the tasks that do not run, in the order they ended."""

    def __init__(self, nursery: Nursery | None = None) -> None:
        self.codes: dict[Task, int] = {}
        self.asked: set[Task] = set()  # to end, by us: their exit codes tell nothing
        self.is_interrupted = False
        self._interrupted_s = 0.0
        self._nursery = nursery
        self._lock = threading.Lock()
        self._running: dict[Task, Process] = {}
        self._events: SimpleQueue[Event] = SimpleQueue()  # may be put to from a signal handler

    def start(
        self,
        task: Task,
        program: Program | None,
        environ: Mapping[str, str],
        log: Path,
        named: Mapping[str, int] | None = None,
    ) -> int | None:
        """Start a task in a process group of its own, so that Ctrl+C in a terminal reaches only us; its pid.

        Each descriptor of `named` is passed on; its number there is in the variable of that name.
        None: the run was interrupted meanwhile, and nothing was started.
        """
        process = self._begin(task, program, environ, log, named or {})
        if process is None:
            return None
        self.add(task, process)
        return process.pid

    def add(self, task: Task, process: Process) -> None:
        """From now on this process is the task."""
        with self._lock:
            self.codes.pop(task, None)
            self._running[task] = process
        threading.Thread(target=self._wait, args=(task, process), daemon=True, name=f"wait-{task}").start()

    def _begin(
        self,
        task: Task,
        program: Program | None,
        environ: Mapping[str, str],
        log: Path,
        named: Mapping[str, int],
    ) -> Process | None:
        argv = ["--parent", str(os.getpid())]
        if program is not None and program.is_plain:
            return self._execute(plain_command(program), environ, log, named, takes_along=True)
        if program is not None:
            argv += ["--module"] if program.is_module else []
            argv += [program.script, *program.args]
        if self._nursery is not None and not (program is not None and brings_tensorflow(program)):
            self._nursery.is_wanted = lambda: not self.is_interrupted
            try:
                title = " ".join(["paceline", str(task), *argv[2:]])
                return self._nursery.birth(title, argv, environ, log, named)
            except NoNursery:  # from now on without it
                self._nursery = None
        command = [sys.executable, "-P", "-m", "paceline.launchers.entry", *argv]
        return self._execute(command, environ, log, named)

    def _execute(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        named: Mapping[str, int],
        takes_along: bool = False,
    ) -> Process | None:
        if self.is_interrupted:
            return None
        with open_log(log) as output:
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environ, **{name: str(number) for name, number in named.items()}},
                pass_fds=tuple(named.values()),
                process_group=0,
            )
        return Executed(popen, takes_along)

    def _wait(self, task: Task, process: Process) -> None:
        self._events.put(Exited(task, process.wait()))

    def interrupt(self) -> None:
        """Let the next next_event() say that the run should end; safe in a signal handler."""
        now_s = time.monotonic()
        if self.is_interrupted and now_s - self._interrupted_s < TWICE_S:
            return  # a terminal and a wrapper around us tell the same Ctrl+C
        self.is_interrupted, self._interrupted_s = True, now_s
        self._events.put(Interrupted())

    def arrive(self, task: Task) -> None:
        """Let next_event() say that this task can be started."""
        self._events.put(Arrived(task))

    def next_event(self, timeout_s: float) -> Event | None:
        """Return what happened next; None when nothing did for so long."""
        try:
            event = self._events.get(timeout=max(0.0, timeout_s))
        except Empty:
            return None
        if isinstance(event, Exited):
            with self._lock:
                self.codes[event.task] = event.code
                self._running.pop(event.task).reap()
        return event

    def running(self, job: str | None = None) -> list[Task]:
        """Return the tasks that still run: the ps, all but the ps ("worker"), or all."""
        with self._lock:
            return [task for task in self._running if job is None or (task.job == "ps") == (job == "ps")]

    def pid(self, task: Task) -> int | None:
        """The process of a task that runs."""
        with self._lock:
            return self._running[task].pid if task in self._running else None

    def signal(self, task: Task, number: Signals) -> bool:
        """Send a signal to a task's own process, as anybody might; False when it does not run."""
        with self._lock:
            if task not in self._running:
                return False
            self._running[task].signal(number)
            return True

    def signal_all(self, task: Task, number: Signals) -> bool:
        """The same to all processes of a task: those that it has started, too."""
        with self._lock:
            if task not in self._running:
                return False
            self._running[task].signal_all(number)
            return True

    def status(self, task: Task) -> str | None:
        """What the system says of a task's process; None: it does not run."""
        with self._lock:
            process = self._running.get(task)
        return process.status() if process is not None else None

    def send(self, tasks: list[Task], number: Signals) -> None:
        """Ask tasks to end."""
        self.asked.update(tasks)
        for task in tasks:
            self.signal(task, number)

    def kill(self) -> None:
        """End what is left, with everything it has started itself."""
        with self._lock:
            self.asked.update(self._running)
            for process in self._running.values():
                process.signal_all(SIGKILL)

    def wait_until_gone(self, job: str | None, seconds: float) -> bool:
        """Wait until no task of that kind runs; False when time ran out or the user insists."""
        deadline = time.monotonic() + seconds
        while self.running(job):
            left = deadline - time.monotonic()
            if left <= 0 or isinstance(self.next_event(left), Interrupted):
                return not self.running(job)
        return True


def plain_command(program: Program) -> list[str]:
    """What is executed for a program that does not use paceline: `python SCRIPT …`, after a word with the kernel."""
    own = [sys.executable, "-P", "-m", "paceline.launchers.plain_task", str(os.getpid())]
    return [*own, *(["-m"] if program.is_module else []), program.script, *program.args]
