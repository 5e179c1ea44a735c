"""Thousands of seeded runs of the real deciding code, with everything that can go wrong with messages and workers.

What is real and what is simulated: sim_ps.py, sim_worker.py. What must hold: sim_watch.py, sim_checks.py. A seed that
failed once is in test_seeds.py by name; that wrong versions are found is shown in test_wrong.py.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import islice

import pytest
from sim_plan import MODES, Plan, fits
from sim_run import Cluster, simulate

from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec

LONG = 150.0  # seconds: disasters all over the run, not only at its start
DISASTERS = {
    "calm": Plan(),
    "deaths": Plan(deaths=3),
    "losses": Plan(deaths=2, restarts=0.2, steps=3),
    "everything": Plan(deaths=2, evictions=1, zombies=1, pauses=0.1, not_finite=0.1),
    "retries": Plan(cuts=4, retries=True),
    "retries and deaths": Plan(cuts=3, retries=True, deaths=2, pauses=0.1, not_finite=0.1),
    "evictions": Plan(evictions=4, cuts=2, retries=True, pauses=0.1, not_finite=0.1, span=LONG),
    "evictions and deaths": Plan(evictions=3, deaths=2, zombies=1, cuts=2, retries=True, pauses=0.1, total=12),
    "budget": Plan(total=12, pauses=0.05),
    "budget and deaths": Plan(total=12, deaths=2, pauses=0.1, not_finite=0.1),
    "ps restarts": Plan(ps_restarts=3, retries=True, deaths=1, cuts=1, pauses=0.1, not_finite=0.1, span=LONG),
    "elastic": Plan(optional=2, deaths=2, pauses=0.1, span=LONG),
    "ps reborn": Plan(rebirths=4, retries=True, deaths=1, cuts=1, pauses=0.1, not_finite=0.1, span=LONG),
    "budget and ps reborn": Plan(total=12, rebirths=3, retries=True, deaths=2, pauses=0.1, span=LONG),
    "switches and ps reborn": Plan(switches=3, rebirths=3, retries=True, deaths=1, pauses=0.1, span=LONG),
    "saves": Plan(saves=2, deaths=2, cuts=2, retries=True, pauses=0.1, span=LONG),
    "saves and evictions": Plan(saves=3, evictions=2, rebirths=2, retries=True, pauses=0.1, not_finite=0.1, span=LONG),
    "least": Plan(optional=1, min_workers=2, deaths=3, restarts=0.6, pauses=0.1, span=LONG),
}
SWITCHES = {
    "switches": Plan(switches=4, pauses=0.1, not_finite=0.05, span=LONG),
    "switches and deaths": Plan(switches=3, deaths=3, evictions=1, zombies=1, pauses=0.1, span=LONG),
    "switches and losses": Plan(switches=3, deaths=3, restarts=0.3, steps=4, pauses=0.1, span=LONG),
    "switches and retries": Plan(switches=3, cuts=3, ps_restarts=2, retries=True, pauses=0.1, span=LONG),
    "switches and evictions": Plan(switches=3, evictions=4, cuts=2, retries=True, pauses=0.1, span=LONG),
    "switches in a budget": Plan(switches=3, total=12, span=LONG),
    "switches and budget": Plan(switches=3, total=12, deaths=1, pauses=0.1, span=LONG),
    "switches and saves": Plan(switches=3, saves=2, deaths=2, pauses=0.1, span=LONG),
    "switches and joiners": Plan(switches=3, optional=2, min_workers=2, deaths=2, pauses=0.1, span=LONG),
}
SIZES = [(num_ps, num_workers) for num_ps in (1, 2, 3) for num_workers in (1, 2, 3, 4)]
CLUSTERS = 50  # about so many a mode, each on both kinds of lane, with each disaster: 13,104 runs in all
PARTS = 5  # of which the quick tests make one; an odd number, so that both kinds of lane are in it


def clusters(mode: str) -> list[tuple[int, int, ModeSpec]]:
    """1 to 3 ps, 1 to 4 workers; of k of n every K that leaves somebody out and K = n, else only what adds up."""
    found = [(ps, workers, spec) for ps, workers in SIZES for spec in MODES[mode] if fits(spec, workers)]
    if mode == "k of n":
        return [(ps, n, spec) for ps, n, spec in found if spec.tokens_of(n) == 1]
    return [(ps, n, spec) for ps, n, spec in found if spec.tokens_of(n) > 1] if mode == "more than n" else found


def runs(plan: Plan, mode: str, times: range = range(1)) -> Iterator[tuple[Plan, int]]:
    """Every cluster of a mode, on both kinds of lane, with the seeds of these times."""
    count = max(1, CLUSTERS // len(clusters(mode)))
    for seed in range(count * times.start, count * times.stop):
        for number, (num_ps, num_workers, spec) in enumerate(clusters(mode)):
            for shares_memory in (True, False):
                yield (
                    dataclasses.replace(
                        plan, num_ps=num_ps, num_workers=num_workers, mode=spec, shares_memory=shares_memory
                    ),
                    seed * 1000 + number,
                )


def failures(runs: Iterable[tuple[Plan, int]]) -> list[str]:
    """One line a failed run, enough to run it again."""
    return [f"{plan} seed {seed}: {faults[0]}" for plan, seed in runs if (faults := simulate(plan, seed))]


def part(disaster: str, mode: str, number: int) -> Iterator[tuple[Plan, int]]:
    """A part of the runs; each disaster and each mode begins elsewhere in the list."""
    plans = DISASTERS | SWITCHES
    first = (list(plans).index(disaster) + list(MODES).index(mode) + number) % PARTS
    return islice(runs(plans[disaster], mode), first, None, PARTS)


@pytest.mark.parametrize("disaster", DISASTERS)
@pytest.mark.parametrize("mode", MODES)
def test_I1_I2_I3_hold_and_everybody_ends(mode: str, disaster: str) -> None:
    assert failures(part(disaster, mode, 0))[:3] == []


@pytest.mark.parametrize("disaster", SWITCHES)
@pytest.mark.parametrize("mode", MODES)
def test_I1_I2_I3_hold_while_the_mode_changes(mode: str, disaster: str) -> None:
    assert failures(part(disaster, mode, 0))[:3] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_I1_I2_I3_hold_in_a_second_part_of_all_runs(mode: str) -> None:
    assert [each for disaster in DISASTERS | SWITCHES for each in failures(part(disaster, mode, 1))][:3] == []


@pytest.mark.nightly("an interleaving that one run in ten thousand has: all parts, with five times the seeds")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("disaster", DISASTERS | SWITCHES)
@pytest.mark.parametrize("mode", MODES)
def test_I1_I2_I3_hold_in_all_runs_with_five_seeds(mode: str, disaster: str) -> None:
    for number in range(2, PARTS):
        assert failures(part(disaster, mode, number))[:3] == []
    assert failures(runs((DISASTERS | SWITCHES)[disaster], mode, range(1, 5)))[:3] == []


@pytest.mark.parametrize("kind", ["deaths", "evictions", "cuts", "zombies", "switches", "ps_restarts", "rebirths"])
def test_what_is_to_go_wrong_does_go_wrong(kind: str) -> None:
    fired = 0
    for seed in range(20):
        plan = dataclasses.replace(Plan(retries=kind in ("cuts", "ps_restarts", "rebirths")), **{kind: 2})
        cluster = Cluster(plan, seed)
        assert cluster.run() == []
        fired += cluster.fired[kind]
    assert fired >= 20


def test_modes_do_change_in_every_way() -> None:
    """Accepted and refused, answered at once and later, and between shards that made different numbers of updates."""
    clusters = [Cluster(Plan(3, 3, "async", switches=4, deaths=3, pauses=0.1, span=LONG), seed) for seed in range(40)]
    assert [fault for cluster in clusters for fault in cluster.run()] == []
    replies = [switcher.reply for cluster in clusters for switcher in cluster.switchers]
    told = {type(reply).__name__: getattr(reply, "pause_ms", None) for reply in replies}
    assert told.keys() == {"Switched", "Failed", "NoneType"}
    assert sum(len(cluster.services[0].core.control.mode_changes) for cluster in clusters) > 60
    assert any(s.core.control.state.offset for cluster in clusters for s in cluster.services)
    assert any(cluster.services[0].core.control.dial.decisions for cluster in clusters)


def test_too_few_workers_wait_until_one_joins() -> None:
    """Below --min-workers nobody goes on, for as long as it takes; some of these runs wait for ever."""
    plan = Plan(1, 2, "async", min_workers=2, deaths=1, restarts=0.5)
    clusters = [Cluster(plan, seed) for seed in range(40)]
    assert [fault for cluster in clusters for fault in cluster.run()] == []
    left = [[p.awaited for p in cluster.processes if p.is_alive] for cluster in clusters]
    assert ["ps:0"] in left
    assert [] in [waits for waits, cluster in zip(left, clusters, strict=True) if cluster.fired["deaths"]]


def test_one_worker_gives_several_gradients_to_a_round() -> None:
    """Where K is more than there are workers: so many, in one sum and one slot."""
    for spec in MODES["more than n"]:
        cluster = Cluster(Plan(2, 2, spec), 3)
        assert cluster.run() == []
        given = [[g[0] for g in update] for update in cluster.services[1].ledger.updates]
        assert any(len(update) > len(set(update)) for update in given)


LOSS = Plan(losses=1, retries=True, steps=8, pauses=0.05, span=LONG / 2)


@pytest.mark.parametrize("mode", MODES)
def test_a_ps_without_memory_is_given_values_and_all_go_on(mode: str) -> None:
    """Where every push is an update, of clusters with one ps: with more, a worker may take an answer for another's."""
    clusters = [
        (Cluster(plan, seed), plan, seed)
        for plan, seed in islice(runs(LOSS, mode), 0, None, PARTS)
        if plan.num_ps == 1 or make_mode(plan.spec, plan.num_workers).has_rounds
    ]
    assert [f"{plan} seed {seed}: {faults[0]}" for each, plan, seed in clusters if (faults := each.run())][:3] == []
    assert sum(each.fired["brought"] for each, _, _ in clusters) > len(clusters) // 2


@pytest.mark.parametrize("mode", MODES)
def test_checkpoints_are_written_in_every_mode(mode: str) -> None:
    """By one worker after another, of one update on all shards; some are given up."""
    plans = [Plan(2, 3, spec, saves=2, deaths=1) for spec in MODES[mode] if fits(spec, 3)]
    clusters = [Cluster(plan, seed) for plan in plans for seed in range(10)]
    assert [fault for cluster in clusters for fault in cluster.run()] == []
    savers = [saver for cluster in clusters for saver in cluster.savers]
    assert sum(len(saver.copies) == 2 for saver in savers) > len(clusters)
    assert len({saver.index for saver in savers}) > 1


def test_a_run_repeats_itself() -> None:
    plan = Plan(deaths=3, cuts=2, retries=True, pauses=0.2, switches=2, ps_restarts=1, span=LONG)
    first, second = Cluster(plan, 7), Cluster(plan, 7)
    assert first.run() == second.run() == []
    assert first.world.now == second.world.now
    assert [s.ledger.updates for s in first.services] == [s.ledger.updates for s in second.services]
