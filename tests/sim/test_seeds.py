"""WHICH runs failed once? Each seed says what was wrong, and was seen to fail without the fix."""

import pytest
from sim_plan import Plan, bounded, local, of_n
from sim_run import simulate

CHAOS = Plan(1, 2, deaths=2, evictions=1, zombies=1, pauses=0.1, not_finite=0.1)
RETRYING = Plan(1, 4, "async", cuts=3, retries=True, deaths=2, pauses=0.1, not_finite=0.1)
RESTARTING = Plan(
    1, 4, bounded(1), False, deaths=1, cuts=1, pauses=0.1, not_finite=0.1, retries=True, ps_restarts=2
)  # fmt: skip
ENDING = Plan(
    1, 2, of_n(2, extra_tokens=3, grace_share=0.5), False, steps=2, total=14, deaths=1, zombies=1, pauses=0.1,
    retries=True, switches=8, ps_restarts=3, span=30.0,
)  # fmt: skip
EVICTING = Plan(
    2, 3, local("async"), steps=4, total=8, restarts=0.3, evictions=1, zombies=1, retries=True, switches=8, span=30.0
)  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "seed"),
    [
        # A barrier's or a ticket's answer to one that had just died ended the connection of whoever released it.
        pytest.param(CHAOS, 106, id="an answer to the dead hurts nobody else"),
        # A pause closed the round, the pausing worker died before its answer, and the round's answers were dropped.
        pytest.param(Plan(1, 3, deaths=3, pauses=0.3, steps=3), 185, id="others are answered, whoever caused it"),
        # A frame that a thread held while its worker connected again was counted for the new connection.
        pytest.param(RETRYING, 38, id="a replaced connection says nothing any more"),
        # A ticket was taken back by the answer to a pull, and given to somebody else as well.
        pytest.param(Plan(2, 2, "async", total=12), 24, id="a pull does not touch tickets"),
        # A ticket was granted to one that had died since its push was counted, and never came back.
        pytest.param(Plan(1, 3, "async", deaths=4, total=12), 33, id="the dead get no tickets"),
        # A ticket of the last round, with parameters of the round after it, made one update too many.
        pytest.param(Plan(1, 2, "1", total=12), 1, id="a late ticket makes no update"),
        # One held the last ticket in a barrier, the other waited for a ticket and never came to the barrier.
        pytest.param(Plan(1, 2, "async", total=12, pauses=0.1), 5, id="tickets and barriers do not deadlock"),
        # The last worker's end closed a round with a dead one's gradient; nobody carried it before the checkpoint.
        pytest.param(Plan(2, 2, steps=3, deaths=1, restarts=0.0), 81, id="the last one carries before it saves"),
        # A worker was given up before its last frames were read; its join was taken for a new life.
        pytest.param(Plan(2, 3, deaths=4, restarts=0.2), 239, id="who was given up does not come back"),
        # The same for a second life: what was said of it was taken for its first one, and its join for a third.
        pytest.param(ENDING, 279039, id="who was given up again does not come back"),
        # A worker died after closing at ps:1 and before closing at ps:0; ps:1 refused its successor.
        pytest.param(Plan(2, 2, deaths=4, steps=3), 741, id="only ps:0 says who is done"),
    ],
)
def test_seeds_that_failed_once(plan: Plan, seed: int) -> None:
    assert simulate(plan, seed) == []


@pytest.mark.parametrize(
    ("plan", "seed"),
    [
        # The first round was measured from the start of the machine's clock: a grace of 30 % of that took days.
        pytest.param(Plan(1, 3, of_n(2, grace_share=0.3)), 0, id="a grace is a share of rounds, not of uptime"),
        # A worker died with one gradient in a round that wants more than there are workers. Its successor could not
        # add to that vote and waited for the round; the round waited for it.
        pytest.param(Plan(1, 2, of_n(5), False, deaths=3), 0, id="a round does not wait for those who wait for it"),
        # One was held back by a slower one, that one waited for a ticket, and its holder waited for both in a barrier.
        pytest.param(Plan(1, 3, bounded(0), total=12, pauses=0.05), 2, id="bounded, tickets and barriers end"),
        # A worker that paused, lost its connection and joined again said Resume while it trained: it was taken for one
        # that had done as many steps as the others, who ran further ahead of it.
        pytest.param(RESTARTING, 1, id="only who paused resumes"),
        # Enough workers were there again, but whoever had waited for that heard of it at the joiner's first push.
        pytest.param(
            Plan(1, 2, "async", False, optional=1, min_workers=2, deaths=2, pauses=0.1), 1, id="a joiner is enough"
        ),
    ],
)
def test_seeds_of_the_dial_that_failed_once(plan: Plan, seed: int) -> None:
    assert simulate(plan, seed) == []


@pytest.mark.parametrize(
    ("plan", "seed"),
    [
        # One that joins is waited for by a switch, and waits for the switch before it starts.
        pytest.param(Plan(1, 3, optional=2, switches=4), 0, id="a joiner stands still"),
        # Two switches with nobody there to hear of the first: what was decided before it went with the forgotten dial,
        # and ps:1 never made that update.
        pytest.param(Plan(2, 1, switches=3, deaths=3), 1, id="decisions outlive two switches"),
        # The last worker's end closed a round and let the mode change; the decision was in a dial that it never saw.
        pytest.param(
            Plan(2, 2, switches=8, deaths=3, restarts=0.7, steps=3, span=100.0), 516, id="the last one asks for it all"
        ),
        # A lease that ran out let the mode change, but not those start who had joined meanwhile; the next change came
        # first, and waited for them.
        pytest.param(EVICTING, 73595, id="a switch is for those who joined before it"),
        # Leave to join the last round became leave to make an async step of one's own: ps:0 knew that those were too
        # many, and ps:1 made them all.
        pytest.param(Plan(2, 2, "async", False, switches=4, total=12, span=120.0), 0, id="a ticket is for one mode"),
        # The mode changed without one that ps:0 had lost: its gradient was acknowledged by a bell that it did not hear.
        pytest.param(
            Plan(2, 4, switches=2, ps_restarts=2, retries=True), 0, id="a staged gradient is acknowledged by a frame"
        ),
    ],
)
def test_seeds_of_switches_that_failed_once(plan: Plan, seed: int) -> None:
    assert simulate(plan, seed) == []
