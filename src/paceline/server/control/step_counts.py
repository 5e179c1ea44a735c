"""How many steps of the run were each worker's, over all its lives and over a resume, as ps:0 counts them.

Used by saving.py. A worker tells where it is in its data, and how many steps it has made; what it did
after it last told, before it was killed, only a ps knows. Must never tell a worker a place in its data.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from paceline.server.control.kept import COUNTED
from paceline.server.control.state import ShardState
from paceline.wire.messages import Position


@dataclass(slots=True)
class StepCounts:
    """Of all workers. `earlier`: their steps before this start, when global step `began_at` was made already."""

    earlier: dict[int, int] = field(default_factory=dict, metadata=COUNTED)
    began_at: int = field(default=0, metadata=COUNTED)

    def resumed(self, version: int, positions: Iterable[Position]) -> None:
        """A checkpoint's."""
        self.began_at = version
        self.earlier = {position.worker: position.steps for position in positions}

    def of(self, state: ShardState, worker: int) -> int:
        """Its steps that are dealt with, counted or discarded. In local mode a push is several, always as many unless
        the mode was changed."""
        spec = state.mode.spec
        a_push = spec.local_steps if spec.name == "local" and state.turn == 0 else 1
        pushes = sum(state.staleness.get(worker, {}).values()) + state.discarded.get(worker, 0)
        return self.earlier.get(worker, 0) + a_push * pushes

    def has_trained(self, state: ShardState, worker: int) -> bool:
        """Tell whether a worker has pushed since this run was started or resumed."""
        return bool(state.staleness.get(worker)) or bool(state.discarded.get(worker))

    def goes_on(self, state: ShardState, worker: int, told: Position | None) -> Position | None:
        """From where a worker goes on that was last heard of there."""
        steps = self.of(state, worker)
        if steps <= (told.steps if told is not None else 0):
            return told
        return msgspec.structs.replace(told or Position(worker), steps=steps)

    def exact(self, state: ShardState) -> dict[int, int]:
        """Every worker's steps in the version that is there now; nothing where that cannot be said: in rounds, where
        many steps are one update, in local mode, and when a ps that died took a moment of its counts with it."""
        if state.mode.has_rounds or state.mode.spec.name == "local":
            return {}
        counted = sum(sum(counts.values()) for counts in state.staleness.values())
        if self.began_at + counted != state.version:
            return {}
        return self.all(state)

    def all(self, state: ShardState) -> dict[int, int]:
        """Everybody's that has made any."""
        return {worker: self.of(state, worker) for worker in {*self.earlier, *state.staleness, *state.discarded}}
