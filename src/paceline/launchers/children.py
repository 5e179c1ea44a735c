"""WHO is running? The processes of one run: started in groups of their own, waited for, signalled, ended.

Called by launchers/local. Must never decide why or when: it does as told, and puts every exit into one queue.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

from paceline.cluster.spec import Task
from paceline.launchers.entry import Program


class Exited(msgspec.Struct, frozen=True):
    """A task's process is over."""

    task: Task
    code: int


class Interrupted(msgspec.Struct, frozen=True):
    """The user, or the system, wants the run to end."""


Event = Exited | Interrupted


class Children:
    """All processes of a run; `codes` grows as they end, in that order."""

    def __init__(self) -> None:
        self.codes: dict[Task, int] = {}
        self.asked: set[Task] = set()  # to end, by us: their exit codes tell nothing
        self._running: dict[Task, subprocess.Popen[bytes]] = {}
        self._events: SimpleQueue[Event] = SimpleQueue()  # may be put to from a signal handler

    def start(self, task: Task, program: Program | None, environ: Mapping[str, str], log: Path) -> int:
        """Start a task in a process group of its own, so that Ctrl+C in a terminal reaches only us."""
        command = [sys.executable, "-P", "-m", "paceline.launchers.entry", "--parent", str(os.getpid())]
        if program is not None:
            command += ["--module"] if program.is_module else []
            command += [program.script, *program.args]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                process_group=0,
            )
        self._running[task] = process
        threading.Thread(target=self._wait, args=(task, process), daemon=True, name=f"wait-{task}").start()
        return process.pid

    def _wait(self, task: Task, process: "subprocess.Popen[bytes]") -> None:
        self._events.put(Exited(task, process.wait()))

    def interrupt(self) -> None:
        """Let the next next_event() say that the run should end; safe in a signal handler."""
        self._events.put(Interrupted())

    def next_event(self, timeout_s: float) -> Event | None:
        """Return what happened next; None when nothing did for so long."""
        try:
            event = self._events.get(timeout=max(0.0, timeout_s))
        except Empty:
            return None
        if isinstance(event, Exited):
            self.codes[event.task] = event.code
            del self._running[event.task]
        return event

    def running(self, job: str | None = None) -> list[Task]:
        """Return the tasks that still run: the ps, all but the ps ("worker"), or all."""
        return [task for task in self._running if job is None or (task.job == "ps") == (job == "ps")]

    def send(self, tasks: list[Task], number: signal.Signals) -> None:
        """Send a signal to the tasks' own processes."""
        self.asked.update(tasks)
        for task in tasks:
            self._running[task].send_signal(number)

    def kill(self) -> None:
        """End what is left, with everything it has started itself."""
        self.asked.update(self._running)
        for process in self._running.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def wait_until_gone(self, job: str | None, seconds: float) -> bool:
        """Wait until no task of that kind runs; False when time ran out or the user insists."""
        deadline = time.monotonic() + seconds
        while self.running(job):
            left = deadline - time.monotonic()
            if left <= 0 or isinstance(self.next_event(left), Interrupted):
                return not self.running(job)
        return True
