"""Who is started again, when, and who is not."""

import pytest

from paceline.launchers.restart import (
    FIRST_S,
    HEALTHY_S,
    LONGEST_S,
    Again,
    Ended,
    Over,
    back_off_s,
    decide,
    will_repeat,
)
from paceline.telemetry.lines import FailedAt

KILLED = Ended(code=-9)


@pytest.mark.parametrize("code", [-9, -11, -6, -15, 1, 5, 255])
def test_a_task_that_failed_is_started_again(code: int) -> None:
    assert decide([Ended(code=code)], 3) == Again(after_s=FIRST_S)


def test_one_that_has_done_its_share_is_not() -> None:
    assert decide([Ended(code=0)], 3) == Over()
    assert decide([KILLED, Ended(code=0)], 3) == Over()


@pytest.mark.parametrize(
    ("code", "why"), [(2, "its own message"), (3, "waited as long"), (4, "trained to the end"), (130, "interrupted")]
)
def test_one_that_says_itself_that_it_would_only_repeat_is_not(code: int, why: str) -> None:
    decision = decide([Ended(code=code)], 3)
    assert isinstance(decision, Over) and why in decision.why


def test_one_that_lost_another_has_not_waited_for_it() -> None:
    waited = Ended(code=3, gist="paceline: error: gave up after 300 s: ps:0 did not answer")
    lost = Ended(code=3, gist="paceline: error: /job:worker/replica:0/task:1 went away while it ran f")
    assert decide([waited], 3) == Over("it has waited as long as it may")
    assert decide([lost], 3) == Over("its own message says why")


@pytest.mark.parametrize("most", [1, 3])
def test_so_often_and_no_more(most: int) -> None:
    ends = [KILLED] * most
    assert isinstance(decide(ends, most), Again)
    decision = decide([*ends, KILLED], most)
    assert isinstance(decision, Over) and f"{most} times already" in decision.why


def test_with_no_restarts_allowed_nothing_is_said_about_them() -> None:
    assert decide([KILLED], 0) == Over() == decide([Ended(code=1, gist="ValueError")], 0)


def test_the_same_error_twice_without_a_step_is_enough() -> None:
    typo = Ended(code=1, gist="NameError: lr")
    assert isinstance(decide([typo], 3), Again)
    decision = decide([typo, typo], 3)
    assert isinstance(decision, Over) and "without a step" in decision.why


@pytest.mark.parametrize(
    "second",
    [
        Ended(code=1, gist="NameError: lr", has_stepped=True),
        Ended(code=1, gist="KeyError: 1"),
        Ended(code=-9),
    ],
)
def test_another_error_or_a_step_in_between_is_not(second: Ended) -> None:
    assert isinstance(decide([Ended(code=1, gist="NameError: lr"), second], 3), Again)


def test_the_same_error_twice_at_the_same_step_is_enough() -> None:
    def failed(step: int, of_start: int, batch: tuple[int, int, int] | None = None, code: int = 1) -> Ended:
        at = FailedAt(step=step, step_of_start=of_start, batch=batch)
        return Ended(code=code, gist="" if code == 7 else "IndexError: 9", has_stepped=True, failed_at=at)

    first = failed(40, 40, (1, 1, 8))
    for again in (failed(43, 5, (1, 1, 8)), failed(40, 2), failed(78, 40)):  # goes on; goes on; begins anew
        decision = decide([first, again], 3)
        assert isinstance(decision, Over) and "at the same step" in decision.why
        assert will_repeat([first, again])
    for other in (failed(43, 5, (1, 1, 10)), failed(43, 5), failed(40, 40, code=7), KILLED):
        assert isinstance(decide([first, other], 3), Again)
    assert isinstance(decide([failed(4, 4, code=7), failed(4, 4, code=7)], 3), Over), "sys.exit(7) says nothing"


def test_kills_are_never_the_same_error() -> None:
    assert isinstance(decide([KILLED, KILLED, KILLED], 3), Again)


@pytest.mark.parametrize("code", [-9, -15, -2])
def test_what_a_killed_one_had_said_before_is_no_error(code: int) -> None:
    killed = Ended(code=code, gist="ValueError: caught, and printed")
    failed = Ended(code=1, gist=killed.gist)
    for ends in ([killed, killed], [failed, killed], [killed, failed]):
        assert isinstance(decide(ends, 3), Again)
    assert isinstance(decide([failed, failed], 3), Over)


@pytest.mark.parametrize("gist", ["SyntaxError: '(' was never closed", "IndentationError: unexpected indent"])
def test_a_script_that_cannot_be_read_is_not_started_again(gist: str) -> None:
    assert decide([Ended(code=1, gist=gist)], 3) == Over("Python cannot read it: its own message says what to change")
    assert isinstance(decide([Ended(code=1, gist=gist, has_stepped=True)], 3), Again), "it read something else"


def test_what_the_same_command_would_only_repeat() -> None:
    assert will_repeat([Ended(code=2)])
    assert will_repeat([Ended(code=1, gist="SyntaxError: x")])
    assert will_repeat([Ended(code=1, gist="KeyError: 1"), Ended(code=1, gist="KeyError: 1")])
    assert not will_repeat([Ended(code=1, gist="KeyError: 1")])
    assert not will_repeat([Ended(code=-9)])
    assert not will_repeat([])


def test_it_waits_longer_each_time_up_to_a_limit() -> None:
    waits = [back_off_s([KILLED] * count) for count in range(1, 9)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_S, LONGEST_S]


def test_a_minute_of_health_makes_it_short_again() -> None:
    healthy = Ended(code=-9, lived_s=HEALTHY_S)
    assert back_off_s([KILLED, KILLED, KILLED, healthy]) == FIRST_S
    assert back_off_s([KILLED, healthy, KILLED]) == FIRST_S
    assert back_off_s([KILLED, healthy, KILLED, KILLED]) == 2 * FIRST_S


@pytest.mark.parametrize("code", [1, -11, -6, -7])
def test_a_ps_that_fails_at_once_by_itself_with_old_memory_comes_back_empty(code: int) -> None:
    ends = [KILLED, Ended(code=code, lived_s=0.5, had_memory=True)]
    assert decide(ends, 3) == Again(after_s=0.2, is_empty=True)


@pytest.mark.parametrize(
    "end",
    [
        Ended(code=-9, lived_s=0.01, had_memory=True),  # killed from outside while it recovered
        Ended(code=-11, lived_s=20.0, had_memory=True),  # it had recovered
        Ended(code=-11, lived_s=0.01),  # it had none
    ],
)
def test_else_it_keeps_its_memory(end: Ended) -> None:
    decision = decide([KILLED, end], 3)
    assert isinstance(decision, Again) and not decision.is_empty
