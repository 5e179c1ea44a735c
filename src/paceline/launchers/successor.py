"""IS this ps still the one? When its host was cut off it may have been started again elsewhere (cluster/moved).

Used by launchers/serving, a thread of its own, because a run folder on a network may keep whoever looks waiting. A ps
that has a successor ends without a word to the run: its workers then find the other one. Must never end a ps because
the run folder cannot be read.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from paceline.cluster import moved
from paceline.cluster.spec import Task

LOOK_S = 1.0


class Successor:
    """Looks once a second from `begin` on; `address` is where the successor is, once there is one."""

    def __init__(self, run_dir: Path, task: Task, here: str, on_found: Callable[[], None]) -> None:
        self.address: str | None = None
        self._run_dir = run_dir
        self._task = task
        self._here = here
        self._on_found = on_found
        self._over = threading.Event()

    def begin(self) -> None:
        threading.Thread(target=self._watch, name="successor", daemon=True).start()

    def look(self) -> bool:
        """Whether there is one, now."""
        address = moved.address(self._run_dir, self._task, self._here)
        if address != self._here:
            self.address = address
        return self.address is not None

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            if self.look():
                self._on_found()
                return

    def ends(self) -> bool:
        """This ps ends: whether it has a successor, who then says how the run went."""
        self._over.set()
        return self.look()
