"""Inject the faults of `--chaos` that happen at a worker's own step, or on its connections.

Made by worker/session where `--chaos` names this worker; called once a step by the thread that trains, right before its
push. A fault is logged before it happens, and a worker that was started again does not repeat it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from paceline.cluster import chaos
from paceline.cluster.chaos import Fault
from paceline.cluster.discovery import Assignment
from paceline.errors import UsageError
from paceline.telemetry.faults import FaultLog, began_s
from paceline.telemetry.paths import RunPaths
from paceline.transport.faulty import Trouble

TELL_S = 1.0  # faults that come with every message are logged together, about once in so long


class Injection:
    """One worker's own faults."""

    def __init__(self, faults: list[Fault], assignment: Assignment, log: FaultLog, began_s: float) -> None:
        self._log = log
        self._began_s = began_s
        self._seed = assignment.settings.chaos_seed
        self._task = assignment.task
        self._tasks = assignment.cluster.workers[: assignment.settings.started_workers]
        done = log.done()
        mine = [f for f in faults if f.names(assignment.task)]
        self._at_step = [f for f in mine if f.at_step is not None and f.text not in done]
        self._timed = {f: self._first(f) for f in faults if f.every_s or (f.at_s and f.text not in done)}
        self._lasting = {f.kind: f for f in mine if f.at_step is None and not f.is_timed}
        self._counts: dict[str, int] = {}
        self._told_s = 0.0
        self._counting = threading.Lock()  # heartbeats suffer too, in a thread of their own
        self.trouble = self._make_trouble(f"{self._seed} {assignment.task} {assignment.incarnation}")

    def _make_trouble(self, seed: str) -> Trouble:
        def of(kind: str) -> Fault:
            return self._lasting.get(kind, Fault(text="", kind=kind))

        return Trouble(
            self._suffered,
            delay_s=of("delay").lasts_s,
            bytes_per_s=of("limit").amount,
            flip_chance=of("flip").amount,
            swallow_acks=int(of("swallow-acks").amount),
            seed=seed,
        )

    def before_push(self, step: int, spoil: Callable[[], None]) -> None:
        """Inject every fault that is due at this step. `spoil` puts a NaN into the gradient."""
        for fault in [f for f in self._at_step if f.at_step == step]:
            self._at_step.remove(fault)
            self._make(fault, step, spoil)
        if self._timed:
            self._look_at_the_clock(step, spoil)

    def _look_at_the_clock(self, step: int, spoil: Callable[[], None]) -> None:
        now_s = time.time() - self._began_s
        for fault, nth in list(self._timed.items()):
            at_s = chaos.due_s(fault, nth)
            if at_s is None:
                del self._timed[fault]
            elif now_s >= at_s:
                self._timed[fault] = nth + 1
                if chaos.victim(fault, nth, self._tasks, self._seed) == self._task:
                    self._make(fault, step, spoil)

    def _first(self, fault: Fault) -> int:
        """Return which repetition comes next; those that an earlier start missed are left out."""
        return 1 if fault.every_s is None else int(max(0.0, time.time() - self._began_s) / fault.every_s) + 1

    def _make(self, fault: Fault, step: int, spoil: Callable[[], None]) -> None:
        self._log.write(fault, step)
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)  # the launcher wakes us
        elif fault.kind == "cut":
            self.trouble.cut(fault.lasts_s)
        elif fault.kind == "flip":
            self.trouble.flip_next()
        elif fault.kind == "nan":
            spoil()

    def _suffered(self, kind: str, times: int) -> None:
        """Count a lasting fault that has hit again; single flips were logged when they were asked for."""
        if kind not in self._lasting:
            return
        with self._counting:
            self._counts[kind] = self._counts.get(kind, 0) + times
            if time.monotonic() - self._told_s >= TELL_S:
                self._tell()

    def _tell(self) -> None:
        self._told_s = time.monotonic()
        for kind, times in self._counts.items():
            with suppress(OSError):  # a full disk loses a count, not a step
                self._log.write(self._lasting[kind], times=times)
        self._counts.clear()

    def close(self) -> None:
        """Log what was counted since the last time."""
        with self._counting:
            self._tell()


def of(assignment: Assignment) -> Injection | None:
    """Return the faults that `--chaos` has for this worker; None if it has none."""
    settings, task = assignment.settings, assignment.task
    mine = [f for f in chaos.parse(settings.chaos) if not f.is_sent and (f.names(task) or chaos.candidates(f, [task]))]
    if not mine or task not in assignment.cluster.workers:
        return None
    if settings.run_dir is None:
        raise UsageError("--chaos writes down what it did, in the run folder: give --run-dir.")
    if assignment.source != "launcher" and any(f.kind == "stop" for f in mine):
        raise UsageError("--chaos stop=… needs paceline run: nobody would wake a task that was started by hand.")
    paths = RunPaths(settings.run_dir)
    return Injection(mine, assignment, FaultLog(paths, task), began_s(paths))
