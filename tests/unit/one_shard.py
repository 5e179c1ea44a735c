"""WHAT is asked of one shard's state, and what does it say? Short words for the tests of server/control/state."""

from paceline.cluster.membership import Membership
from paceline.modes import make
from paceline.modes.spec import ModeSpec
from paceline.server.control.actions import Action, Answer, Apply, Free, Part
from paceline.server.control.state import ShardState
from paceline.wire.decisions import Decision, Key
from paceline.wire.frames import Outcome

A, B, C = (0, 1), (1, 1), (2, 1)
ASYNC, SYNC = ModeSpec(), ModeSpec(name="sync")


def of_n(count: int, **numbers: float) -> ModeSpec:
    return ModeSpec(name="sync", replicas_to_aggregate=count, **numbers)  # type: ignore[arg-type]


def shard(spec: ModeSpec, num_workers: int = 3, is_coordinator: bool = True, min_workers: int = 1) -> ShardState:
    members = Membership(num_workers)
    for worker in range(num_workers):
        members.join(worker, 1, 0.0)
    return ShardState(make(spec, num_workers), members, is_coordinator, min_workers)


def decided(round_: int, *keys: Key) -> Decision:
    """One gradient of each."""
    return round_, tuple((worker, incarnation, 1) for worker, incarnation in keys)


def outcomes(actions: list[Action]) -> dict[Key, Outcome]:
    return {a.key: a.outcome for a in actions if isinstance(a, Answer)}


def applied(actions: list[Action]) -> list[tuple[Key, ...]]:
    return [tuple(part.key for part in a.parts) for a in actions if isinstance(a, Apply)]


def freed(actions: list[Action]) -> list[Key]:
    return [a.key for a in actions if isinstance(a, Free)]


def parts(actions: list[Action]) -> list[Part]:
    return [part for a in actions if isinstance(a, Apply) for part in a.parts]


def flags(actions: list[Action]) -> dict[Key, int]:
    return {a.key: a.flags for a in actions if isinstance(a, Answer)}
