"""DOES the simulation find anything? Every rule that is left out makes runs fail, in the way that is expected."""

import dataclasses

import pytest
import sim_wrong
from sim_plan import Plan, bounded, of_n
from sim_run import simulate

from paceline.server.control import control

LONG = 150.0
GRACE = of_n(1, grace_ms=6_000.0)


def is_found(fault: str, plan: Plan, seeds: int) -> bool:
    return any(fault in found for seed in range(seeds) for found in simulate(plan, seed))


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (Plan(worker=sim_wrong.VotesBehindStaging, mode="2", deaths=3), "lacks"),
        (Plan(worker=sim_wrong.CarriesNothingAtJoin, mode="2", deaths=3), "lacks"),
        (Plan(2, 2, worker=sim_wrong.SavesWithoutCarrying, deaths=1, restarts=0.0, steps=3), "saved a checkpoint of"),
        (Plan(2, 2, of_n(3), worker=sim_wrong.SaysNothingOfCounted), "lacks"),
        (Plan(2, 3, of_n(2, extra_tokens=1), worker=sim_wrong.SaysNothingOfCounted), "in epoch 0, ps:0"),
        (Plan(2, 1, worker=sim_wrong.LeavesDecisionsBehind, switches=3, deaths=3), "in epoch 0, ps:0"),
        (Plan(state=sim_wrong.FreesOnDisconnect, mode="2", deaths=3), "lacks"),
        (Plan(state=sim_wrong.KeyedByWorker, mode="2", deaths=4), "lacks"),
        (Plan(state=sim_wrong.ForgetsPushIds, mode="async", cuts=4, retries=True), "twice"),
        (Plan(state=sim_wrong.KeepsSlotsOfTheDead, deaths=3), "never freed"),
        (Plan(2, 3, "async", state=sim_wrong.CountsOldPushes, evictions=3, switches=3, span=LONG), "shards at"),
        (Plan(2, 3, "async", state=sim_wrong.AlignsWithoutOffset, deaths=3, switches=3, span=LONG), "shards at"),
        (Plan(1, 3, bounded(1), state=sim_wrong.ForgetsTheJoinersClock, deaths=2), "back without need"),
        (Plan(1, 3, bounded(1), state=sim_wrong.LetsThemRunAhead), "steps ahead"),
        (Plan(1, 3, "async", state=sim_wrong.GoesOnBelowTheLeast, deaths=2, min_workers=3), "are missing"),
        (Plan(1, 3, "2", state=sim_wrong.GoesOnBelowTheLeast, deaths=2, min_workers=3), "are missing"),
        (Plan(1, 3, "sync", state=sim_wrong.LeavesTheRoundOpen, switches=3), "is stuck"),
        (Plan(1, 3, GRACE, service=sim_wrong.ClosesWhenWoken), "too early"),
        (Plan(2, 3, "1", state=sim_wrong.CopiesTooEarly, saves=1), "copied version"),
        (Plan(service=sim_wrong.SendsUnderItsLock), "sends under its lock"),
        (Plan(service=sim_wrong.LetsOneFallForAnother, deaths=2, pauses=0.2), "because of another's connection"),
    ],
    ids=lambda value: (set(value.parts()) - set(Plan().parts())).pop().__name__ if isinstance(value, Plan) else "",
)
def test_the_simulation_finds_what_is_wrong(wrong: Plan, fault: str) -> None:
    right = dataclasses.replace(wrong, worker=Plan().worker, state=Plan().state, service=Plan().service)
    assert is_found(fault, wrong, 150)
    assert not is_found("", right, 30)


def test_the_simulation_finds_a_budget_that_grants_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "Budget", sim_wrong.GrantsTooMuch)
    assert is_found("the shards made", Plan(mode="async", total=12), 40)


def test_the_simulation_finds_a_lost_worker_that_keeps_its_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(mode="async", total=12, deaths=2, restarts=0.5)
    assert not is_found("", plan, 40)
    monkeypatch.setattr(control, "Budget", sim_wrong.BuriesTheTicket)
    assert is_found("is stuck at push", plan, 40)
