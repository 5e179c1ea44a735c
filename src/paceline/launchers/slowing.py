"""HOW is a program slowed that is not ours? Its processes are stopped and let go on again, many times a second.

Called by launchers/plain for `--slow`. A task is slowed from the moment it listens at its own address: what it loads
before that is no training. Must never leave a process stopped.
"""

import signal
import threading
import time
from collections.abc import Mapping
from typing import Protocol

from paceline.cluster.listening import is_listened
from paceline.cluster.spec import ClusterSpec, Task

RUN_S = 0.02  # at a stretch; longer than a step of the documents' models, so that its waits are stretched, too
LOOK_S = 0.25


class Tasks(Protocol):
    """The running tasks, as launchers/children has them."""

    def signal_all(self, task: Task, number: signal.Signals) -> bool: ...


class Pace:
    """How long to stand still, so that a run of `factor` seconds holds one second of work. Pure: times come in.

    >>> pace = Pace(4.0)
    >>> pace.stop_s(0.01), pace.stood(0.05), pace.stop_s(0.01)
    (0.03, None, 0.01)
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._owed_s = 0.0

    def stop_s(self, ran_s: float) -> float:
        """After it ran so long."""
        self._owed_s += ran_s * (self._factor - 1)
        return round(max(0.0, self._owed_s), 9)

    def stood(self, seconds: float) -> None:
        """It stood still so long, which is never exactly what was asked for."""
        self._owed_s -= seconds


class Slowing:
    """The tasks that `--slow` names, each slowed by a thread of its own."""

    def __init__(self, factors: Mapping[Task, float], cluster: ClusterSpec, tasks: Tasks) -> None:
        self.slowed: list[Task] = []  # those that listen, in that order
        self._cluster = cluster
        self._tasks = tasks
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._slow, args=(task, factor), name=f"slow-{task}", daemon=True)
            for task, factor in factors.items()
            if factor > 1
        ]

    def start(self) -> None:
        """Begin to look for them."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Nobody stands still any more; safe to call twice."""
        self._over.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _slow(self, task: Task, factor: float) -> None:
        address = self._cluster.address(task)
        while not is_listened(address):
            if self._over.wait(LOOK_S):
                return
        self.slowed.append(task)
        pace = Pace(factor)
        while True:
            began_s = time.monotonic()
            if self._over.wait(RUN_S):
                return
            stopped_s = time.monotonic()
            if not self._tasks.signal_all(task, signal.SIGSTOP):
                return
            self._over.wait(pace.stop_s(stopped_s - began_s))
            self._tasks.signal_all(task, signal.SIGCONT)
            pace.stood(time.monotonic() - stopped_s)
