"""The number of steps of each worker, over all its processes and over a resume, as ps:0 counts them.

Used by saving.py. A worker says where it is in its data, and how many steps it has made; the steps between that and
its death are known to the ps only. Must never tell a worker a place in its data.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from paceline.server.control.kept import COUNTED
from paceline.server.control.state import ShardState
from paceline.wire.messages import Position


@dataclass(slots=True)
class StepCounts:
    """The counts of all workers. `earlier`: their steps before this start of the run, which began at `began_at`."""

    earlier: dict[int, int] = field(default_factory=dict, metadata=COUNTED)
    began_at: int = field(default=0, metadata=COUNTED)

    def resumed(self, version: int, positions: Iterable[Position]) -> None:
        """Go on from a checkpoint."""
        self.began_at = version
        self.earlier = {position.worker: position.steps for position in positions}

    def of(self, state: ShardState, worker: int) -> int:
        """Return the steps of a worker that are counted or discarded. In local mode a push is several, always as many
        unless the mode was changed."""
        spec = state.mode.spec
        a_push = spec.local_steps if spec.name == "local" and state.turn == 0 else 1
        pushes = sum(state.staleness.get(worker, {}).values()) + state.discarded.get(worker, 0)
        return self.earlier.get(worker, 0) + a_push * pushes

    def has_trained(self, state: ShardState, worker: int) -> bool:
        """Tell whether a worker has pushed since this run was started or resumed."""
        return bool(state.staleness.get(worker)) or bool(state.discarded.get(worker))

    def goes_on(self, state: ShardState, worker: int, told: Position | None) -> Position | None:
        """Return where a worker goes on that has last said it was at `told`."""
        steps = self.of(state, worker)
        if steps <= (told.steps if told is not None else 0):
            return told
        return msgspec.structs.replace(told or Position(worker), steps=steps)

    def exact(self, state: ShardState) -> dict[int, int]:
        """Return every worker's steps in the current version; empty where they are not known: in rounds, where many
        steps are one update, in local mode, and when the last counts of a ps died with it."""
        if state.mode.has_rounds or state.mode.spec.name == "local":
            return {}
        counted = sum(sum(counts.values()) for counts in state.staleness.values())
        if self.began_at + counted != state.version:
            return {}
        return self.all(state)

    def all(self, state: ShardState) -> dict[int, int]:
        """Return the steps of all workers that have made any."""
        return {worker: self.of(state, worker) for worker in {*self.earlier, *state.staleness, *state.discarded}}
