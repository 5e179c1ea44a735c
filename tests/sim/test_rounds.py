"""Thousands of seeded runs of the real deciding code, with everything that can go wrong with messages and workers.

What is real and what is simulated: sim_ps.py, sim_worker.py. What must hold: sim_run.py. A seed that failed once
stays here by name.
"""

import dataclasses

import pytest
import sim_wrong
from sim_run import Cluster, Plan, simulate

from paceline.server import desk

DISASTERS = {
    "calm": Plan(),
    "deaths": Plan(deaths=3),
    "losses": Plan(deaths=2, restarts=0.2, steps=3),
    "everything": Plan(deaths=2, evictions=1, zombies=1, pauses=0.1, not_finite=0.1),
    "retries": Plan(cuts=4, retries=True),
    "retries and deaths": Plan(cuts=3, retries=True, deaths=2, pauses=0.1, not_finite=0.1),
    "budget": Plan(total=12, pauses=0.05),
    "budget and deaths": Plan(total=12, deaths=2, pauses=0.1, not_finite=0.1),
}
SEEDS = 12  # of every cluster below, on both kinds of lane, with each disaster: 7,200 runs


def clusters(mode: str) -> list[tuple[int, int, str]]:
    """1 to 3 ps, 1 to 4 workers; for k of n every K that leaves somebody out, and K = n."""
    sizes = [(ps, workers) for ps in (1, 2, 3) for workers in (1, 2, 3, 4)]
    if mode != "k of n":
        return [(ps, workers, mode) for ps, workers in sizes]
    return [(ps, workers, str(k)) for ps, workers in sizes for k in (1, 2, 3) if k <= workers]


def failures(mode: str, disaster: str, seeds: range) -> list[str]:
    """One line a failed run, enough to run it again."""
    found = []
    for num_ps, num_workers, name in clusters(mode):
        for shares_memory in (True, False):
            plan = dataclasses.replace(
                DISASTERS[disaster], num_ps=num_ps, num_workers=num_workers, mode=name, shares_memory=shares_memory
            )
            for seed in seeds:
                if faults := simulate(plan, seed):
                    found.append(f"{plan} seed {seed}: {faults[0]}")
    return found


@pytest.mark.parametrize("disaster", DISASTERS)
@pytest.mark.parametrize("mode", ["async", "sync", "k of n"])
def test_I1_I2_hold_and_everybody_ends(mode: str, disaster: str) -> None:
    seeds = range(SEEDS if mode != "k of n" else SEEDS // 2)
    assert failures(mode, disaster, seeds)[:3] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("disaster", DISASTERS)
@pytest.mark.parametrize("mode", ["async", "sync", "k of n"])
def test_I1_I2_hold_and_everybody_ends_ten_times_longer(mode: str, disaster: str) -> None:
    seeds = range(1000, 1000 + 10 * SEEDS // (1 if mode != "k of n" else 2))
    assert failures(mode, disaster, seeds)[:3] == []


@pytest.mark.parametrize("kind", ["deaths", "evictions", "cuts", "zombies"])
def test_what_is_to_go_wrong_does_go_wrong(kind: str) -> None:
    fired = 0
    for seed in range(20):
        cluster = Cluster(dataclasses.replace(Plan(retries=kind == "cuts"), **{kind: 2}), seed)
        assert cluster.run() == []
        fired += cluster.fired[kind]
    assert fired >= 20


def found(plan: Plan, seeds: int) -> str:
    """All faults of some runs, as one text."""
    return "\n".join(fault for seed in range(seeds) for fault in simulate(plan, seed))


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (Plan(worker=sim_wrong.VotesBehindStaging, mode="2", deaths=3), "lacks"),
        (Plan(worker=sim_wrong.CarriesNothingAtJoin, mode="2", deaths=3), "lacks"),
        (Plan(2, 2, worker=sim_wrong.SavesWithoutCarrying, deaths=1, restarts=0.0, steps=3), "saved a checkpoint of"),
        (Plan(state=sim_wrong.FreesOnDisconnect, mode="2", deaths=3), "lacks"),
        (Plan(state=sim_wrong.KeyedByWorker, mode="2", deaths=4), "lacks"),
        (Plan(state=sim_wrong.ForgetsPushIds, mode="async", cuts=4, retries=True), "twice"),
        (Plan(state=sim_wrong.KeepsSlotsOfTheDead, deaths=3), "never freed"),
        (Plan(service=sim_wrong.LetsOneFallForAnother, deaths=2, pauses=0.2), "because of another's connection"),
    ],
    ids=lambda value: (set(value.parts()) - set(Plan().parts())).pop().__name__ if isinstance(value, Plan) else "",
)
def test_the_simulation_finds_what_is_wrong(wrong: Plan, fault: str) -> None:
    right = dataclasses.replace(wrong, worker=Plan().worker, state=Plan().state, service=Plan().service)
    assert fault in found(wrong, 150)
    assert found(right, 30) == ""


def test_the_simulation_finds_a_budget_that_grants_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk, "Budget", sim_wrong.GrantsTooMuch)
    assert "was told DISCARDED" in found(Plan(mode="async", total=12), 40)


CHAOS = Plan(1, 2, deaths=2, evictions=1, zombies=1, pauses=0.1, not_finite=0.1)
RETRYING = Plan(1, 4, "async", cuts=3, retries=True, deaths=2, pauses=0.1, not_finite=0.1)


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
        pytest.param(Plan(2, 2, steps=3, deaths=1, restarts=0.0), 34, id="the last one carries before it saves"),
        # A worker was given up before its last frames were read; its join was taken for a new life.
        pytest.param(Plan(2, 3, deaths=4, restarts=0.2), 239, id="who was given up does not come back"),
        # A worker died after closing at ps:1 and before closing at ps:0; ps:1 refused its successor.
        pytest.param(Plan(2, 2, deaths=4, steps=3), 1545, id="only ps:0 says who is done"),
    ],
)
def test_seeds_that_failed_once(plan: Plan, seed: int) -> None:
    assert simulate(plan, seed) == []


def test_a_run_repeats_itself() -> None:
    plan = Plan(deaths=3, cuts=2, retries=True, pauses=0.2)
    first, second = Cluster(plan, 7), Cluster(plan, 7)
    assert first.run() == second.run() == []
    assert first.world.now == second.world.now
    assert [s.ledger.updates for s in first.services] == [s.ledger.updates for s in second.services]
