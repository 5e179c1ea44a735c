"""WHO injects faults from outside? The launcher: it kills and stops by the clock, and wakes who has stopped itself.

Used by launchers/supervisor, and for a ps by launchers/serving. Must never hit a run that is about to end, nor wait for
anybody: a victim that is away just now is hit when it is back.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import psutil

from paceline.cluster import chaos
from paceline.cluster.chaos import Fault
from paceline.cluster.discovery import Assignment
from paceline.cluster.settings import Settings
from paceline.cluster.spec import Task
from paceline.telemetry.faults import FaultLog, began_s
from paceline.telemetry.paths import RunPaths

LOOK_S = 0.05
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Tasks(Protocol):
    """The running tasks, as launchers/children has them."""

    def running(self, job: str | None = None) -> list[Task]: ...

    def status(self, task: Task) -> str | None: ...

    def signal(self, task: Task, number: signal.Signals) -> bool: ...


class Chaos:
    """The faults that the launcher makes, in a thread of its own."""

    def __init__(self, settings: Settings, tasks: Sequence[Task], paths: RunPaths, children: Tasks) -> None:
        faults = chaos.parse(settings.chaos)
        self._tasks = tasks
        self._seed = settings.chaos_seed
        self._paths = paths
        self._children = children
        self._due = {fault: 1 for fault in faults if fault.is_sent}
        self._stops = [fault for fault in faults if fault.kind == "stop"]
        self._wake_s: dict[Task, float] = {}  # when those who stand still go on
        self._began_s = began_s(paths)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)

    def start(self) -> None:
        if self._due or self._stops:
            self._thread.start()

    def stop(self) -> None:
        """No more faults; whoever stands still goes on, so that it can end."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        for task in list(self._wake_s):
            self._children.signal(task, signal.SIGCONT)

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            self._wake()
            for fault, nth in list(self._due.items()):
                at_s = chaos.due_s(fault, nth)
                if at_s is None:
                    del self._due[fault]
                elif time.time() - self._began_s >= at_s and self.hit(fault, nth):
                    self._due[fault] = nth + 1

    def hit(self, fault: Fault, nth: int) -> bool:
        """False: its victim is not there, or stands still; later."""
        victim = chaos.victim(fault, nth, self._tasks, self._seed)
        if victim not in self._children.running() or not self._children.running("worker") or victim in self._wake_s:
            return False
        has_ended = self._children.status(victim) in (None, psutil.STATUS_ZOMBIE)
        if has_ended:  # and the launcher has yet to hear of it
            return False
        FaultLog(self._paths, victim).write(fault)
        if fault.kind == "stop":
            self._wake_s[victim] = time.monotonic() + fault.lasts_s
        self._children.signal(victim, SIGNALS[fault.kind])
        return True

    def _wake(self) -> None:
        """Those whose time is up go on; those who have stopped themselves get theirs."""
        now_s = time.monotonic()
        for task in [task for task, at_s in self._wake_s.items() if now_s >= at_s]:
            del self._wake_s[task]
            self._children.signal(task, signal.SIGCONT)
        for fault in self._stops:
            for task in chaos.candidates(fault, self._children.running()):
                is_due = fault.at_step is not None and task not in self._wake_s
                if is_due and self._children.status(task) == psutil.STATUS_STOPPED:
                    self._wake_s[task] = now_s + fault.lasts_s


@contextmanager
def injected(settings: Settings, tasks: Sequence[Task], paths: RunPaths, children: Tasks) -> Iterator[None]:
    """While the run is watched, the faults that it asks for happen."""
    made = Chaos(settings, tasks, paths, children)
    made.start()
    try:
        yield
    finally:
        made.stop()


class PsFaults:
    """What a ps does to itself. Called with the lock held, when an update is made and nobody has heard of it."""

    def __init__(self, faults: Sequence[Fault], log: FaultLog) -> None:
        self._faults = list(faults)
        self._log = log

    def at_version(self, version: int) -> None:
        """What is due at this version, or was in one that was passed in the same breath."""
        for fault in [each for each in self._faults if each.at_step is not None and each.at_step <= version]:
            self._faults.remove(fault)
            self._log.write(fault, version)
            os.kill(os.getpid(), SIGNALS[fault.kind])


def of_ps(assignment: Assignment) -> PsFaults | None:
    """What `--chaos` says about this ps; None: nothing that is still to come."""
    settings, task = assignment.settings, assignment.task
    if settings.run_dir is None:
        return None
    log = FaultLog(RunPaths(settings.run_dir), task)
    mine = [fault for fault in chaos.parse(settings.chaos) if fault.names(task) and fault.at_step is not None]
    left = [fault for fault in mine if fault.text not in log.done()] if mine else []
    return PsFaults(left, log) if left else None
