"""Read the newest parameters into an evaluator's model, whenever it pulls. An evaluator never trains.

Made by ctx.prepare in a task of job `evaluator`, which may stand outside the cluster; the ps do not wait for it.
Imports no framework: a function for each tensor's name writes its values into the model.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.errors import ClusterError, PacelineError, UsageError
from paceline.worker.kv import Kv
from paceline.worker.requests.deadline import Deadline
from paceline.worker.requests.identity import Identity

RETRY_S = 0.5


class Evaluator:
    """A model that follows the ps."""

    def __init__(self, takers: Mapping[str, Callable[[Any], None]], me: Identity, say: Callable[[str], None]) -> None:
        self._takers = takers
        self.step = 0  # the global step of the values that were pulled last
        self._kv = _wait_for_values(me, say)
        lacking = [
            t.name for t in self._kv.layout.tensors if t.name not in takers and not t.name.startswith("optimizer.")
        ]
        if lacking:
            self._kv.close()
            raise UsageError(f"this evaluator's model lacks {', '.join(lacking)}, which the cluster trains")

    def pull(self, is_averaged: bool = False) -> None:
        """Write the newest values, or their averages, into the model."""
        step = 0
        for name in self._kv:
            if name in self._takers:
                entry, values = self._kv.get(name, is_averaged)
                self._takers[name](values)
                step = max(step, entry.version)
        self.step = step

    @contextmanager
    def averages(self) -> Iterator[None]:
        """Have the model hold the averages that the ps keep inside, and the newest values afterwards."""
        self.pull(is_averaged=True)
        try:
            yield
        finally:
            self.pull()

    def refuse_step(self, *_: Any, **__: Any) -> None:
        """Refuse a step of the optimizer; called as its pre-hook, or in its place."""
        raise PacelineError("an evaluator does not train: call ctx.pull() and evaluate")

    def close(self) -> None:
        self._kv.close()


def _wait_for_values(me: Identity, say: Callable[[str], None]) -> Kv:
    """Connect once the chief has initialised the model, in any start order."""
    waiting = Deadline(me.wait_s, me.worker_devices[:1], say, style=me.log_style)
    while True:
        try:
            return Kv(me.ps_addresses, me.lane, me.secret, me.wait_s, say, me.log_style)
        except ClusterError as error:
            waiting.again(str(error))
            time.sleep(RETRY_S)  # the ps notify only workers
