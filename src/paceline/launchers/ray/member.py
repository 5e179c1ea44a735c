"""WHAT does the driver know of one task's actor, and of the process in it? One of each, for ray/team.

Made by ray/on_ray (members) and ray/team (processes); launchers/children holds the processes as its own. Must never
wait for an actor for long: whoever asks is the one who supervises all of them.
"""

import threading
from signal import Signals
from typing import Any

from paceline.cluster.spec import Task
from paceline.errors import EXIT_CLUSTER
from paceline.launchers.ray.actors import Place

ANSWER_S = 10.0


class Member:
    """One task's actor."""

    def __init__(self, task: Task, handle: Any, is_later: bool = False) -> None:
        self.task = task
        self.handle = handle
        self.is_later = is_later  # nobody waits for it while there is no room
        self.place: Place | None = None  # where it was last
        self.is_there = False
        self.known_life = ""  # which has what an earlier one has told
        self.seen = 0  # the last batch of pieces that came
        self.is_shared = True  # it writes into the driver's run folder itself
        self.has_memory = False
        self.is_empty = False  # its next start
        self.bringing = threading.Lock()  # of who sends it a checkpoint: its own start, or that of a ps
        self.brought = ("", "")  # the last one: in which life, and its digest


class Remote:
    """A task's process in an actor, from one start to its end."""

    pid = 0  # none of this machine

    def __init__(self, member: Member, ray: Any) -> None:
        self._member = member
        self._ray = ray
        self._lock = threading.Lock()
        self._asked: Signals | None = None
        self._is_there = False
        self._over = threading.Event()
        self._code = EXIT_CLUSTER

    def wait(self) -> int:
        self._over.wait()
        return self._code

    def reap(self) -> None:
        """Its actor has done so."""

    def signal(self, number: Signals) -> None:
        self._send(number, to_all=False)

    def signal_all(self, number: Signals) -> None:
        self._send(number, to_all=True)

    def _send(self, number: Signals, to_all: bool) -> None:
        with self._lock:
            if not self._is_there:
                self._asked = number
                return
        self._member.handle.send.remote(int(number), to_all)

    def status(self) -> str | None:
        try:
            told: str | None = self._ray.get(self._member.handle.status.remote(), timeout=ANSWER_S)
        except self._ray.exceptions.RayError:
            return None
        return told

    @property
    def is_unwanted(self) -> bool:
        """Whether it was asked to end before it began."""
        return self._asked is not None

    def arrive(self) -> None:
        """It has been started; whoever asked it to end meanwhile is heard now."""
        with self._lock:
            self._is_there = True
        if self._asked is not None:
            self._send(self._asked, to_all=True)

    def end(self, code: int) -> None:
        self._code = code
        self._over.set()
