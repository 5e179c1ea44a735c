"""WHAT does an evaluator do? It reads: the newest parameters into its model, whenever it pulls. It never trains.

Used by ctx.prepare in a task of job `evaluator`, which may stand outside the cluster. The ps do not wait for it.
No framework: what takes a tensor's values comes in by its name.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from paceline.errors import ClusterError, PacelineError, UsageError
from paceline.worker.client import Identity
from paceline.worker.deadline import Deadline
from paceline.worker.kv import Kv

RETRY_S = 0.5


class Evaluator:
    """A model that follows the ps."""

    def __init__(self, takers: Mapping[str, Callable[[Any], None]], me: Identity, say: Callable[[str], None]) -> None:
        self._takers = takers
        self._kv = _wait_for_values(me, say)
        lacking = [
            t.name for t in self._kv.layout.tensors if t.name not in takers and not t.name.startswith("optimizer.")
        ]
        if lacking:
            raise UsageError(f"this evaluator's model lacks {', '.join(lacking)}, which the cluster trains")

    def pull(self, is_averaged: bool = False) -> int:
        """The newest values, or their averages; returns the global step they are of."""
        step = 0
        for name in self._kv:
            if name in self._takers:
                entry, values = self._kv.get(name, is_averaged)
                self._takers[name](values)
                step = max(step, entry.version)
        return step

    @contextmanager
    def averages(self) -> Iterator[None]:
        """Inside, the model holds the averages that the ps keep; afterwards the newest values."""
        self.pull(is_averaged=True)
        try:
            yield
        finally:
            self.pull()

    def refuse_step(self, *_: Any, **__: Any) -> None:
        """As a step pre-hook of the optimizer, or instead of its step."""
        raise PacelineError("an evaluator does not train: call ctx.pull() and evaluate")

    def close(self) -> None:
        self._kv.close()


def _wait_for_values(me: Identity, say: Callable[[str], None]) -> Kv:
    """Until the chief has initialised the model, in any start order."""
    waiting = Deadline(me.wait_s, me.worker_devices[:1], say, style=me.log_style)
    while True:
        try:
            return Kv(me.ps_addresses, me.lane, me.secret, me.wait_s, say, me.log_style)
        except ClusterError as error:
            waiting.again(str(error))
            time.sleep(RETRY_S)  # nobody tells an evaluator when to look again
