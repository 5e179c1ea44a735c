"""IS a plan right where one can know it? Limits, seeds, knees; what counts is decided by the modes themselves."""

import doctest
from importlib import import_module
from random import Random
from types import SimpleNamespace

import msgspec
import pytest

from paceline.errors import UsageError
from paceline.modes.spec import ModeSpec
from paceline.plan import told
from paceline.plan.costs import Costs, LaneCosts, Seen, given
from paceline.plan.fitting import fitted
from paceline.plan.planning import Planner, Wanted
from paceline.plan.sharing import Shared, World
from paceline.plan.simulate import Prediction, Simulation
from paceline.plan.timed_script import Stopwatch
from paceline.plan.timings import LEAST_STEPS, Measured, Part, Timings, costs_of, mean_step_ms
from paceline.plan.topology import Topology, counts, mode_of, parse_link
from paceline.telemetry.limit import Limit

ROOMY = 64  # cores: nobody waits for one
FAST = parse_link("1000Gbit/s,0us")


def costs(**changed: object) -> Costs:
    """10 ms computing, 1 ms update, everything else free and without luck."""
    free = LaneCosts(push_ms=0.0, read_ms=0.0, message_ms=0.0)
    made = Costs(compute_ms=10.0, apply_ms=1.0, size_bytes=1_000_000, lanes={"shm": free, "tcp": free}, cores=ROOMY)
    return msgspec.structs.replace(made, **changed)


def predicted(
    workers: int, mode: str = "async", num_ps: int = 1, what: Costs | None = None, **more: object
) -> Prediction:
    spec = mode_of(mode, workers)
    assert spec is not None
    topology = Topology(num_workers=workers, num_ps=num_ps, mode=spec, **{"cores": ROOMY, **more})
    return Simulation(topology, what or costs(), Random(1)).run()


@pytest.mark.parametrize("name", ["costs", "planning", "topology", "timings"])
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(import_module(f"paceline.plan.{name}")).failed == 0


# --- sharing ------------------------------------------------------------------------------------------------------


def test_users_that_fit_do_not_disturb_each_other_and_others_are_all_slowed_alike() -> None:
    world, ends = World(), []
    cores = Shared(world, 2.0, 1.0)
    for name in ("a", "b", "c"):
        cores.use(1.0, lambda name=name: ends.append((name, round(world.now, 6))))
    world.run_until(lambda: len(ends) == 3)
    assert ends == [("a", 1.5), ("b", 1.5), ("c", 1.5)]
    assert cores.share_used(0.0, 0.0) == pytest.approx(1.0)


def test_one_that_comes_later_takes_its_share_from_then_on() -> None:
    world, ends = World(), {}
    link = Shared(world, 100.0, 100.0)
    link.use(100.0, lambda: ends.update(first=world.now))
    world.after(0.5, lambda: link.use(50.0, lambda: ends.update(second=world.now)))
    world.run_until(lambda: len(ends) == 2)
    assert ends == {"first": pytest.approx(1.5), "second": pytest.approx(1.5)}


def test_a_core_is_slower_when_all_others_work() -> None:
    world, ends = World(), []
    cores = Shared(world, 2.0, 1.0, contention=0.5)
    cores.use(1.0, lambda: ends.append(world.now))
    world.run_until(lambda: len(ends) == 1)
    for _ in range(2):
        cores.use(1.0, lambda: ends.append(world.now))
    world.run_until(lambda: len(ends) == 3)
    assert ends == [pytest.approx(1.0), pytest.approx(2.5), pytest.approx(2.5)]


def test_what_is_too_short_for_the_clock_is_over() -> None:
    """After some hundred thousand seconds a clock has no digits for a nanosecond: nobody may wait for one for ever."""
    world, ends = World(), []
    cores = Shared(world, 2.0, 1.0)
    world.after(3e8, lambda: [cores.use(work, lambda: ends.append(world.now)) for work in (1.0, 1.00000001, 1e-9)])
    assert world.run_until(lambda: len(ends) == 3, most_events=100)


def test_the_time_that_users_lose_to_each_other_is_counted() -> None:
    world, ends = World(), []
    cores = Shared(world, 2.0, 1.0)
    for _ in range(3):
        cores.use(1.0, lambda: ends.append(world.now))
    world.run_until(lambda: len(ends) == 3)
    cores.use(1.0, lambda: ends.append(world.now))
    world.run_until(lambda: len(ends) == 4)
    assert cores.short_s == pytest.approx(0.5), "1.5 s instead of 1 s, and nothing when it is alone"


# --- limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "sync", "bounded:3"])
def test_one_worker_takes_what_was_calibrated(mode: str) -> None:
    lane = LaneCosts(push_ms=0.5, read_ms=0.25, message_ms=0.2, wake_ms=0.1)
    found = predicted(1, mode, what=costs(lanes={"shm": lane}))
    assert found.step_ms == pytest.approx(10 + 0.5 + 1.0 + 0.2 + 2 * 0.1 + 0.25, rel=1e-6), (
        "the ps wakes, and the worker"
    )
    assert found.staleness_mean == found.discarded == 0


def test_on_an_infinite_link_workers_with_their_own_hosts_add_up_until_the_ps_is_full() -> None:
    what = costs(spread=0.1)
    few, full = (predicted(n, what=what, lane="tcp", link=FAST) for n in (4, 20))
    assert few.steps_per_s == pytest.approx(4 / 0.011, rel=0.1)
    assert full.steps_per_s == pytest.approx(1 / 0.001, rel=0.02)  # one update a ms
    assert full.limit == Limit.PS.value and full.ps_busy > 0.97
    assert full.staleness_mean == pytest.approx(19.0, abs=0.5)


def test_two_ps_carry_twice_as_much() -> None:
    what = costs(spread=0.1, apply_ms=4.0)
    one, two = (predicted(20, num_ps=m, what=what, lane="tcp", link=FAST) for m in (1, 2))
    assert two.steps_per_s == pytest.approx(2 * one.steps_per_s, rel=0.1)


def test_a_link_carries_its_bytes_a_second() -> None:
    link = parse_link("80Mbit/s,1ms")  # ten pushes of 1 MB a second
    found = predicted(8, what=costs(spread=0.1), lane="tcp", link=link)
    assert found.steps_per_s == pytest.approx(10.0 * 8 / 9, rel=0.06)  # 8 customers of two equal queues: up and down
    assert found.limit == Limit.PS_LINK.value
    alone = predicted(1, lane="tcp", link=link)
    assert alone.step_ms == pytest.approx(10 + 1 + 2 * (100 + 1), rel=1e-6)


def test_cores_of_one_machine_are_shared_with_the_ps() -> None:
    found = predicted(4, cores=2)
    assert found.steps_per_s == pytest.approx(2 / 0.011, rel=0.02)
    assert found.limit == Limit.CORES.value


@pytest.mark.parametrize("workers", [3, 4])
def test_more_workers_than_cores_are_limited_by_cores_also_in_rounds(workers: int) -> None:
    """Only the ps works while it updates, so the cores are not full all the time."""
    found = predicted(workers, "sync", what=given(20, 4_000_000, 3.0), cores=2)
    assert found.cores_busy < 0.97 and found.limit == Limit.CORES.value
    assert predicted(workers, "sync", what=given(20, 4_000_000, 3.0)).limit != Limit.CORES.value


@pytest.mark.parametrize("link", ["1Mbit/s", "1bit/s", "1Mbit/s,10s"])
@pytest.mark.parametrize(("workers", "mode", "num_ps"), [(1, "async", 1), (4, "sync:3", 2), (3, "bounded:3", 1)])
def test_a_slow_link_takes_no_more_events_than_a_fast_one(workers: int, mode: str, num_ps: int, link: str) -> None:
    what = given(20, 40_000_000, 3.0)
    slow, fast = (predicted(workers, mode, num_ps, what, lane="tcp", link=parse_link(at)) for at in (link, "1Gbit/s"))
    assert 0 < slow.samples_per_s < fast.samples_per_s and slow.events < 4 * fast.events


def test_a_simulation_that_would_take_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.plan.simulate.MOST_EVENTS", 1000)
    with pytest.raises(UsageError, match="more than 1,000 events"):
        predicted(40)


@pytest.mark.parametrize("num_ps", [1, 3])
def test_sync_of_equal_workers_is_as_fast_as_one_and_its_updates(num_ps: int) -> None:
    """ps:0 updates first, then the others, as the decision is carried to one after the other."""
    found = predicted(4, "sync", num_ps)
    assert found.step_ms == pytest.approx(10 + num_ps * costs().apply_share_ms(num_ps, 1), rel=0.001)
    assert found.staleness_mean == found.discarded == 0


def test_sync_waits_for_the_slowest_and_async_does_not() -> None:
    slow = ((1, 4.0),)
    sync, free = (predicted(2, mode, slow=slow) for mode in ("sync", "async"))
    assert sync.step_ms == pytest.approx(41.0, rel=0.01) and sync.limit == Limit.SLOWEST.value
    assert free.steps_per_s == pytest.approx(1 / 0.011 + 1 / 0.041, rel=0.1)


@pytest.mark.parametrize("num_ps", [1, 2])
def test_k_of_n_discards_the_rest(num_ps: int) -> None:
    found = predicted(4, "sync:3", num_ps, what=costs(spread=0.3))
    assert found.discarded == pytest.approx(0.25, abs=0.03)
    full = predicted(4, "sync", num_ps, what=costs(spread=0.3))
    assert found.step_ms < full.step_ms


def test_bounded_lets_nobody_get_further_ahead() -> None:
    found = predicted(2, "bounded:3", slow=((1, 4.0),))
    assert found.step_ms == pytest.approx(41.0, rel=0.02), "both go as fast as the slow one"


@pytest.mark.parametrize("cores", [1, ROOMY])
def test_a_slow_worker_makes_a_fourth_of_the_steps_also_where_all_share_a_core(cores: int) -> None:
    topology = Topology(num_workers=6, num_ps=1, mode=ModeSpec(name="async"), cores=cores, slow=((1, 4.0),))
    simulation = Simulation(topology, costs(), Random(1))
    simulation.run()
    slow, fast = simulation.workers[1].steps, simulation.workers[2].steps
    assert fast / slow == pytest.approx(4.0, rel=0.15)


def test_local_steps_make_exchanges_rare() -> None:
    link = parse_link("80Mbit/s")
    each, ten = (predicted(2, mode, what=costs(), lane="tcp", link=link) for mode in ("sync", "local:10"))
    assert ten.steps_per_s > 5 * each.steps_per_s


def test_a_seed_gives_the_same_plan_and_another_seed_another() -> None:
    wanted = Wanted(workers=[2], ps=[1], modes=["sync:1"])
    what = costs(spread=0.2)
    plans = [msgspec.json.encode(Planner(what, wanted, lambda s=s: Random(s)).plan(0)) for s in (5, 5, 6)]
    assert plans[0] == plans[1] != plans[2]


# --- the plan -----------------------------------------------------------------------------------------------------


def test_a_thousand_workers_are_few_events_and_the_knee_is_where_a_ps_is_full() -> None:
    wanted = Wanted(workers=counts("1000", "workers"), ps=[1], modes=["async"], link=FAST, lane="tcp", cores=ROOMY)
    planner = Planner(costs(spread=0.1), wanted, lambda: Random(0))
    plan = planner.plan(0)
    one = plan.curves[0]
    assert planner.events < 150_000
    assert one.knee is not None and 8 <= one.knee <= 14  # 11 ms a step, 1 ms of it on the ps
    assert one.points[-1].is_extended and one.points[-1].samples_per_s == pytest.approx(1000, rel=0.03)
    assert one.points[-1].staleness_mean == pytest.approx(999, rel=0.05)
    assert one.knee in [point.topology.num_workers for point in one.points], "a knee between two rows is a row too"
    assert [row[0] for row in told.rows(plan) if "★" in row[0] or "○" in row[0]] == [f"{one.knee} ★"]
    assert plan.recommended is not None and plan.recommended.topology.num_workers == one.knee


def test_a_thousand_workers_of_sixteen_ps_are_simulated_in_few_events() -> None:
    found = predicted(1000, num_ps=16, what=costs(spread=0.1), lane="tcp", link=FAST)
    assert found.events < 150_000
    assert found.steps_per_s == pytest.approx(1 / (0.03e-3 + 0.97e-3 / 16), rel=0.05), "each ps is full"


def test_nobody_is_recommended_who_does_not_pay() -> None:
    wanted = Wanted(workers=[1, 2, 3, 4], ps=[1], modes=["async", "sync"], cores=2, price=(1.0, 1.0))
    plan = Planner(costs(), wanted, lambda: Random(0)).plan(0)
    assert plan.recommended is not None and plan.recommended.topology.num_workers == 2
    assert [curve.knee for curve in plan.curves] == [2, 2]
    assert plan.recommended.cost == pytest.approx(1 / 3600 / plan.recommended.samples_per_s * 1e6)
    marked = [row[0] for row in told.rows(plan)]
    assert sorted(cell[2:] for cell in marked if len(cell) > 1) == ["○", "★"]
    assert len(told.head(plan)) == len(told.rows(plan)[0])


def test_workers_that_do_not_pay_are_told_so_also_where_one_was_not_asked_for() -> None:
    slow = parse_link("10Mbit/s,0us")
    wanted = Wanted(workers=[4, 8], ps=[1], modes=["sync"], cores=ROOMY, link=slow)
    plan = Planner(costs(compute_ms=1.0), wanted, lambda: Random(0)).plan(0)
    assert plan.said[0].startswith("1 ps, sync: 4 workers make 1.0") and "look at fewer" in plan.said[0]


# --- what was measured --------------------------------------------------------------------------------------------


def timings(scale: float = 1.0, **changed: object) -> Timings:
    parts = {
        "push": Part(wall_ms=0.2, cpu_ms=0.1 * scale, off_ms=0.1),
        "settle": Part(wall_ms=0.4, cpu_ms=0.05 * scale, off_ms=0.2),
        "compute": Part(wall_ms=2.0, cpu_ms=2.0 * scale, p10_ms=1.8, p90_ms=2.2),
    }
    made = Timings(
        steps=1000, all_steps=1100, wall_s=2.6, step_ms=2.6 * scale, process_ms=2.45 * scale, ps_cpu_s=0.2, parts=parts,
        batch=32.0, size_bytes=400_000,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changed)


def test_timings_become_costs() -> None:
    found = costs_of(Measured(timings=timings(), apply_ms=0.12), None, cores=2)
    assert (found.compute_ms, found.batch, found.compute_cores) == (2.0, 32.0, 1.0)
    shm = found.lanes["shm"]
    assert shm.message_ms == pytest.approx(0.08) and shm.bulk_ms == 0 and shm.wake_ms == pytest.approx(0.05)
    tcp = Measured(timings=timings(ps_cpu_s=0.5), apply_ms=0.12)
    both = costs_of(Measured(timings=timings(), apply_ms=0.12), tcp, cores=2)
    assert both.lanes["tcp"].message_ms == pytest.approx(0.08)
    assert both.lanes["tcp"].bulk_ms == pytest.approx(0.3), "what the bytes cost beyond the message"


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(UsageError, match="let it train longer"):
        costs_of(Measured(timings=timings(steps=5), apply_ms=0.1), None, cores=2)
    with pytest.raises(UsageError, match="ended by itself after 80 steps, 5 of them after the warm-up"):
        mean_step_ms([timings(), timings(steps=5, all_steps=80)])


def test_the_mean_step_of_a_run_is_that_of_its_throughput() -> None:
    assert mean_step_ms([timings(), timings(3.0)]) == pytest.approx(2 / (1 / 2.6 + 1 / 7.8))


class FakeStep:
    """As much of a training step as a stopwatch looks at."""

    weight = 32.0
    plan = SimpleNamespace(total_bytes=4000)


def test_what_is_no_step_is_in_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation between epochs, and all that comes after the last step."""
    clock = [0.0]
    monkeypatch.setattr("paceline.plan.timed_script.now", lambda: (clock[0], clock[0], 0.0, 1.5 * clock[0]))
    watch = Stopwatch(seconds=1000.0, warmup_s=0.0)
    for step in range(40):
        clock[0] += 0.5 if step == 30 else 0.008
        with watch.pushing(FakeStep()):  # type: ignore[arg-type]
            clock[0] += 0.002
    clock[0] += 100.0
    found = watch.timings()
    assert found.step_ms == pytest.approx(10.0) and found.process_ms == pytest.approx(15.0)
    assert found.parts["compute"].wall_ms == pytest.approx(8.0) and found.parts["push"].cpu_ms == pytest.approx(2.0)
    assert found.wall_s == pytest.approx(found.steps * 0.01 + 0.492), "the window ends with the last step"


def test_steps_before_the_window_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that ends within its warm-up has made steps."""
    clock = [0.0]
    monkeypatch.setattr("paceline.plan.timed_script.now", lambda: (clock[0], clock[0], 0.0, clock[0]))
    watch = Stopwatch(seconds=2.0, warmup_s=0.5)
    for _ in range(80):
        clock[0] += 0.001
        with watch.pushing(FakeStep()):  # type: ignore[arg-type]
            pass
    assert (watch.timings().steps, watch.timings().all_steps) == (0, 80)


def test_a_window_goes_on_until_there_are_enough_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("paceline.plan.timed_script.now", lambda: (clock[0], clock[0], 0.0, clock[0]))
    watch = Stopwatch(seconds=0.5, warmup_s=0.0)
    with pytest.raises(SystemExit):
        for _ in range(1000):
            clock[0] += 1.0  # one step is longer than the window
            with watch.pushing(FakeStep()):  # type: ignore[arg-type]
                pass
    assert watch.timings().steps == LEAST_STEPS


# --- what is fitted -----------------------------------------------------------------------------------------------

PARTS = Costs(
    compute_ms=2.0,
    spread=0.02,
    apply_ms=0.2,
    size_bytes=400_000,
    lanes={
        "shm": LaneCosts(push_ms=0.1, read_ms=0.1, message_ms=0.08),
        "tcp": LaneCosts(push_ms=0.2, read_ms=0.2, message_ms=0.08, bulk_ms=0.2),
    },
    cores=2,
)


def step_ms(what: Costs, workers: int, mode: str, lane: str = "shm", seed: int = 0) -> float:
    spec = mode_of(mode, workers)
    assert spec is not None
    topology = Topology(num_workers=workers, num_ps=1, mode=spec, lane=lane, cores=2)
    return Simulation(topology, what, Random(seed)).run().step_ms


def seen_of(what: Costs, is_sync: bool = True) -> Seen:
    """What calibrating runs would give on a machine with these costs."""
    return Seen(
        alone_ms={lane: step_ms(what, 1, "async", lane) for lane in what.lanes},
        num_crowd=2,
        crowd_async_ms=step_ms(what, 2, "async"),
        crowd_sync_ms=step_ms(what, 2, "sync") if is_sync else None,
    )


def refitted(true: Costs, is_sync: bool = True) -> Costs:
    return fitted(msgspec.structs.replace(PARTS, seen=seen_of(true, is_sync)), lambda: Random(0))


@pytest.fixture(scope="module")
def true() -> Costs:
    rest = {name: msgspec.structs.replace(lane, rest_ms=0.4) for name, lane in PARTS.lanes.items()}
    return msgspec.structs.replace(PARTS, lanes=rest, contention=0.25, shared_spread=0.3)


@pytest.fixture(scope="module")
def found(true: Costs) -> Costs:
    return refitted(true)


def test_a_fit_recovers_what_no_stopwatch_saw(true: Costs, found: Costs) -> None:
    assert found.contention == pytest.approx(0.25, abs=0.03)
    assert found.shared_spread == pytest.approx(0.3, abs=0.05)
    assert [lane.rest_ms for lane in found.lanes.values()] == [pytest.approx(0.4, abs=0.02)] * 2
    for workers, mode in ((4, "async"), (4, "sync"), (3, "sync:2")):
        assert step_ms(found, workers, mode) == pytest.approx(step_ms(true, workers, mode), rel=0.03)


def test_nothing_is_found_where_there_is_nothing() -> None:
    found = refitted(PARTS)
    assert found.contention == pytest.approx(0.0, abs=0.01)
    assert found.shared_spread == pytest.approx(PARTS.spread, abs=0.03)
    assert found.lanes["shm"].rest_ms == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("longer", [0.9, 1.3])
def test_one_worker_is_predicted_as_it_was_measured(longer: float) -> None:
    was = seen_of(PARTS)
    seen = msgspec.structs.replace(was, alone_ms={lane: longer * ms for lane, ms in was.alone_ms.items()})
    found = fitted(msgspec.structs.replace(PARTS, seen=seen), lambda: Random(0))
    for lane, measured_ms in seen.alone_ms.items():
        assert step_ms(found, 1, "async", lane) == pytest.approx(measured_ms, rel=1e-3)
        assert step_ms(found, 1, "async", lane, seed=7) == pytest.approx(measured_ms, rel=0.01), "with any luck"


def test_much_that_is_unexplained_is_said(true: Costs, found: Costs) -> None:
    assert "is in none of its parts" not in "".join(told.costs_lines(found, "shm"))
    lanes = {"shm": msgspec.structs.replace(found.lanes["shm"], rest_ms=1.5)}
    busy = msgspec.structs.replace(found, lanes=lanes, seen=Seen(alone_ms={"shm": 4.0}))
    assert "38 % of a step of one worker is in none of its parts" in "".join(told.costs_lines(busy, "shm"))


def test_a_fit_is_the_same_each_time(true: Costs, found: Costs) -> None:
    assert msgspec.json.encode(refitted(true)) == msgspec.json.encode(found)


def test_what_no_run_showed_is_left_alone(true: Costs) -> None:
    assert refitted(true, is_sync=False).shared_spread == 0.0
    assert fitted(PARTS, lambda: Random(0)) == PARTS, "numbers that were given are taken as they are"


def test_workers_with_hosts_of_their_own_do_not_wait_for_turns() -> None:
    uneven = costs(spread=0.01, shared_spread=0.8)
    alone, shared = (predicted(4, "sync", what=uneven, **more) for more in ({"link": FAST, "lane": "tcp"}, {}))
    assert alone.step_ms == pytest.approx(11.0, rel=0.05) and shared.step_ms > 1.3 * alone.step_ms
    assert shared.limit == Limit.ROUNDS.value, "nobody is slower than the rest"


@pytest.mark.parametrize(("modes", "has"), [(["async", "bounded:2"], False), (["async", "sync:1"], True)])
def test_rounds_are_calibrated_only_where_they_are_asked_for(modes: list[str], has: bool) -> None:
    assert Wanted(workers=[1, 2], ps=[1], modes=modes).has_rounds is has
