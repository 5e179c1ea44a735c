"""WHAT does a worker bring to a ps that has lost its memory, and under which lineage?"""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from small_checkpoint import STATE

from paceline.checkpoint.state import ShardState
from paceline.errors import ClusterError, ConnectionLost, Refused
from paceline.modes.spec import ModeSpec
from paceline.params.layout import Layout, TensorSpec
from paceline.params.placement import place
from paceline.transport.base import Buffer
from paceline.wire import messages as m
from paceline.worker.checkpoints import rewinding
from paceline.worker.checkpoints.rewinding import Rewinder, saved_version
from paceline.worker.requests.identity import Identity
from paceline.worker.requests.link import Link

LAYOUT = Layout((TensorSpec("weight", (64, 8), (8, 1), "float32", 0),))
DEVICES = ("/job:worker/replica:0/task:0", "/job:worker/replica:0/task:1")
ME = Identity(
    "worker", 0, 1, "r", True, ModeSpec(name="sync"), ("a:1", "b:1"), DEVICES, "bytes", "tcp",
    "float32", False, b"", 5.0, 20.0,
)  # fmt: skip


class Ps:
    """What server/control/rewinding says, and what it was told."""

    def __init__(self, lineage: int, turn: int = 0, mode: str = "sync") -> None:
        self.lineage, self.turn, self.mode = lineage, turn, mode
        self.told: list[m.Request] = []


class Connection:
    cluster: list[Ps]

    def __init__(self, me: Identity, index: int) -> None:
        self.index = index
        self._ps = self.cluster[index]

    def described(self) -> m.Described:
        ps = self._ps
        return m.Described("r", ModeSpec(name=ps.mode), "bytes", 2, 7, None, ps.lineage, ps.turn)

    def ask(self, request: m.Request, expects: type[Any] = m.Done, bulk: Sequence[Buffer] = ()) -> m.Reply:
        if isinstance(request, m.Rewind):
            if request.lineage <= self._ps.lineage:
                raise Refused(f"ps:{self.index} is of lineage {self._ps.lineage} already")
            self._ps.lineage = request.lineage
        self._ps.told.append(request)
        return m.Status([], [], 0) if expects is m.Status else m.Done()

    def close(self) -> None:
        pass


class Own:
    """A worker that knows lineage 1 of both ps."""

    layout = LAYOUT
    plan = place(LAYOUT, 2, "bytes")
    spec = m.OptimizerSpec("SGD", [{"lr": 0.1}])

    def __init__(self) -> None:
        links = [SimpleNamespace(index=i, lineage=1, version=7, offset=0) for i in range(2)]
        self.client = SimpleNamespace(links=links, dial=m.Dial(0, ME.spec, 0), incarnation=1)

    def carried_block(self) -> bytes:
        return b""

    def parameters_of(self, index: int) -> memoryview:
        return memoryview(bytes(self.plan.shard_bytes[index]))


def rewinder(cluster: list[Ps], patch: pytest.MonkeyPatch) -> tuple[Rewinder, Link]:
    Connection.cluster = cluster
    patch.setattr(rewinding, "Connection", Connection)
    own = Own()
    made = Rewinder(ME, own, lambda: None, True, lambda line: None, lambda *a, **b: None)  # type: ignore[arg-type]
    return made, own.client.links[1]


JOINED = m.Joined(False, 0, 0, [])


def test_one_that_died_in_the_middle_of_it_is_no_reason_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It brought ps:1 to lineage 2, and nobody who trains has heard of that."""
    cluster = [Ps(1), Ps(2)]
    made, lost = rewinder(cluster, monkeypatch)
    made.has_trained = True
    with pytest.raises(ConnectionLost, match="has got values now"):
        made.on_empty(lost, msgspec.structs.replace(JOINED, offers=len(ME.worker_devices), freshest=ME.worker))
    assert [ps.lineage for ps in cluster] == [3, 3]
    assert isinstance(cluster[0].told[-1], m.Restored)


def test_one_that_has_not_trained_has_nothing_to_reseed_from(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = [Ps(1), Ps(0)]
    made, lost = rewinder(cluster, monkeypatch)
    with pytest.raises(ConnectionLost, match="nobody has brought it values yet"):
        made.on_empty(lost, JOINED)
    assert cluster[1].told == []


def test_the_freshest_worker_brings_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = [Ps(1), Ps(0)]
    made, lost = rewinder(cluster, monkeypatch)
    assert made.offer(lost) == -1
    made.has_trained = True
    assert made.offer(lost) == 7
    for offers, freshest in ((2, ME.worker + 1), (1, ME.worker)):  # somebody has a newer one; nobody else has come yet
        with pytest.raises(ConnectionLost, match="nobody has brought it values yet"):
            made.on_empty(lost, msgspec.structs.replace(JOINED, offers=offers, freshest=freshest))
    assert cluster[1].told == []
    monkeypatch.setattr(rewinding, "TURN_S", 0.0)  # neither comes
    with pytest.raises(ConnectionLost, match="has got values now"):
        made.on_empty(lost, msgspec.structs.replace(JOINED, offers=2, freshest=ME.worker + 1))


def test_others_may_have_trained_in_a_lineage_that_this_worker_has_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It saw ps:1 empty, and again empty: between the two somebody trained with it in lineage 4."""
    cluster = [Ps(1), Ps(0)]
    made, lost = rewinder(cluster, monkeypatch)
    made.has_trained = True
    with pytest.raises(ConnectionLost, match="has got values now"):
        made.on_empty(lost, msgspec.structs.replace(JOINED, offers=2, freshest=ME.worker, trained_in=4))
    assert cluster[1].lineage == 5


def test_its_turn_comes_by_the_clock_of_the_ps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that saw a ps empty long ago, and now sees its successor, waits for the chief once more."""
    Connection.cluster = cluster = [Ps(1), Ps(0)]
    monkeypatch.setattr(rewinding, "Connection", Connection)
    me = replace(ME, is_chief=False, worker=1)
    own, asked = Own(), []
    made = Rewinder(me, own, lambda: asked.append(1), False, lambda line: None, lambda *a, **b: None)  # type: ignore[arg-type, func-returns-value]
    for empty_s, tries in ((0.0, 0), (rewinding.TURN_S, 1), (0.0, 1)):
        with pytest.raises(ConnectionLost, match="nobody has brought it values yet"):
            made.on_empty(own.client.links[1], msgspec.structs.replace(JOINED, empty_s=empty_s))
        assert len(asked) == tries
    assert cluster[1].told == []


@pytest.mark.parametrize("is_chief_lost", [True, False])
def test_without_a_chief_and_a_checkpoint_nobody_waits_on(is_chief_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher has said that the chief is over; while it may come, it may know of a checkpoint."""
    Connection.cluster = [Ps(1), Ps(0)]
    monkeypatch.setattr(rewinding, "Connection", Connection)
    monkeypatch.setattr(rewinding, "TURN_S", 0.0)
    me = replace(ME, is_chief=False, worker=1)
    own = Own()
    made = Rewinder(me, own, lambda: None, False, lambda line: None, lambda *a, **b: None)  # type: ignore[arg-type]
    joined = msgspec.structs.replace(JOINED, is_chief_lost=is_chief_lost)
    with pytest.raises(ClusterError, match="there is no checkpoint to go back to") as told:
        made.on_empty(own.client.links[1], joined)
    assert isinstance(told.value, ConnectionLost) is not is_chief_lost


@pytest.mark.parametrize(("mode", "goes_back"), [("sync", [0, 1]), ("async", [1])])
def test_the_mode_that_holds_decides_not_the_one_of_the_start(
    mode: str, goes_back: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This worker was started again after the mode was changed, and has not heard of it; ps:0 has."""
    cluster = [Ps(1, turn=1, mode=mode), Ps(0)]
    made, lost = rewinder(cluster, monkeypatch)
    made.has_trained = True
    with pytest.raises(ConnectionLost, match="has got values now"):
        made.on_empty(lost, msgspec.structs.replace(JOINED, offers=len(ME.worker_devices), freshest=ME.worker))
    rewound = [i for i, ps in enumerate(cluster) if any(isinstance(each, m.Rewind) for each in ps.told)]
    assert rewound == goes_back
    restored = cluster[1].told[-1]
    assert isinstance(restored, m.Restored) and restored.dial is not None
    assert (restored.dial.turn, restored.dial.spec.name) == (1, mode)


def test_the_version_of_a_saved_shard() -> None:
    shards = [ShardState(index=0, version=1200), ShardState(index=1, version=900)]
    state = msgspec.structs.replace(STATE, shards=shards)
    assert saved_version(state, 1, num_ps=2, has_rounds=False) == 900
    assert saved_version(state, 1, num_ps=3, has_rounds=False) == 1200  # shards of another cut
    assert saved_version(state, 1, num_ps=2, has_rounds=True) == 1200
