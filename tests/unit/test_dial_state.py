"""WHO waits, for what, and what does another mode change? Single decisions of the dial; tests/sim has them by the
thousand."""

import pytest
from one_shard import ASYNC, SYNC, A, B, C, applied, decided, flags, freed, of_n, outcomes, parts, shard

from paceline.modes import make
from paceline.modes.spec import ModeSpec
from paceline.server.control.actions import Add, Answer, Part, Wake
from paceline.server.control.state import ShardState
from paceline.wire.frames import Flag, Outcome

# --- several gradients of one worker in a round -----------------------------------------------------------------------


def test_a_worker_with_tokens_left_goes_on_and_its_gradients_are_added_up() -> None:
    state = shard(of_n(3), num_workers=2)
    assert state.push(A, 1, base=0)[0] == Add(A, True, 1)
    second = state.push(A, 2, base=0)
    assert second[0] == Add(A, False, 2)
    assert outcomes(second) == {A: Outcome.ADDED}
    last = state.push(B, 1, base=0)
    assert parts(last) == [Part(A, 2, 2, has_sum=True, has_slot=False), Part(B, 1)]
    assert outcomes(last) == {B: Outcome.APPLIED}
    assert state.rounds.open_decisions == ((0, ((0, 1, 2), (1, 1, 1))),)


def test_a_worker_without_tokens_waits_and_its_slot_counts_too() -> None:
    state = shard(of_n(3, extra_tokens=1), num_workers=2)
    state.push(A, 1, base=0)
    assert state.push(A, 2, base=0) == []
    last = state.push(B, 1, base=0)
    assert parts(last) == [Part(A, 2, 2, has_sum=True, has_slot=True), Part(B, 1)]
    assert outcomes(last) == {A: Outcome.APPLIED, B: Outcome.APPLIED}


def test_a_gradient_that_is_not_finite_takes_a_token_and_adds_nothing() -> None:
    state = shard(of_n(2, extra_tokens=1), num_workers=1)
    actions = state.push(A, 1, base=0, is_finite=False)
    assert (outcomes(actions), state.staged) == ({A: Outcome.NOT_FINITE}, {})
    assert parts(state.push(A, 2, base=0)) == [Part(A, 2)]
    assert (state.discarded[0], state.not_finite[0]) == (1, 1)


def test_I2_a_retry_of_what_was_added_is_told_so_and_adds_nothing() -> None:
    state = shard(of_n(3), num_workers=2)
    state.push(A, 1, base=0)
    again = state.push(A, 1, base=0)
    assert [type(a) for a in again] == [Answer]
    assert outcomes(again) == {A: Outcome.ADDED}
    state.push(A, 2, base=0)
    state.push(A, 3, base=0)
    assert state.version == 1
    assert outcomes(state.push(A, 2, base=0)) == {A: Outcome.DUPLICATE}


def test_a_round_does_not_wait_for_one_that_waits_for_it() -> None:
    """The successor of one that voted cannot add to that vote: when it waits, nobody can."""
    state = shard(of_n(5), num_workers=2)
    state.push(A, 1, base=0)
    state.left(A)
    state.members.join(0, 2, 0.0)
    assert state.push((0, 2), 1, base=0) == [], "B may still come"
    state.members.close(1)
    actions = state.changed()
    assert applied(actions) == [(A,)]
    assert outcomes(actions) == {(0, 2): Outcome.DISCARDED}


def staging(*push_ids: int) -> ShardState:
    """A shard that obeys, on which A has staged these, and said of all but the last that they were counted."""
    state = shard(of_n(5), num_workers=2, is_coordinator=False)
    for push_id in push_ids:
        state.stage(A, push_id, 0)
        if push_id != push_ids[-1]:
            assert state.count(A, push_id)[0] == Add(A, push_id == push_ids[0], push_id)
    return state


@pytest.mark.parametrize(
    ("push_ids", "count", "part"),
    [
        ([1], 1, Part(A, 1)),
        ([1, 2], 1, Part(A, 1, 1, has_sum=True, has_slot=False)),
        ([1, 2], 2, Part(A, 2, 2, has_sum=True)),
        ([1, 2, 3], 2, Part(A, 2, 2, has_sum=True, has_slot=False)),
    ],
    ids=str,
)
def test_a_shard_that_obeys_knows_which_gradients_a_decision_means(push_ids: list[int], count: int, part: Part) -> None:
    assert parts(staging(*push_ids).carry(B, 0, ((0, ((0, 1, count),)),))) == [part]


def test_that_it_was_counted_may_be_said_twice_and_too_late() -> None:
    state = staging(1, 2)
    assert state.count(A, 1) == [Answer(A, 1, Outcome.ADDED, 0)]
    state.carry(B, 0, ((0, ((0, 1, 2),)),))
    assert state.count(A, 2) == [Answer(A, 2, Outcome.ADDED, 1)]


# --- grace ------------------------------------------------------------------------------------------------------------


def test_a_round_that_is_due_waits_for_more_until_its_grace_is_over() -> None:
    state = shard(of_n(1, grace_ms=5000))
    assert state.push(A, 1, base=0, now_s=10.0) == [Wake(5.0)]
    assert state.push(B, 1, base=0, now_s=11.0) == [Wake(4.0)]
    assert state.changed(now_s=14.5) == [Wake(0.5)], "a timer that came early is set again"
    assert applied(state.changed(now_s=15.0)) == [(A, B)]
    assert state.changed(now_s=15.0) == [], "nothing is open any more"


def test_a_grace_ends_when_nobody_else_can_come_and_ends_no_other_round() -> None:
    state = shard(of_n(1, grace_ms=5000))
    state.push(A, 1, base=0, now_s=10.0)
    state.push(B, 1, base=0, now_s=11.0)
    assert applied(state.push(C, 1, base=0, now_s=12.0)) == [(A, B, C)]
    assert state.push(A, 2, base=1, now_s=14.0) == [Wake(5.0)]
    assert state.changed(now_s=15.0) == [Wake(4.0)], "that was the timer of the round before"
    assert applied(state.changed(now_s=19.0)) == [(A,)]


def test_a_grace_may_be_a_share_of_the_time_that_rounds_take() -> None:
    state = shard(of_n(1, grace_share=0.3))
    assert applied(state.push(A, 1, base=0, now_s=1e6)) == [(A,)], "nothing is measured yet"
    (wake,) = state.push(A, 2, base=1, now_s=1e6 + 10)
    assert isinstance(wake, Wake)
    assert wake.after_s == pytest.approx(3.0)


# --- waiting where every push is an update ----------------------------------------------------------------------------


def test_I3_a_worker_too_far_ahead_waits_for_the_slowest() -> None:
    state = shard(ModeSpec(name="bounded", staleness=1), num_workers=2)
    assert outcomes(state.push(A, 1, base=0, now_s=1.0)) == {A: Outcome.APPLIED}
    ahead = state.push(A, 2, base=1, now_s=2.0)
    assert (applied(ahead), outcomes(ahead)) == ([(A,)], {}), "it counts at once, and is answered later"
    assert state.push(A, 2, base=1, now_s=3.0) == [], "a retry waits too"
    actions = state.push(B, 1, base=2, now_s=5.0)
    assert flags(actions) == {B: 0, A: Flag.WAITED}
    assert state.waited_s == {0: 3.0}


def test_a_joiner_is_no_slower_than_the_slowest() -> None:
    state = shard(ModeSpec(name="bounded", staleness=1))
    state.members.pause(2)
    for push_id in range(1, 5):
        state.push(A, push_id, base=0)
        state.push(B, push_id, base=0)
    state.members.resume(2)
    state.entered(2)
    assert outcomes(state.push(A, 5, base=0)) == {A: Outcome.APPLIED}
    assert outcomes(state.push(A, 6, base=0)) == {}


@pytest.mark.parametrize("leaves", ["pause", "left"])
def test_nobody_waits_for_one_that_does_not_train(leaves: str) -> None:
    state = shard(ModeSpec(name="bounded", staleness=0), num_workers=2)
    assert outcomes(state.push(A, 1, base=0)) == {}
    if leaves == "left":
        actions = state.left(B)
    else:
        state.members.pause(1)
        actions = state.changed()
    assert outcomes(actions) == {A: Outcome.APPLIED}


@pytest.mark.parametrize("spec", [ASYNC, SYNC, of_n(1), ModeSpec(name="bounded")], ids=str)
def test_too_few_workers_wait_for_one_to_join(spec: ModeSpec) -> None:
    state = shard(spec, num_workers=2, min_workers=2)
    state.left(B)
    assert state.lacks == 1
    assert outcomes(state.push(A, 1, base=0)) == {}
    assert state.changed() == []
    state.members.join(1, 2, 0.0)
    state.members.pause(1)
    assert outcomes(state.changed()) == {A: Outcome.APPLIED}


# --- another mode -----------------------------------------------------------------------------------------------------


def test_while_the_mode_changes_rounds_take_whoever_has_not_stood_still() -> None:
    state = shard(SYNC)
    state.push(A, 1, base=0)
    assert state.begin_switch() == []
    state.ready.add(C)
    actions = state.push(B, 1, base=0)
    assert applied(actions) == [(A, B)]
    assert flags(actions) == {A: Flag.WAITED | Flag.SWITCH, B: Flag.WAITED | Flag.SWITCH}


def test_while_the_mode_changes_no_grace_runs() -> None:
    state = shard(of_n(1, grace_ms=5000))
    state.push(A, 1, base=0, now_s=10.0)
    assert applied(state.begin_switch(now_s=11.0)) == [(A,)]
    assert applied(state.push(B, 1, base=1, now_s=12.0)) == [(B,)]


def test_while_the_mode_changes_nobody_goes_on_into_the_same_round() -> None:
    state = shard(of_n(4), num_workers=2)
    state.push(A, 1, base=0)
    state.begin_switch()
    assert state.push(A, 2, base=0) == []
    assert parts(state.push(B, 1, base=0)) == [Part(A, 2, 2, has_sum=True), Part(B, 1)]


def test_while_the_mode_changes_nobody_waits_for_the_slowest() -> None:
    state = shard(ModeSpec(name="bounded", staleness=0), num_workers=2)
    state.push(A, 1, base=0)
    assert flags(state.begin_switch()) == {A: Flag.WAITED | Flag.SWITCH}


def test_a_new_mode_starts_all_clocks_and_forgets_what_its_dial_carries() -> None:
    state = shard(of_n(1), num_workers=2)
    state.push(A, 1, base=0)
    state.begin_switch()
    state.switch(make(ModeSpec(name="bounded", staleness=0), 2))
    assert (state.turn, state.is_switching, state.rounds.open_decisions) == (1, False, ())
    assert outcomes(state.push(A, 2, base=1)) == {}
    state.begin_switch()
    state.switch(make(ModeSpec(name="bounded", staleness=0), 2))
    assert state.clocks == {}


def test_a_shard_counts_rounds_from_where_it_stands() -> None:
    state = shard(ASYNC, num_workers=2, is_coordinator=False)
    for push_id in (1, 2, 3):
        state.push(A, push_id, base=0)
    state.align(make(SYNC, 2), turn=1, version=1)
    assert state.offset == 2
    state.stage(A, 4, 3)
    state.stage(B, 1, 3)
    assert applied(state.carry(A, 4, (decided(1, A, B),))) == [(A, B)]
    assert applied(state.carry(B, 1, (decided(0, A), decided(1, A, B)))) == [], "all of that is older"


def test_a_mode_that_is_known_changes_nothing() -> None:
    state = shard(SYNC, num_workers=2, is_coordinator=False)
    state.align(make(of_n(1), 2), turn=2, version=0)
    state.stage(A, 1, 0)
    for epoch in (1, 2):
        assert state.align(make(ASYNC, 2), epoch, version=7) == []
    assert (state.turn, state.offset, state.mode.has_rounds) == (2, 0, True)
    assert A in state.staged


def test_what_was_staged_before_the_mode_changed_is_dropped_with_it() -> None:
    state = shard(SYNC, num_workers=2, is_coordinator=False)
    state.stage(A, 1, 0)
    state.left(A)
    assert freed(state.align(make(of_n(1), 2), turn=1, version=0)) == [A]
    assert state.staged == {}


def test_what_was_sent_before_the_mode_changed_does_not_count_after_it() -> None:
    state = shard(ASYNC, num_workers=2, is_coordinator=False)
    state.align(make(SYNC, 2), turn=1, version=0)
    actions = state.push(A, 1, base=0)
    assert (applied(actions), outcomes(actions)) == ([], {A: Outcome.DISCARDED})
    state.align(make(ASYNC, 2), turn=2, version=0)
    assert outcomes(state.stage(A, 2, 0)) == {A: Outcome.STAGED}
    assert (state.staged, state.version) == ({}, 0)
