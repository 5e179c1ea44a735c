"""What limits a cell is said from its numbers, rule by rule; and what was not measured is not guessed."""

import pytest

from paceline.lab.results import limits
from paceline.lab.results.cables import Cable
from paceline.lab.results.facts import Facts, PsFacts, Split, WorkerFacts
from paceline.lab.results.limits import verdict
from paceline.telemetry.limit import Limit

CALM = PsFacts(name="ps:0", busy_share=0.05, cores=0.12)


def worker(index: int = 0, wait_share: float = 0.0, slowed: float | None = None, **ms: float | None) -> WorkerFacts:
    parts = {"data_ms": 0.0, "compute_ms": 0.0, "exchange_ms": 0.0, "wait_ms": 0.0} | ms
    name = f"worker:{index}"
    return WorkerFacts(name=name, wait_share=wait_share, cores=0.9, split=Split(**parts), slowed_times=slowed)


COMPUTING = worker(compute_ms=8.0, data_ms=1.0, exchange_ms=1.0)


def test_a_worker_that_computes_most_of_its_step_is_the_limit() -> None:
    told = verdict(Facts(workers=(COMPUTING,), ps=(CALM,), machine_cores=4))
    assert told.limit is Limit.COMPUTE
    assert "80 % of a step is compute" in str(told) and "uses 0.12 cores" in str(told)
    assert "A second worker would pay as long as cores are free (1.0 of 4 are used)" in str(told)
    assert "a second ps would not" in str(told)


def test_without_free_cores_another_worker_does_not_pay_here() -> None:
    told = verdict(Facts(workers=(COMPUTING, COMPUTING), ps=(CALM,), machine_cores=2))
    assert told.limit is Limit.COMPUTE
    assert "would not pay here: 1.9 of the machine's 2 cores are used" in str(told)


@pytest.mark.parametrize("ps", [PsFacts(name="ps:0", busy_share=limits.PS_BUSY), PsFacts(name="ps:0", cores=0.95)])
def test_a_ps_that_applies_all_the_time_is_the_limit_before_compute(ps: PsFacts) -> None:
    told = verdict(Facts(workers=(COMPUTING,), ps=(ps,), machine_cores=8))
    assert told.limit is Limit.PS
    assert "A second ps would pay; a second worker would not" in str(told)


def test_a_full_link_is_the_limit_before_compute() -> None:
    told = verdict(Facts(workers=(COMPUTING,), ps=(CALM,), link_share=0.8, lane="tcp"))
    assert told.limit is Limit.LINK and "80 % of what tcp carries" in str(told)
    below = verdict(Facts(workers=(COMPUTING,), ps=(CALM,), link_share=limits.LINK_FULL - 0.01))
    assert below.limit is Limit.COMPUTE


FULL = Cable(rate="10 Mbit/s", share=0.9, behind=("worker:1",))


@pytest.mark.parametrize(
    ("wait_share", "said", "advised"),
    [(0.8, "and the others wait 80 %", "does not wait for it"), (0.05, "hardly wait", "for whoever is behind it")],
)
def test_a_full_cable_between_hosts_is_the_limit_however_few_steps_it_let_through(
    wait_share: float, said: str, advised: str
) -> None:
    near, far = worker(0, wait_share, compute_ms=1.0, wait_ms=9.0), worker(1, exchange_ms=500.0)
    told = verdict(Facts(workers=(near, far), ps=(CALM,), num_steps=11, cable=FULL))
    assert told.limit is Limit.LINK and "the cable of 10 Mbit/s busy 90 % of the time, on the way to worker:1" in str(
        told
    )
    assert said in str(told) and advised in str(told)
    room = Cable(rate="10 Mbit/s", share=limits.LINK_FULL - 0.01, behind=("worker:1",))
    assert verdict(Facts(workers=(near, far), ps=(CALM,), cable=room)).limit is not Limit.LINK


@pytest.mark.parametrize(("share", "limit"), [(0.8, Limit.CLIENT), (0.3, Limit.COMPUTE)])
def test_an_in_graph_client_is_the_limit_where_its_workers_wait_for_it(share: float, limit: Limit) -> None:
    joined = tuple(WorkerFacts(name=f"worker:{n}") for n in range(3))
    told = verdict(Facts(workers=joined, client_share=share))
    assert told.limit is limit and ("80 % of a step" in str(told) or "waits 70 % of a step" in str(told))


def test_a_step_that_reads_data_is_limited_by_its_feeder() -> None:
    told = verdict(Facts(workers=(worker(compute_ms=5.0, data_ms=4.0, exchange_ms=1.0),), ps=(CALM,)))
    assert told.limit is Limit.FEEDER and "40 % of a step is data" in str(told)


def test_where_data_is_in_compute_it_says_so_and_no_feeder_is_blamed() -> None:
    both = worker(compute_ms=8.0, data_ms=None, exchange_ms=1.0, wait_ms=1.0)
    told = verdict(Facts(workers=(both,), ps=(CALM,)))
    assert told.limit is Limit.COMPUTE and "80 % of a step is compute (with data), 10 % push and pull" in str(told)
    told = verdict(Facts(workers=(both, worker(1, compute_ms=1.0, data_ms=9.0)), ps=(CALM,)))
    assert told.limit is Limit.COMPUTE and "90 % of a step is compute (with data)" in str(told), "of one nobody knows"
    told = verdict(Facts(workers=(worker(compute_ms=4.0, data_ms=None, exchange_ms=6.0),), ps=(CALM,)))
    assert told.limit is Limit.EXCHANGE and "40 % compute (with data)" in str(told)


def test_push_and_pull_limit_when_ps_and_link_have_room() -> None:
    told = verdict(Facts(workers=(worker(compute_ms=4.0, data_ms=1.0, exchange_ms=5.0),), ps=(CALM,)))
    assert told.limit is Limit.EXCHANGE and "larger batches" in str(told)


def test_who_waits_for_a_slow_worker_is_limited_by_it() -> None:
    fast = worker(0, wait_share=0.75, compute_ms=1.0, wait_ms=3.0)
    slow = worker(1, compute_ms=4.0, slowed=4.0)
    told = verdict(Facts(workers=(fast, slow), ps=(CALM,)))
    assert told.limit is Limit.SLOWEST
    assert "worker:1 needs 4.0 times as long" in str(told) and "--slow asks for 4 times" in str(told)


def test_a_slow_worker_that_nobody_waits_for_limits_nobody() -> None:
    fast, slow = worker(0, compute_ms=1.0), worker(1, compute_ms=4.0, slowed=4.0)
    assert verdict(Facts(workers=(fast, slow), ps=(CALM,))).limit is Limit.COMPUTE
    some = worker(0, wait_share=0.22, compute_ms=1.0, wait_ms=0.3)  # k of n: it waits, but for another one
    assert verdict(Facts(workers=(some, worker(1, compute_ms=8.0)), ps=(CALM,))).limit is not Limit.SLOWEST


def test_equal_workers_that_wait_are_limited_by_their_rounds() -> None:
    waiting = [WorkerFacts(name=f"worker:{n}", step_ms=2.0, wait_share=0.3) for n in range(2)]
    told = verdict(Facts(workers=tuple(waiting), ps=(CALM,)))
    assert told.limit is Limit.ROUNDS and "30 % of their time" in str(told)


def test_what_was_not_measured_is_said_and_not_guessed() -> None:
    told = verdict(Facts(workers=(WorkerFacts(name="worker:0", step_ms=1.0),), ps=(PsFacts(name="ps:0"),)))
    assert told.limit is Limit.UNKNOWN and not told.has_room
    assert "where a step goes" in str(told) and "how busy the ps are" in str(told)
    assert "would" not in str(told)
    assert verdict(Facts()).limit is Limit.UNKNOWN


@pytest.mark.parametrize(("busy", "said"), [(0.05, "another ps would not pay"), (0.4, "save at most 20 % of the time")])
def test_how_busy_a_ps_is_says_what_another_one_would_bring(busy: float, said: str) -> None:
    unsplit = WorkerFacts(name="worker:0", step_ms=1.0)
    told = verdict(Facts(workers=(unsplit,), ps=(PsFacts(name="ps:0", busy_share=busy),)))
    assert told.limit is Limit.UNKNOWN and said in str(told)


@pytest.mark.parametrize(("busy", "said"), [(None, "would not"), (0.19, "would not"), (0.3, "save at most 15 %")])
@pytest.mark.parametrize(
    "parts", [{"compute_ms": 5.1, "exchange_ms": 4.9}, {"compute_ms": 4.9, "exchange_ms": 5.1, "data_ms": 6.0}]
)
def test_another_ps_is_judged_by_how_busy_this_one_is_whatever_the_limit(
    parts: dict[str, float], busy: float | None, said: str
) -> None:
    told = verdict(Facts(workers=(worker(**parts),), ps=(PsFacts(name="ps:0", busy_share=busy),)))
    assert told.limit in (Limit.COMPUTE, Limit.FEEDER)
    assert f"; a second ps would {said.removeprefix('would ')}" in told.advice


def test_a_run_that_was_mostly_its_start_says_so_first() -> None:
    told = verdict(Facts(workers=(COMPUTING,), ps=(CALM,), start_share=0.77))
    assert str(told).startswith("Launch takes 77 % of the run's time") and told.limit is Limit.COMPUTE


def test_a_run_of_which_nobody_told_how_long_it_trained_may_have_evaluated_too() -> None:
    told = verdict(Facts(workers=(COMPUTING,), ps=(CALM,), start_share=0.97, is_told=False))
    assert str(told).startswith("Launch, and what the script does beside its steps, take 97 % of the run's time")
    assert "Launch" not in str(verdict(Facts(workers=(COMPUTING,), ps=(CALM,), start_share=0.2, is_told=False)))


def test_of_a_handful_of_steps_nothing_is_said() -> None:
    def of(num_steps: int | None) -> Limit:
        return verdict(Facts(workers=(COMPUTING,), ps=(CALM,), num_steps=num_steps)).limit

    told = str(verdict(Facts(workers=(COMPUTING,), ps=(CALM,), num_steps=8)))
    assert "no worker made more than 8 steps" in told and "would" not in told
    assert of(limits.FEW_STEPS - 1) is Limit.UNKNOWN and of(limits.FEW_STEPS) is of(None) is Limit.COMPUTE


def test_an_even_step_is_not_blamed_on_anything() -> None:
    even = worker(compute_ms=4.6, data_ms=2.4, exchange_ms=2.4, wait_ms=0.6)
    assert verdict(Facts(workers=(even,), ps=(CALM,))).limit is Limit.NOTHING
