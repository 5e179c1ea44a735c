"""DO whole runs repeat as rows do? Interleaved, each time in an order of its own; and what their figures become."""

import msgspec
import pytest

from paceline.lab import REPEATED
from paceline.lab.cells import Cell, Finished, Worker
from paceline.lab.matrices import cards, slow_link, watch
from paceline.lab.results.lines import family
from paceline.lab.results.result import provenance_of
from paceline.lab.run import Request, checked
from paceline.lab.scripts.curves import Curve, Timed
from paceline.lab.scripts.watched import Watched

RATES = (100.0, 140.0, 900.0, 120.0, 160.0)  # of five repetitions; their lower quartile is 120


def cells_of(name: str, reps: int, is_quick: bool = True) -> tuple[Cell, ...]:
    return checked(Request(matrix=name, is_quick=is_quick, reps=reps)).tables[0].cells


def told(value: object) -> Finished:
    return Finished(told=msgspec.Raw(msgspec.json.encode(value)))


@pytest.mark.parametrize("name", REPEATED)
def test_every_cell_runs_once_in_each_repetition_in_an_order_of_its_own(name: str) -> None:
    once = sorted(family(cell.title) for cell in cells_of(name, 1))
    cells = cells_of(name, 7)
    assert [cell.repetition for cell in cells] == [number for number in range(7) for _ in once]
    parts = [cells[number * len(once) : (number + 1) * len(once)] for number in range(7)]
    orders = [[family(cell.title) for cell in part] for part in parts]
    assert all(sorted(order) == once for order in orders) and len({tuple(order) for order in orders}) > 1
    assert len({cell.title for cell in cells}) == len(cells)


@pytest.mark.parametrize(("name", "usual"), [("watch", 1), ("cards", 1), ("slow-link", 3)])
def test_how_often_is_what_was_asked_for(name: str, usual: int) -> None:
    for reps, count in ((None, usual), (2, 2)):
        assert provenance_of(checked(Request(matrix=name, reps=reps)), 0.0).settings.reps == count


def test_a_slow_cable_is_judged_by_lower_quartiles() -> None:
    window = {cards.BEGAN_S: 0.0, cards.ENDED_S: 1.0}
    ended = []
    for cell in cells_of("slow-link", 5):
        rate = RATES[cell.repetition or 0] if cell.labels == (slow_link.FREE, "sync") else 100.0
        ended.append((cell, Finished(workers=[Worker(index=0, metrics={**window, cards.SAMPLES: rate})])))
    assert slow_link.verdict_lines(ended)[0][2:] == ("120", "1.00", "1.20", "lower quartile of 5 runs")


def test_devices_are_judged_by_the_lower_quartile_of_each_seed() -> None:
    ended = []
    for cell in cells_of("cards", 5):
        rate = RATES[cell.repetition or 0] if cell.labels[0] != cards.ONE else 100.0
        curve = Curve(seconds=1.0, updates=1, reached=None, points=[], tail=[], jitter=0.1, timed=Timed(rate, 0.0, 1.0))
        ended += [(cell, told(curve))] if not cell.num_ps else []
    one, two = cards.verdict_lines(ended)
    assert (one[2], two[2]) == ("1.00", "1.20") and two[-1].endswith("; 5 runs, lower quartiles over 5 repetitions")


def test_claims_are_held_against_lower_quartiles_of_times_and_rates_and_means_of_the_rest() -> None:
    made = [watch.Seen(cores=n, chief=n, seconds=n, step_ms=n, mb=n, samples_per_s=n) for n in RATES]
    expected = watch.Seen(cores=284.0, chief=284.0, seconds=120.0, step_ms=120.0, mb=284.0, samples_per_s=120.0)
    assert watch.together(made) == expected
    value = Watched(looks=[], wall_s=2.0, cpu_s={"worker:0": 1.0, "worker:1": 1.0})
    lines = watch.verdict_lines([(cell, told(value)) for cell in cells_of("watch", 2)])
    assert lines and all(line[-1].endswith("; lower quartiles of 2 runs each") for line in lines)
