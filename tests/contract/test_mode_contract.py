"""WHAT must every mode do? One suite over all of them, asked directly and through a shard's state."""

from collections.abc import Callable

import pytest

from paceline import modes
from paceline.cluster.membership import Membership
from paceline.modes.base import Mode
from paceline.modes.quorum import Quorum
from paceline.server.state import Answer, Apply, ShardState
from paceline.wire.frames import Outcome

EVERY: dict[str, Callable[[], Mode]] = {
    **modes.MODES,
    **{f"{k} of n": (lambda k=k: Quorum(k)) for k in (1, 2, 3)},
}
every_mode = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)


@every_mode
def test_a_gradient_of_the_newest_version_counts(make: Callable[[], Mode]) -> None:
    assert all(make().admits(version, version) for version in range(5))


@every_mode
def test_nothing_is_due_without_a_gradient(make: Callable[[], Mode]) -> None:
    for training in (set(), {0}, {0, 1, 2}):
        assert not make().is_due(set(), training)


@every_mode
def test_it_is_due_when_nobody_else_can_come(make: Callable[[], Mode]) -> None:
    mode = make()
    assert mode.is_due({0}, set())
    assert mode.is_due({0, 1}, {1})
    assert mode.is_due({0, 1, 2}, {0, 1, 2})


@every_mode
def test_more_gradients_never_make_it_less_due(make: Callable[[], Mode]) -> None:
    mode, training = make(), frozenset({0, 1, 2})
    due = [mode.is_due(set(range(n)), training) for n in range(4)]
    assert due == sorted(due)


@every_mode
def test_fewer_that_train_never_make_it_less_due(make: Callable[[], Mode]) -> None:
    mode = make()
    due = [mode.is_due({0}, set(range(n))) for n in range(4)]
    assert due == sorted(due, reverse=True)


@every_mode
def test_after_its_update_a_worker_may_read(make: Callable[[], Mode]) -> None:
    assert make().may_read(3, 4)


@every_mode
def test_lockstep_goes_with_rounds_that_take_everybody(make: Callable[[], Mode]) -> None:
    mode = make()
    if mode.is_lockstep:
        assert mode.has_rounds
        assert not mode.is_due({0, 1}, {0, 1, 2})


@every_mode
def test_every_push_of_a_lone_worker_is_one_update(make: Callable[[], Mode]) -> None:
    members = Membership(1)
    members.join(0, 1, 0.0)
    state = ShardState(make(), members, is_coordinator=True)
    for push_id in range(1, 6):
        apply, answer = state.push((0, 1), push_id, base=state.version)
        assert apply == Apply(((0, 1),))
        assert isinstance(answer, Answer)
        assert (answer.outcome, answer.version) == (Outcome.APPLIED, push_id)


@every_mode
def test_all_pushes_of_a_round_are_answered(make: Callable[[], Mode]) -> None:
    members = Membership(3)
    for worker in range(3):
        members.join(worker, 1, 0.0)
    state = ShardState(make(), members, is_coordinator=True)
    told = [a for w in range(3) for a in state.push((w, 1), 1, base=0) if isinstance(a, Answer)]
    assert sorted(a.key for a in told) == [(0, 1), (1, 1), (2, 1)]
    assert state.waiting == {}


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(modes.UsageError, match="async, sync"):
        modes.make("fast")


def test_k_of_n_is_a_kind_of_sync() -> None:
    assert isinstance(modes.make("sync", replicas_to_aggregate=2), Quorum)
    assert not isinstance(modes.make("sync"), Quorum)
