"""Document 000's accuracies, and document 002's share: the bars, held by runs of real processes.

The short version: lr 0.01 and 55 batches an epoch give document 000's curve at a tenth of its cost. The whole one is
`paceline lab run accuracy`; both are one matrix, so what is tested here is what is measured there.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import EXIT_OK
from paceline.lab.cells import Cell, Finished
from paceline.lab.matrices import accuracy, budget
from paceline.lab.matrices.accuracy import SEEDS, Told, in_order, verdict_lines
from paceline.lab.measuring.starting import slug
from paceline.lab.measuring.whole_runs import read
from paceline.lab.progress import Progress
from paceline.lab.results.result import ResultFile
from paceline.lab.run import measure
from paceline.lab.scenario import Matrix, only
from paceline.telemetry.paths import RunPaths

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed.py"
pytestmark = pytest.mark.timeout(1500)


def ran(matrix: Matrix, folder: Path) -> list[tuple[Cell, Finished]]:
    """What its runs left, one after the other as the lab runs them."""
    results = ResultFile(folder)
    try:
        assert measure(matrix, folder, results, Progress()) == EXIT_OK
    finally:
        results.close()
    (table,) = matrix.tables
    return [(cell, read(RunPaths(folder / slug(cell.title)), is_alone=not cell.num_ps)) for cell in table.cells]


def check(seed: int, folder: Path) -> list[tuple[Cell, Finished]]:
    """Async after N updates is one process after N updates, within 0.01; sync and a lone worker are its bits."""
    ended = ran(only(accuracy.matrix(is_short=True), f", seed {seed}"), folder)
    told = Told(ended)
    for each in accuracy.TOPOLOGIES:
        off, is_same = told.off_single(each, seed), told.is_same(each, seed)
        assert off is None or off <= accuracy.OFF_SINGLE, (each.title, seed, off)
        assert is_same is not False, (each.title, seed)
        assert (off, is_same) != (None, None) or not each.num_ps, "a cluster is compared with something"
    assert in_order(told, seed), (accuracy.ORDER, seed)
    return ended


@pytest.mark.nightly("training that learns worse, though its single steps are right to the bit")
@pytest.mark.long
def test_document_000_from_one_seed(tmp_path: Path) -> None:
    check(SEEDS[0], tmp_path)


@pytest.mark.nightly("a mean over seeds that is off the document, or a seed that is off one process")
@pytest.mark.long
def test_document_000(tmp_path: Path) -> None:
    lines = verdict_lines([each for seed in SEEDS for each in check(seed, tmp_path / str(seed))])
    assert len(lines) == 8
    assert {line[-1] for line in lines} == {"within the bars"}, lines


# --- document 002 -----------------------------------------------------------------------------------------------------


def run_example(folder: Path) -> budget.Shared:
    """examples/distributed.py, the program that people read, as `paceline run` starts it."""
    command = [sys.executable, "-m", "paceline", "run", "--run-dir", "made", "--slow", f"worker:1={budget.FACTOR}x"]
    done = subprocess.run([*command, EXAMPLE], cwd=folder, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    left = read(RunPaths(folder / "made"))
    counts = tuple(worker.steps for worker in left.workers)
    losses = tuple(worker.metrics.get(budget.LOSS) for worker in left.workers)
    return budget.Shared(budget.STEPS, left.global_step, counts, losses)


@pytest.mark.slow
@pytest.mark.alone
def test_the_example_of_document_002_shares_10000_steps(tmp_path: Path) -> None:
    found = run_example(tmp_path)
    assert (found.total, found.applied, sum(found.counts)) == (10_000,) * 3
    assert 2 < found.counts[0] / found.counts[1] < 9, "worker 1 is 4.2 times slower"


@pytest.mark.nightly("a share or a cross entropy whose mean over runs is off document 002's")
@pytest.mark.alone
def test_document_002_shares_10000_steps(tmp_path: Path) -> None:
    """Worker 1 is 4.2 times slower; each says how many were its own. One ps and two; the lab and the example."""
    found = []
    for name in [f"{num_ps} ps + 2 workers, seed {seed}" for num_ps, seed in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 3))]:
        ((cell, done),) = ran(only(budget.matrix(), name), tmp_path / name.replace(" ", ""))
        found.append(budget.shared(cell, done))
        for index, count in enumerate(found[-1].counts):
            log = (tmp_path / name.replace(" ", "") / slug(cell.title) / "logs" / f"worker-{index}.log").read_text()
            assert f": Worker {index}: training step {count} done (global step: " in log
            assert "After 10000 training step(s), validation cross entropy = " in log
            assert "Training elapsed time: " in log
    found.append(run_example(tmp_path))
    assert [(each.total, each.applied, sum(each.counts)) for each in found] == [(10_000,) * 3] * 6
    assert list(budget.means(found).over()) == [], found
