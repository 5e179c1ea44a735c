"""WHAT must every mode do? One suite over all of them, asked directly and through a shard's state."""

import pytest

from paceline import modes
from paceline.cluster.membership import Membership
from paceline.errors import UsageError
from paceline.modes.base import Mode
from paceline.modes.quorum import Quorum
from paceline.modes.spec import ModeSpec
from paceline.server.control.actions import Answer, Apply
from paceline.server.control.state import ShardState
from paceline.wire.frames import Outcome

NUM_WORKERS = 3
VARIANTS: dict[str, list[ModeSpec]] = {
    "async": [ModeSpec(), ModeSpec(staleness_scale=True)],
    "sync": [ModeSpec(name="sync")],
    "sync, k of n": [
        *(ModeSpec(name="sync", replicas_to_aggregate=k) for k in (1, 2, 3, 5)),
        ModeSpec(name="sync", replicas_to_aggregate=2, extra_tokens=1),
        ModeSpec(name="sync", replicas_to_aggregate=2, grace_ms=5),
        ModeSpec(name="sync", replicas_to_aggregate=2, grace_share=0.2),
    ],
    "bounded": [ModeSpec(name="bounded", staleness=s) for s in (0, 1, 4)],
    "local": [
        ModeSpec(name="local"),
        ModeSpec(name="local", outer="async"),
        ModeSpec(name="local", replicas_to_aggregate=2),
        ModeSpec(name="local", replicas_to_aggregate=5),
    ],
}
EVERY = [spec for specs in VARIANTS.values() for spec in specs]
every_mode = pytest.mark.parametrize("spec", EVERY, ids=str)


def make(spec: ModeSpec, num_workers: int = NUM_WORKERS) -> Mode:
    return modes.make(spec, num_workers)


def training(num_workers: int = NUM_WORKERS) -> Membership:
    members = Membership(num_workers)
    for worker in range(num_workers):
        members.join(worker, 1, 0.0)
    return members


def test_every_mode_is_here() -> None:
    assert VARIANTS.keys() == modes.MODES.keys()


@every_mode
def test_a_mode_knows_its_numbers(spec: ModeSpec) -> None:
    assert make(spec).spec == spec


@every_mode
def test_a_gradient_of_the_newest_version_counts(spec: ModeSpec) -> None:
    assert all(make(spec).admits(version, version) for version in range(5))


@every_mode
def test_nothing_is_due_without_a_gradient(spec: ModeSpec) -> None:
    for who in (set(), {0}, {0, 1, 2}):
        assert not make(spec).is_due({}, who)


@every_mode
def test_it_is_due_when_nobody_else_can_come(spec: ModeSpec) -> None:
    mode, tokens = make(spec), spec.tokens_of(NUM_WORKERS)
    assert mode.is_due({0: 1}, set())
    assert mode.is_due({0: 1, 1: tokens}, {1})
    assert mode.is_due(dict.fromkeys(range(NUM_WORKERS), tokens), {0, 1, 2})


@every_mode
def test_more_gradients_never_make_it_less_due(spec: ModeSpec) -> None:
    mode, who = make(spec), frozenset({0, 1, 2})
    due = [mode.is_due(dict.fromkeys(range(n), 1), who) for n in range(4)]
    assert due == sorted(due)
    due = [mode.is_due({0: n, 1: 1}, who) for n in range(1, 8)]
    assert due == sorted(due)


@every_mode
def test_fewer_that_train_never_make_it_less_due(spec: ModeSpec) -> None:
    mode = make(spec)
    due = [mode.is_due({0: 1}, set(range(n))) for n in range(4)]
    assert due == sorted(due, reverse=True)


@every_mode
def test_who_is_not_ahead_may_go_on_and_further_ahead_is_never_easier(spec: ModeSpec) -> None:
    may = [make(spec).may_read(ahead) for ahead in range(8)]
    assert may[0]
    assert may == sorted(may, reverse=True)
    assert all(may) is not (make(spec).has_rounds or make(spec).keeps_clocks), "somebody waits, or nobody does"


@every_mode
def test_a_grace_is_as_long_as_was_asked_for(spec: ModeSpec) -> None:
    mode = make(spec)
    assert mode.grace_s(10.0) == pytest.approx(spec.grace_ms / 1e3 or spec.grace_share * 10.0)
    assert mode.grace_s(0.0) == pytest.approx(spec.grace_ms / 1e3), "nothing is measured yet"


@every_mode
def test_what_a_mode_says_of_itself_fits_together(spec: ModeSpec) -> None:
    mode = make(spec)
    if mode.is_lockstep:
        assert mode.has_rounds
        assert not mode.is_due({0: 1, 1: 1}, {0, 1, 2})
    if mode.adds_up:
        assert mode.has_rounds
        assert mode.may_read(1), "after its first gradient it goes on"
        assert not mode.may_read(spec.tokens_of(NUM_WORKERS))
    assert not (mode.has_rounds and mode.keeps_clocks)


@every_mode
def test_every_push_of_a_lone_worker_counts(spec: ModeSpec) -> None:
    """Each is an update, except where it first adds up what a round wants."""
    state = ShardState(make(spec, 1), training(1), is_coordinator=True)
    wanted = spec.replicas_to_aggregate if state.mode.adds_up else 1
    for push_id in range(1, 3 * wanted + 1):
        actions = state.push((0, 1), push_id, base=state.version)
        updates = [a for a in actions if isinstance(a, Apply)]
        (answer,) = (a for a in actions if isinstance(a, Answer))
        assert answer.outcome is (Outcome.ADDED if push_id % wanted else Outcome.APPLIED)
        assert [part.gradients for update in updates for part in update.parts] == ([] if push_id % wanted else [wanted])
    assert (state.version, state.waiting) == (3, {})


@every_mode
def test_all_pushes_of_a_round_are_answered(spec: ModeSpec) -> None:
    """When everybody has given what it may, nobody waits any more, and what was said to count counts once."""
    state = ShardState(make(spec), training(), is_coordinator=True)
    told: dict[int, list[Outcome]] = {worker: [] for worker in range(NUM_WORKERS)}
    gradients = 0
    for push_id in range(1, spec.tokens_of(NUM_WORKERS) + 1):
        for worker in range(NUM_WORKERS):
            actions = state.push((worker, 1), push_id, base=0)
            actions += state.changed(now_s=100.0)  # any grace is over
            gradients += sum(p.gradients for a in actions if isinstance(a, Apply) for p in a.parts)
            for answer in (a for a in actions if isinstance(a, Answer)):
                told[answer.key[0]].append(answer.outcome)
    assert state.waiting == {}
    assert gradients == sum(o in (Outcome.APPLIED, Outcome.ADDED) for outcomes in told.values() for o in outcomes)
    assert all(told.values())


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="async, sync"):
        modes.make(ModeSpec(name="fast"), 2)


@pytest.mark.parametrize(
    "spec",
    [
        ModeSpec(name="sync", replicas_to_aggregate=0),
        ModeSpec(name="sync", replicas_to_aggregate=7, extra_tokens=1),
        ModeSpec(name="bounded", staleness=-1),
        ModeSpec(name="local", local_steps=0),
        ModeSpec(name="async", replicas_to_aggregate=2),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(spec: ModeSpec) -> None:
    with pytest.raises(UsageError):
        make(spec)


def test_k_of_n_is_a_kind_of_sync() -> None:
    assert isinstance(make(ModeSpec(name="sync", replicas_to_aggregate=2)), Quorum)
    assert not isinstance(make(ModeSpec(name="sync")), Quorum)
