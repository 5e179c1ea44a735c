"""WHO is alive, and who takes part in rounds?"""

from itertools import count

import pytest

from paceline.cluster.membership import Membership, Phase, first_incarnation, incarnation_by_hand, last_incarnation
from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec
from paceline.server.control.config import PsConfig
from paceline.server.control.control import make

push_ids = count(1)


@pytest.fixture
def members() -> Membership:
    three = Membership(3)
    for worker in range(3):
        three.join(worker, 1, now_s=10.0)
    return three


def test_nobody_has_joined_at_first() -> None:
    members = Membership(2)
    assert (members.missing, members.live, members.training) == ([0, 1], [], frozenset())
    assert not members.is_over
    assert not members.is_current(0, 0)
    assert [members.knows(w) for w in (-1, 0, 1, 2)] == [False, True, True, False]


def test_a_newer_incarnation_fences_the_older(members: Membership) -> None:
    assert members.join(1, 2, now_s=11.0)
    assert members.is_current(1, 2)
    assert not members.is_current(1, 1)
    assert not members.join(1, 1, now_s=12.0)
    assert members.is_current(1, 2)


def test_the_same_incarnation_may_connect_again(members: Membership) -> None:
    assert members.leave(1, 1)
    assert not members.is_current(1, 1)
    assert members.join(1, 1, now_s=12.0)
    assert members.is_current(1, 1)


def test_the_end_of_an_old_connection_does_not_touch_the_successor(members: Membership) -> None:
    members.join(1, 2, now_s=11.0)
    assert not members.leave(1, 1)
    assert members.is_current(1, 2)


def test_pausing_is_living_without_training(members: Membership) -> None:
    members.pause(1)
    assert members.training == {0, 2}
    assert members.live == [0, 1, 2]
    assert members.is_current(1, 1)
    members.resume(1)
    assert members.training == {0, 1, 2}


def test_only_who_pauses_resumes_and_only_who_trains_pauses(members: Membership) -> None:
    members.close(0)
    members.leave(1, 1)
    for worker in (0, 1):
        members.pause(worker)
        members.resume(worker)
    assert members.training == {2}
    assert members[0].phase is Phase.CLOSED
    assert members[1].phase is Phase.GONE


def test_who_has_closed_does_not_become_gone_or_lost(members: Membership) -> None:
    members.close(0)
    assert not members.leave(0, 1)
    members.lose(0)
    assert members[0].phase is Phase.CLOSED


def test_who_was_given_up_does_not_come_back_but_a_newer_one_may(members: Membership) -> None:
    members.join(1, 1, 0.0)
    members.lose(1)
    assert not members.join(1, 1, 0.0) and 1 not in members.training
    members.lose(2)
    assert not members.join(2, 1, 0.0), "it was on its way when it was given up"
    assert members.join(1, 2, 0.0) and 1 in members.training


def test_one_that_only_serves_is_not_missed_and_its_next_start_may_say_so_too() -> None:
    members = Membership(3)
    members.join(0, 1, now_s=0.0)
    assert members.stand_aside(1, 1) and members.stand_aside(2, 5)
    assert (members.missing, members.live, members.gone) == ([], [0], [])
    assert not members.stand_aside(2, 4), "that was said by an earlier start"
    members.close(0)
    assert members.is_over


def test_one_that_trains_is_not_out_because_it_serves_too(members: Membership) -> None:
    assert not members.stand_aside(1, 1) and not members.stand_aside(1, 2) and not members.stand_aside(7, 1)
    assert members.training == {0, 1, 2}


def test_it_is_over_when_everybody_has_closed_or_is_lost(members: Membership) -> None:
    members.close(0)
    members.close(1)
    assert not members.is_over
    members.leave(2, 1)
    assert not members.is_over
    members.lose(2)
    assert members.is_over


def test_an_optional_worker_is_never_missing_and_needs_no_end() -> None:
    members = Membership(4, expected=2)
    assert members.missing == [0, 1]
    assert not members.is_over
    for worker in (0, 1):
        members.join(worker, 1, now_s=0.0)
    assert (members.missing, members.live, members.gone) == ([], [0, 1], [])
    for worker in (0, 1):
        members.close(worker)
    assert members.is_over
    assert members.gone == []


def test_an_optional_worker_that_came_counts_like_the_others() -> None:
    members = Membership(4, expected=2)
    for worker in (0, 1, 3):
        members.join(worker, 1, now_s=0.0)
    assert members.training == {0, 1, 3}
    members.close(0)
    members.close(1)
    assert not members.is_over, "a joined worker trains on"
    members.leave(3, 1)
    assert members.gone == [3] and not members.is_over
    members.lose(3)
    assert members.is_over


def test_an_expected_worker_that_never_came_keeps_the_run_open() -> None:
    members = Membership(3, expected=2)
    members.join(0, 1, now_s=0.0)
    members.close(0)
    assert members.missing == [1]
    assert not members.is_over
    members.lose(1)
    assert members.is_over


def test_what_is_lacking_counts_those_there_and_those_done() -> None:
    members = Membership(4, expected=2)
    assert [members.lacks(n) for n in (1, 2, 4)] == [1, 2, 4]
    members.join(0, 1, now_s=0.0)
    members.join(1, 1, now_s=0.0)
    members.pause(1)
    assert [members.lacks(n) for n in (1, 2, 3)] == [0, 0, 1]
    members.close(0)
    assert members.lacks(2) == 0, "one that has done its share is not waited for"
    members.leave(1, 1)
    assert members.lacks(2) == 1
    members.lose(1)
    assert members.lacks(2) == 1
    members.join(2, 1, now_s=0.0)
    assert members.lacks(2) == 0


def test_a_lease_runs_out_in_silence(members: Membership) -> None:
    members.heard(0, 1, 14.0)
    members.heard(1, 7, 14.0)  # of nobody we know
    members.pause(2)
    assert members.expired(15.0, lease_s=5.0) == []
    assert members.expired(15.1, lease_s=5.0) == [(1, 1), (2, 1)]
    members.leave(1, 1)
    members.close(2)
    assert members.expired(100.0, lease_s=5.0) == [(0, 1)]


# --- evicted, though it lives -----------------------------------------------------------------------------------------


def test_who_was_evicted_comes_back_as_a_newer_incarnation_only(members: Membership) -> None:
    assert members.leave(1, 1)
    members.fence(1, 1)
    assert members.gone == [1] and members.live == [0, 2]
    assert not members.join(1, 1, now_s=12.0), "what it sent as this one is void"
    assert not members.is_taken(1, 1), "nobody else has its place"
    assert members.join(1, 2, now_s=12.0)
    assert members.training == {0, 1, 2}


def test_a_later_start_has_the_place_of_an_earlier_one() -> None:
    members = Membership(1)
    second = first_incarnation(2)
    members.join(0, second + 3, now_s=0.0)
    assert not members.join(0, 1, now_s=1.0) and members.is_taken(0, 1)
    assert not members.join(0, second, now_s=1.0) and not members.is_taken(0, second), "that is itself, before"
    started_s = 1_790_000_000
    members.join(0, started_s, now_s=2.0)
    assert members.is_taken(0, started_s - 60), "by hand a minute earlier is another process"


@pytest.mark.parametrize("leaves", ["leave", "fence", "lose", "close"])
def test_by_hand_a_clock_that_was_set_back_locks_nobody_out(leaves: str) -> None:
    members, later, earlier = Membership(1), incarnation_by_hand(1_790_000_060), incarnation_by_hand(1_790_000_000)
    members.join(0, later, now_s=0.0)
    assert not members.join(0, earlier, now_s=1.0) and members.is_taken(0, earlier), "the later one is there"
    if leaves != "close":
        members.leave(0, later)
    getattr(members, leaves)(*((0,) if leaves == "close" else (0, later)))
    assert not members.join(0, earlier, now_s=1.0)
    assert not members.is_taken(0, earlier) and not members.is_given_up(0, earlier)
    assert members.join(0, later + 1, now_s=1.0), "as the next one it gets in"


def test_a_launcher_s_earlier_start_stays_out_whoever_is_there() -> None:
    members = Membership(1)
    members.join(0, first_incarnation(2), now_s=0.0)
    members.leave(0, first_incarnation(2))
    assert members.is_taken(0, first_incarnation(1)), "it counts its starts itself"
    members.lose(0, last_incarnation(first_incarnation(2)))
    assert members.is_given_up(0, first_incarnation(1)) and members.is_given_up(0, first_incarnation(2))
    assert not members.is_given_up(0, first_incarnation(3))


def test_what_counts_is_the_incarnation_that_is_in_or_has_left_by_itself(members: Membership) -> None:
    assert members.counts(0, 1) and members.may_come(0, 1) and members.may_come(0, 2)
    assert not any((members.counts(0, 2), members.counts(3, 1), members.counts(-1, 1), members.may_come(3, 1)))
    assert not Membership(1).counts(0, 0), "nobody has come yet"
    assert Membership(1).may_come(0, 1) and not Membership(1).may_come(0, 0)
    members.join(0, 2, now_s=11.0)
    assert not members.counts(0, 1) and not members.may_come(0, 1), "there is a newer one"
    members.leave(0, 2)
    assert members.counts(0, 2), "its connection ended, and it comes back"
    members.fence(0, 2)
    assert not members.counts(0, 2) and members.may_come(0, 2)
    members.close(1)
    assert members.counts(1, 1) and not members.may_come(1, 1), "the last checkpoint is written by one that has closed"
    members.lose(2)
    assert not members.counts(2, 1) and not members.may_come(2, 1)


def test_only_one_that_has_left_is_fenced(members: Membership) -> None:
    members.fence(0, 1)
    members.close(2)
    members.fence(2, 1)
    assert members[0].phase is Phase.TRAINING and members[2].phase is Phase.CLOSED
    members.leave(1, 1)
    members.fence(1, 7)
    assert members[1].phase is Phase.GONE, "that was said of another one"


def test_a_start_that_is_given_up_is_given_up_in_all_its_lives() -> None:
    assert last_incarnation(first_incarnation(3)) == first_incarnation(4) - 1
    assert last_incarnation(first_incarnation(3) + 7) == first_incarnation(4) - 1
    assert last_incarnation(1_790_000_000) == 1_790_000_000, "a clock tells nothing of what comes after it"


# --- heartbeat without progress ---------------------------------------------------------------------------------------


def push(members: Membership, worker: int, now_s: float) -> None:
    """Push as this worker, on the connection of the same number."""
    config = PsConfig(0, 1, len(members), "r", make_mode(ModeSpec(), len(members)), "bytes", 5.0)
    control = make(config, 0, 0.0, members)
    control.at = {(worker, 1): worker}
    control.pushed(worker, (worker, 1), next(push_ids), 0, 0, now_s)


def test_compiling_for_16_s_or_evaluating_for_a_minute_is_no_stall(members: Membership) -> None:
    for second in range(1, 61):
        members.heard(1, 1, 10.0 + second)
    assert members.stalled(70.0, stall_s=None) == []
    assert members.expired(70.0, lease_s=5.0) == [(0, 1), (2, 1)]


def test_the_limit_is_300_s_or_20_of_its_own_steps(members: Membership) -> None:
    for step in range(1, 41):
        push(members, 0, 10.0 + 30.0 * step)  # half a minute a step
    last_s = 10.0 + 30.0 * 40
    for worker in (1, 2):
        members.progressed(worker, last_s)
    assert members.stalled(last_s + 300.0, stall_s=None) == []
    assert members.stalled(last_s + 301.0, stall_s=None) == [(1, 1), (2, 1)]
    assert members.stalled(last_s + 599.0, stall_s=None) == [(1, 1), (2, 1)]
    assert members.stalled(last_s + 601.0, stall_s=None) == [(0, 1), (1, 1), (2, 1)]


def test_one_slow_step_does_not_move_the_median(members: Membership) -> None:
    for step in range(1, 40):
        push(members, 0, 10.0 + step)
    push(members, 0, 1_000.0)  # it compiled again
    assert members.pulses[0].stall_limit_s(None) == 300.0


def test_a_stall_ends_with_a_push_or_a_question_and_pausing_is_none(members: Membership) -> None:
    members.pause(2)
    assert members.stalled(31.0, stall_s=20.0) == [(0, 1), (1, 1)]
    assert members.still_s(0, 31.0) == 21.0
    push(members, 0, 31.0)
    members.progressed(1, 31.0)
    assert members.stalled(40.0, stall_s=20.0) == []
    assert members.stalled(10_000.0, stall_s=0) == [], "0 means never"
