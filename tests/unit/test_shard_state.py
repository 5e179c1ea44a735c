"""WHAT counts, and who is answered? Single decisions; tests/sim has them by the thousand."""

import pytest
from one_shard import ASYNC, SYNC, A, B, C, applied, decided, freed, of_n, outcomes, shard

from paceline.errors import ProtocolError
from paceline.modes.spec import ModeSpec
from paceline.server.control.actions import Answer, Apply, Free
from paceline.server.control.rounds import Rounds
from paceline.wire.decisions import Decision
from paceline.wire.frames import Outcome

# --- async ------------------------------------------------------------------------------------------------------------


def test_async_counts_every_push_at_once_and_knows_its_staleness() -> None:
    state = shard(ASYNC)
    for key in (A, B, C):
        actions = state.push(key, 1, base=0)
        assert applied(actions) == [(key,)]
        assert outcomes(actions) == {key: Outcome.APPLIED}
    assert state.version == 3
    assert state.staleness == {0: {0: 1}, 1: {1: 1}, 2: {2: 1}}


def test_lr_is_divided_by_one_more_than_the_staleness_where_that_was_asked_for() -> None:
    for spec, divisors in ((ModeSpec(staleness_scale=True), [1, 2, 3]), (ASYNC, [1, 1, 1])):
        state = shard(spec)
        updates = [a for key in (A, B, C) for a in state.push(key, 1, base=0) if isinstance(a, Apply)]
        assert [update.divisor for update in updates] == divisors


def test_I2_a_push_id_is_dealt_with_once() -> None:
    state = shard(ASYNC)
    state.push(A, 1, base=0)
    again = state.push(A, 1, base=0)
    assert (applied(again), outcomes(again)) == ([], {A: Outcome.DUPLICATE})
    assert state.version == 1
    assert applied(state.push(A, 2, base=1)) == [(A,)]
    assert outcomes(state.push(A, 1, base=0)) == {A: Outcome.DUPLICATE}


def test_a_new_incarnation_counts_its_pushes_from_one() -> None:
    state = shard(ASYNC)
    state.push(A, 5, base=0)
    state.members.join(0, 2, 0.0)
    assert outcomes(state.push((0, 2), 1, base=1)) == {(0, 2): Outcome.APPLIED}
    assert outcomes(state.push(A, 6, base=1)) == {A: Outcome.FENCED}
    assert state.version == 2


def test_a_gradient_that_is_not_finite_is_discarded_and_counted() -> None:
    state = shard(ASYNC)
    actions = state.push(A, 1, base=0, is_finite=False)
    assert (applied(actions), outcomes(actions)) == ([], {A: Outcome.NOT_FINITE})
    assert (state.version, state.discarded[0], state.not_finite[0]) == (0, 1, 1)
    assert outcomes(state.push(A, 1, base=0)) == {A: Outcome.DUPLICATE}


@pytest.mark.parametrize("spec", [ASYNC, SYNC, of_n(1)])
def test_a_push_after_the_last_step_does_not_count(spec: ModeSpec) -> None:
    state = shard(spec)
    actions = state.push(A, 1, base=0, is_late=True)
    assert (applied(actions), outcomes(actions)) == ([], {A: Outcome.DISCARDED})
    assert state.version == 0


# --- rounds on ps:0 ---------------------------------------------------------------------------------------------------


def test_sync_waits_for_everybody_and_takes_them_in_worker_order() -> None:
    state = shard(SYNC)
    assert state.push(C, 1, base=0) == []
    assert state.push(A, 1, base=0) == []
    actions = state.push(B, 1, base=0)
    assert applied(actions) == [(A, B, C)]
    assert outcomes(actions) == {C: Outcome.APPLIED, A: Outcome.APPLIED, B: Outcome.APPLIED}
    assert isinstance(actions[0], Apply), "nobody is told before it is applied"
    assert {a.decisions for a in actions if isinstance(a, Answer)} == {(decided(0, A, B, C),)}


def test_k_of_n_takes_the_first_and_discards_the_rest() -> None:
    state = shard(of_n(2))
    state.push(C, 1, base=0)
    assert applied(state.push(A, 1, base=0)) == [(A, C)]
    late = state.push(B, 1, base=0)
    assert outcomes(late) == {B: Outcome.DISCARDED}
    assert [a.decisions for a in late if isinstance(a, Answer)] == [(decided(0, A, C),)]
    assert state.discarded == {1: 1}


def test_a_round_closes_when_the_one_it_waits_for_pauses_or_leaves() -> None:
    state = shard(SYNC)
    state.push(A, 1, base=0)
    state.members.pause(1)
    assert state.changed() == []
    actions = state.left(C)
    assert freed(actions) == [C]
    assert applied(actions) == [(A,)]
    assert outcomes(actions) == {A: Outcome.APPLIED}


def test_the_gradient_of_one_that_died_after_its_vote_counts() -> None:
    state = shard(SYNC)
    state.push(A, 1, base=0)
    state.push(B, 1, base=0)
    assert freed(state.left(A)) == [], "its slot is still to be read"
    actions = state.push(C, 1, base=0)
    assert applied(actions) == [(A, B, C)]
    assert A not in outcomes(actions)
    assert freed(actions) == [A]
    assert actions.index(Free(A)) > [type(action) for action in actions].index(Apply)


def test_the_first_incarnation_that_voted_counts() -> None:
    state = shard(SYNC)
    state.push(A, 7, base=0)
    state.left(A)
    state.members.join(0, 2, 0.0)
    state.push((0, 2), 1, base=0)
    state.push(B, 1, base=0)
    actions = state.push(C, 1, base=0)
    assert applied(actions) == [(A, B, C)]
    assert outcomes(actions)[(0, 2)] is Outcome.DISCARDED
    assert outcomes(state.push((0, 2), 1, base=0)) == {(0, 2): Outcome.DUPLICATE}


def test_a_retry_of_a_vote_is_answered_when_the_round_closes() -> None:
    state = shard(SYNC, num_workers=2)
    state.push(A, 1, base=0)
    state.left(A)
    state.members.join(0, 1, 0.0)
    assert state.push(A, 1, base=0) == []
    actions = state.push(B, 1, base=0)
    assert applied(actions) == [(A, B)]
    assert outcomes(actions) == {A: Outcome.APPLIED, B: Outcome.APPLIED}


def test_a_round_without_a_finite_gradient_makes_no_update() -> None:
    state = shard(SYNC, num_workers=2)
    state.push(A, 1, base=0, is_finite=False)
    actions = state.push(B, 1, base=0, is_finite=False)
    assert (applied(actions), state.version) == ([], 0)
    assert outcomes(actions) == {A: Outcome.NOT_FINITE, B: Outcome.NOT_FINITE}
    state.push(A, 2, base=0)
    assert applied(state.push(B, 2, base=0, is_finite=False)) == [(A,)]


def test_decisions_are_kept_until_a_worker_has_seen_them_applied_everywhere() -> None:
    state = shard(of_n(1), num_workers=2)
    state.push(A, 1, base=0)
    assert state.rounds.open_decisions == (decided(0, A),)
    state.push(B, 1, base=0)  # late: it says nothing about the other shards
    assert state.rounds.open_decisions == (decided(0, A),)
    state.push(B, 2, base=1)  # a vote for round 1: B has read version 1 from every shard
    assert state.rounds.open_decisions == (decided(1, B),)


def test_I1_a_round_has_one_contributor_set_whoever_asks() -> None:
    rounds = Rounds()
    assert rounds.vote(1, incarnation=1, push_id=1, is_finite=True, round_=0)
    assert rounds.vote(0, incarnation=3, push_id=1, is_finite=True, round_=0)
    assert not rounds.vote(1, incarnation=2, push_id=1, is_finite=True, round_=0)
    assert rounds.close(0) == ((0, 3, 1), (1, 1, 1))
    assert rounds.votes == rounds.given == {}
    assert rounds.open_decisions == ((0, ((0, 3, 1), (1, 1, 1))),)


# --- rounds on the other shards ---------------------------------------------------------------------------------------


def test_a_shard_that_obeys_holds_gradients_until_their_round_is_decided() -> None:
    state = shard(SYNC, is_coordinator=False)
    for key in (A, B, C):
        assert outcomes(state.stage(key, 1, 0)) == {key: Outcome.STAGED}
    assert state.version == 0
    actions = state.carry(A, 1, (decided(0, A, B, C),))
    assert applied(actions) == [(A, B, C)]
    assert outcomes(actions) == {A: Outcome.APPLIED}
    assert (state.version, state.staged) == (1, {})


def test_a_decision_is_applied_once_whoever_carries_it() -> None:
    state = shard(SYNC, num_workers=2, is_coordinator=False)
    state.stage(A, 1, 0)
    state.stage(B, 1, 0)
    state.carry(A, 1, (decided(0, A, B),))
    again = state.carry(B, 1, (decided(0, A, B),))
    assert (applied(again), state.version) == ([], 1)


def test_what_was_staged_survives_its_connection_and_its_successor() -> None:
    state = shard(SYNC, num_workers=2, is_coordinator=False)
    state.stage(A, 1, 0)
    state.stage(B, 1, 0)
    assert freed(state.left(A)) == []
    state.members.join(0, 2, 0.0)
    state.stage((0, 2), 1, 0)
    actions = state.carry(B, 1, (decided(0, A, B),))
    assert applied(actions) == [(A, B)]
    assert freed(actions) == [A]
    assert state.staged == {}


def test_a_gradient_for_a_round_that_is_decided_is_acknowledged_and_dropped() -> None:
    state = shard(of_n(1), num_workers=2, is_coordinator=False)
    state.stage(A, 1, 0)
    state.carry(A, 1, (decided(0, A),))
    assert outcomes(state.stage(B, 1, 0)) == {B: Outcome.STAGED}
    assert state.staged == {}


def test_one_that_is_fenced_stages_nothing() -> None:
    state = shard(SYNC, is_coordinator=False)
    state.members.join(0, 2, 0.0)
    assert outcomes(state.stage(A, 1, 0)) == {A: Outcome.FENCED}
    assert state.staged == {}


@pytest.mark.parametrize("decision", [decided(1, A), decided(0, A, B), decided(0, (0, 2)), (0, ((0, 1, 2),))], ids=str)
def test_a_decision_that_cannot_be_obeyed_is_a_protocol_error(decision: Decision) -> None:
    state = shard(SYNC, is_coordinator=False)
    state.stage(A, 1, 0)
    with pytest.raises(ProtocolError):
        state.carry(A, 1, (decision,))
    assert state.version == 0


def test_a_gradient_from_the_future_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="round 1 on a shard at version 0"):
        shard(SYNC, is_coordinator=False).stage(A, 1, 1)
