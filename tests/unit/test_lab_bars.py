"""DOES the lab judge the documents' bars rightly? Accuracies, bits and shares that are right, and some that are not."""

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.lab.cells import REMARK, Cell, Finished, Worker
from paceline.lab.matrices import accuracy, budget
from paceline.lab.matrices.accuracy import (
    ASYNC,
    ASYNC_THREE,
    AVERAGED,
    ONE,
    ORDER,
    SEEDS,
    SINGLE,
    SYNC,
    SYNC_TWO_PS,
    TOPOLOGIES,
    Topology,
    verdict_lines,
)  # fmt: skip
from paceline.lab.measuring.whole_runs import command_of
from paceline.lab.run import Request, checked
from paceline.lab.scripts.accuracy_script import average
from paceline.lab.scripts.learned import Learned, Point
from paceline.telemetry.paths import RunPaths

EPOCH = 55_000
RIGHT = {  # (updates, accuracy, bits) of each topology, as the documents have them
    SINGLE.title: [(EPOCH, 0.73, "one"), (2 * EPOCH, 0.80, "two"), (3 * EPOCH, 0.83, "three")],
    AVERAGED.title: [(EPOCH, 0.731, "mean")],
    ONE.title: [(EPOCH, 0.73, "one")],
    ASYNC.title: [(2 * EPOCH, 0.803, "a")],
    SYNC.title: [(EPOCH, 0.731, "mean")],
    "2 ps + 2 workers, async": [(2 * EPOCH, 0.795, "b")],
    SYNC_TWO_PS.title: [(EPOCH, 0.731, "mean")],
    ASYNC_THREE.title: [(3 * EPOCH, 0.831, "c")],
}


def runs(
    wrong: dict[tuple[Topology, int], tuple[int, float, str]] | None = None, seeds: tuple[int, ...] = SEEDS
) -> list[tuple[Cell, Finished]]:
    """Every run of the matrix, right but for those that are said."""
    told = {(each.title, seed): RIGHT[each.title] for each in TOPOLOGIES for seed in seeds}
    told |= {(each.title, seed): [point] for (each, seed), point in (wrong or {}).items()}
    found = []
    for cell in accuracy.matrix().tables[0].cells:
        points = told.get((cell.labels[0], int(cell.labels[1])))
        if points is not None:
            learned = Learned([Point(*point) for point in points])
            found.append((cell, Finished(told=msgspec.Raw(msgspec.json.encode(learned)))))
    return found


def verdicts(*args: object) -> dict[str, dict[str, str]]:
    head = (*accuracy.VERDICTS.columns, REMARK)
    return {line[0]: dict(zip(head, line, strict=True)) for line in verdict_lines(runs(*args))}  # type: ignore[arg-type]


def test_what_the_document_has_is_within_the_bars() -> None:
    found = verdicts()
    assert {line[REMARK] for line in found.values()} == {"within the bars"}
    assert list(found) == [*(each.title for each in TOPOLOGIES if each is not AVERAGED), ORDER]
    assert (found[ONE.title]["mean"], found[ONE.title]["off"]) == ("0.7300", "+0.0100")
    assert [found[each.title]["same bits"] for each in (ONE, SYNC, SYNC_TWO_PS, ASYNC)] == [*["5 of 5"] * 3, "-"]
    assert found[ASYNC.title]["off one process"] == "0.0030"


@pytest.mark.parametrize(
    ("topology", "point", "said"),
    [
        (ASYNC, (2 * EPOCH, 0.785, "a"), "a seed is 0.0150 off one process after as many updates"),
        (ONE, (EPOCH, 0.73, "other"), "other bits in 1 of 5 seeds"),
        (SYNC_TWO_PS, (EPOCH, 0.731, "other"), "other bits in 1 of 5 seeds"),
    ],
)
def test_one_seed_is_enough_to_miss_a_bar(topology: Topology, point: tuple[int, float, str], said: str) -> None:
    assert verdicts({(topology, 3): point})[topology.title][REMARK] == f"OVER THE BAR: {said}"


def test_the_mean_is_held_against_the_document() -> None:
    all_low = {(SYNC, seed): (EPOCH, 0.69, "mean") for seed in SEEDS}
    found = verdicts(all_low)
    assert found[SYNC.title][REMARK] == "OVER THE BAR: the mean is 0.0300 off the document"
    assert found[ORDER][REMARK] == "OVER THE BAR: not so from seed 1, 2, 3, 4, 5"


def test_the_order_is_looked_at_in_every_seed() -> None:
    late = {(ASYNC_THREE, 2): (3 * EPOCH, 0.803, "c"), (ASYNC_THREE, 4): (3 * EPOCH, 0.8029, "c")}
    assert verdicts(late)[ORDER][REMARK] == "OVER THE BAR: not so from seed 2, 4"


def test_fewer_seeds_are_said() -> None:
    found = verdicts(None, (1, 2))
    assert {line[REMARK] for line in found.values()} == {"within the bars (2 of 5 seeds)"}
    assert verdict_lines([]) == []


def test_a_line_of_a_process_alone_and_of_a_cluster() -> None:
    (table,) = accuracy.matrix().tables
    (cell, done), *_ = runs()
    line = dict(zip(table.head, (*cell.labels, *table.line(cell, done)), strict=True))
    assert (line["updates"], line["accuracy"], line["bits"]) == ("55000", "0.7300", "one")
    assert line[REMARK] == "0.8000 after 110000, 0.8300 after 165000"
    cell, done = next(each for each in runs() if each[0].labels == (ASYNC.title, "1"))
    workers = [Worker(index=i, epoch_s=2.0 + i, metrics={"accuracy": 0.79 + i / 100}) for i in (0, 1)]
    done = msgspec.structs.replace(done, workers=workers)
    line = dict(zip(table.head, (*cell.labels, *table.line(cell, done)), strict=True))
    assert (line["at its own end"], line["epoch s"], line[REMARK]) == ("0.7900 0.8000", "2.50", "")


def test_the_commands_are_what_one_would_type(tmp_path: Path) -> None:
    cells = {cell.labels: cell for cell in accuracy.matrix(is_short=True).tables[0].cells}
    assert len(cells) == len(SEEDS) * len(TOPOLOGIES) == 40
    two_ps = cells[SYNC_TWO_PS.title, "3"]
    recipe = "-m paceline.lab.scripts.accuracy_script --seed 3 --lr 0.01 --batches 55 --epochs 100"
    assert " ".join(two_ps.command) == f"paceline run --ps 2 --workers 2 --mode sync --save-every none {recipe}"
    single = cells[SINGLE.title, "3"]
    assert " ".join(single.command) == f"python {recipe} --times 3"
    paths = RunPaths(tmp_path)
    assert command_of(single, paths)[-2:] == ["--told", str(tmp_path / "lab.json")]
    assert "--run-dir" in command_of(two_ps, paths) and "--told" not in command_of(two_ps, paths)


def test_short_is_refused_where_nothing_is_short() -> None:
    assert "lr 0.01" in checked(Request(matrix="accuracy", is_short=True)).tables[0].title
    with pytest.raises(UsageError, match="--short is for accuracy, not for budget"):
        checked(Request(matrix="budget", is_short=True))
    with pytest.raises(UsageError, match="accuracy is whole runs: --reps and --steps"):
        checked(Request(matrix="accuracy", reps=3))
    with pytest.raises(UsageError, match="watch is whole runs: --reps and --steps"):
        checked(Request(matrix="watch", reps=3, steps=3))
    with pytest.raises(UsageError, match="must be at least 1"):
        checked(Request(matrix="watch", reps=0))
    with pytest.raises(UsageError, match="slow-link is not repeated over seeds; take --reps 3"):
        checked(Request(matrix="slow-link", seeds=3))


def test_gradients_are_summed_in_order_and_divided_once() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    batches = [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(3)]
    each = []
    for batch in batches:
        average(model, [batch])
        each.append(model.weight.grad.clone())  # type: ignore[union-attr]
    average(model, batches)
    assert torch.equal(model.weight.grad, ((each[0] + each[1]) + each[2]) / 3)  # type: ignore[arg-type]


# --- the budget -----------------------------------------------------------------------------------------------------


def budget_run(
    counts: tuple[int, int], losses: tuple[float, float] = (1100.0, 1050.0), applied: int = 10_000
) -> tuple[Cell, Finished]:
    workers = [Worker(index=i, steps=counts[i], metrics={budget.LOSS: losses[i]}) for i in (0, 1)]
    return budget.matrix().tables[0].cells[0], Finished(workers=workers, global_step=applied)


def test_the_documents_own_share_is_within_the_bars() -> None:
    (line,) = budget.verdict_lines([budget_run((8085, 1915))] * 3)
    assert line == ("1 ps + 2 workers", "3", "3 of 3", "4.22 : 1", "0.00", "1075.00", "0.00", "within the bars")


def test_how_far_the_runs_of_a_budget_are_apart_is_told() -> None:
    (line,) = budget.verdict_lines([budget_run((8000, 2000)), budget_run((8085, 1915), (1100.0, 1150.0))])
    told = dict(zip(budget.VERDICTS.columns, line, strict=False))
    assert (told["spread of share"], told["spread of it"]) == ("0.22", "50.00")
    (alone,) = budget.verdict_lines([budget_run((8000, 2000))])
    assert alone[4] == alone[6] == "-", "one run is not apart from itself"


@pytest.mark.parametrize(
    ("counts", "losses", "applied", "said"),
    [
        ((8087, 1916), (1147.88, 1122.46), 10_000, "1 miscounted"),
        ((8085, 1915), (1147.88, 1122.46), 10_001, "1 miscounted"),
        ((5000, 5000), (1147.88, 1122.46), 10_000, "share 3.15 : 1"),
        ((8085, 1915), (1700.0, 1712.0), 10_000, "cross entropy 1390.50"),
    ],
)
def test_what_misses_a_bar_is_named(
    counts: tuple[int, int], losses: tuple[float, float], applied: int, said: str
) -> None:
    """A run that does not stop at the budget; shares and losses by their mean."""
    odd = budget_run(counts, losses, applied)
    (line,) = budget.verdict_lines([budget_run((8412, 1588)), odd])
    assert line[-1] == f"OVER THE BAR: {said}"
    assert budget.line(*odd)[-1].startswith("MISCOUNTED: ") == ("miscounted" in said)


def test_a_loss_that_is_not_there_is_no_loss() -> None:
    (line,) = budget.verdict_lines([budget_run((8085, 1915), (1100.0, None))])  # type: ignore[arg-type]
    assert line[-1] == "OVER THE BAR: cross entropy -"


def test_of_few_steps_only_the_counts_are_judged() -> None:
    cell = budget.matrix(is_quick=True).tables[0].cells[0]
    workers = [Worker(index=0, steps=250), Worker(index=1, steps=250)]
    (line,) = budget.verdict_lines([(cell, Finished(workers=workers, global_step=500))])
    assert line[-1] == "too few steps for the bars"
    (line,) = budget.verdict_lines([(cell, Finished(workers=workers, global_step=501))])
    assert line[-1] == "OVER THE BAR: 1 miscounted"


def test_a_quick_run_is_not_held_against_the_document() -> None:
    (table,) = accuracy.matrix(is_quick=True).tables
    learned = Learned([Point(110, 0.17, "one")])
    ended = [(cell, Finished(told=msgspec.Raw(msgspec.json.encode(learned)))) for cell in table.cells[:1]]
    (line,) = verdict_lines(ended)
    assert (line[5], line[-1]) == ("-", "within the bars (1 of 5 seeds)")
