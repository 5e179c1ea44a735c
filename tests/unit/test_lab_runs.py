"""DOES the lab read whole runs rightly? Jitter, spread, flags, lines of tables; then runs that fail, with processes."""

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from running_lab import running

from paceline.cluster.settings import Settings
from paceline.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TRAINING
from paceline.lab import MATRICES, estimate
from paceline.lab.cells import Cell, Finished, Ps, Staleness, Table, Worker, flags
from paceline.lab.matrices import apply, modes
from paceline.lab.matrices.modes import accuracy_line, average_line
from paceline.lab.measuring.processes import Failed
from paceline.lab.measuring.whole_runs import WholeRuns, check_memory
from paceline.lab.progress import Progress
from paceline.lab.results.kept import Kept
from paceline.lab.results.result import ResultFile
from paceline.lab.run import measure, repetitions_left
from paceline.lab.scenario import Amounts, Kind, Matrix, Row, Scenario, only
from paceline.lab.scripts.curves import Averages, Curve, Point, jitter, spread
from paceline.modes.spec import check
from paceline.telemetry.records import StepMs

LAB = [sys.executable, "-m", "paceline", "lab", "run"]


# --- numbers ------------------------------------------------------------------------------------------------------


def test_jitter_is_the_distance_to_the_mean_of_what_came_before() -> None:
    assert jitter([2.0] * 50, skip=10) == 0.0
    assert jitter([0.0, 1.0], skip=1) == 1.0  # the loss itself is not in the mean that it is compared with
    assert jitter([0.0, 1.0, 1.0], skip=2, decay=0.5) == 0.5
    zigzag = [1.0, 3.0] * 500
    assert jitter(zigzag, skip=500) == pytest.approx(1.0, abs=0.03)
    assert jitter([10 * value for value in zigzag], skip=500) == pytest.approx(10.0, abs=0.3)


def test_jitter_forgets_a_slow_fall_and_says_nothing_of_what_is_not_there() -> None:
    falling = [10.0 * math.exp(-step / 5000) for step in range(5000)]
    assert jitter(falling, skip=1000) == pytest.approx(0.05, abs=0.05)
    assert jitter([1.0, math.nan, 1.0], skip=0) is None
    assert jitter([1.0, 2.0], skip=2) is None
    assert jitter([], skip=0) is None


def test_spread() -> None:
    assert spread([0.5, 0.25, 0.75]) == 0.5
    assert spread([0.5]) is None and spread([]) is None


# --- the matrices -------------------------------------------------------------------------------------------------


def test_every_mode_runs_with_every_number_of_workers() -> None:
    (runs, _) = modes.matrix().tables
    assert [len([c for c in runs.cells if c.num_workers == n and not c.slowed]) for n in (1, 2, 3)] == [6, 7, 7]
    slowed = [cell for cell in runs.cells if cell.slowed]
    assert len(slowed) == 7 and all(cell.slowed == {1} and "5x (sleep)" in cell.labels[2] for cell in slowed)
    names = {settings.mode for settings in (cell.settings for cell in runs.cells)}
    assert names == {"async", "bounded", "sync", "local"}
    programs = {cell.program for cell in runs.cells}
    assert len(programs) == 1  # the same model, batch, learning rate and seed in all of them


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("is_quick", [False, True])
def test_a_matrix_is_whole(name: str, is_quick: bool) -> None:
    matrix = MATRICES[name](is_quick)
    assert len(set(matrix.titles)) == len(matrix.titles) > 0
    names = [each.name for each in matrix.scenarios]
    assert len(set(names)) == len(names)
    assert {name for row in matrix.rows for name in (row.scenario, row.beside)} == set(names)
    assert sum(row.is_noise for row in matrix.rows) == bool(matrix.rows)
    for table in matrix.tables:
        assert all(len(cell.labels) < len(table.columns) for cell in table.cells)
    for settings, count in settings_of(matrix):
        check(settings.mode_spec, count)


def settings_of(matrix: Matrix) -> list[tuple[Settings, int]]:
    runs = [(cell.settings, cell.num_workers) for table in matrix.tables for cell in table.cells]
    return runs + [(each.settings, each.num_workers) for each in matrix.scenarios if each.kind is Kind.CLUSTER]


def test_the_bars_of_issue_three() -> None:
    bars = {row.title: row.bar for row in [*modes.matrix().rows, *apply.matrix().rows] if row.bar is not None}
    assert list(bars.values()) == [1.10, 1.35]
    two_of_three, sync = bars
    assert two_of_three.startswith("2 of 3, worker:2 5x") and sync.startswith("1 ps + 2 workers, sync, shm, 11 M")
    straggling = [each for each in modes.matrix().scenarios if each.straggler is not None]
    assert all(each.num_workers == 3 and each.straggler == 2 and "sleeps" in each.name for each in straggling)
    assert [each.num_workers for each in modes.matrix().scenarios if each.straggler is None] == [2, 2]


def test_only_leaves_out_rows_and_runs_that_were_not_asked_for() -> None:
    few = only(modes.matrix(), "sync, 2 of 3, 3 workers, worker:1")
    assert few.titles == ["sync, 2 of 3, 3 workers, worker:1 5x (sleep)"] and not few.scenarios
    rows = only(modes.matrix(), "2 of 3, worker:2")
    assert not rows.tables and [row.is_noise for row in rows.rows] == [True, False]
    assert len(rows.scenarios) == 3


def test_a_command_says_its_settings_and_nothing_else() -> None:
    assert flags(Settings(run_id="x", run_dir="y")) == []
    local = Settings(run_id="", mode="local", local_steps=10, outer="async", slow="worker:1=5x", save_every="none")
    assert flags(local) == [
        "--mode", "local", "--local-steps", "10", "--outer", "async", "--slow", "worker:1=5x", "--save-every", "none",
    ]  # fmt: skip
    cell = only(apply.matrix(), "update, 11M, Adam").tables[0].cells[0]
    assert " ".join(cell.command) == (
        "paceline run --workers 2 --mode sync --lane shm --save-every none "
        "-m paceline.lab.scripts.apply_script --size 11M --optimizer adam --steps 200"
    )


# --- lines --------------------------------------------------------------------------------------------------------


def run_of(told: object, **fields: object) -> Finished:
    """Three workers, of which worker 1 is slow, waits for nobody and is often late."""
    workers = [
        Worker(index=i, steps=100, discarded=30 * (i == 1), step_ms=StepMs(ms, 9.0), samples_per_s=100.0, waited_s=w)
        for i, (ms, w) in enumerate([(1.0, 2.0), (50.0, 0.0), (3.0, 4.0)])
    ]
    ps = [Ps(index=0, updates=70, apply_ms=2.0, pushes={"0": 100, "1": 100, "2": 100})]
    raw = msgspec.Raw(msgspec.json.encode(told))
    return Finished(workers=workers, ps=ps, staleness=Staleness(mean=1.5, p95=4), told=raw)


def curve(reached: Point | None) -> Curve:
    tail = [Point(9.0, 900, accuracy) for accuracy in (0.971, 0.975, 0.973)]
    return Curve(seconds=10.0, updates=500, reached=reached, points=[Point(4.0, 200, 0.969)], tail=tail, jitter=0.12345)


def test_a_line_counts_the_slowed_worker_only_where_it_should() -> None:
    (runs, _) = modes.matrix().tables
    cell = next(cell for cell in runs.cells if cell.slowed)
    line = dict(
        zip(runs.head, (*cell.labels, *accuracy_line(cell, run_of(curve(Point(5.0, 250, 0.9701))))), strict=True)
    )
    assert line["step ms"] == "2.000" and line["samples/s"] == "300" and line["updates/s"] == "50"
    assert line["0.97 after s"] == "5.00" and line["loss jitter"] == "0.1235" and line["accuracy spread"] == "0.0040"
    assert (line["staleness"], line["p95"]) == ("1.50", "4")
    assert line["discarded"] == "10.0 %"  # of all pushes of all workers
    assert line["waiting"] == "30.0 %"  # 2 + 4 s of the two that are not slowed, in 10 s each
    assert line["remark"] == "slowed: step 50.000 ms"


def test_a_run_that_did_not_get_there_says_how_far_it_came() -> None:
    (runs, _) = modes.matrix().tables
    line = accuracy_line(runs.cells[0], run_of(curve(None)))
    assert line[3] == "-" and line[-1] == "not reached: best 0.9750"


def test_averages_are_over_the_second_half() -> None:
    told = Averages(last=[0.1, 0.9, 0.94, 0.96], averaged=[0.1, 0.2, 0.96, 0.97])
    assert average_line(modes.matrix().tables[1].cells[0], run_of(told))[:-1] == (
        "0.9500", "0.9650", "+0.0150", "0.0200", "0.0100",
    )  # fmt: skip


def test_an_update_is_told_in_time_and_time_per_parameter() -> None:
    (table,) = apply.matrix().tables
    assert apply.update_line(table.cells[0], run_of({})) == ("70", "2.00", "0.18", "18.00", "")


# --- runs ---------------------------------------------------------------------------------------------------------


def test_a_run_that_does_not_fit_is_skipped() -> None:
    cell = next(cell for cell in apply.matrix().tables[0].cells if cell.labels[0] == "100M")
    check_memory(cell, 20_000_000_000)
    with pytest.raises(Failed, match=r"^skipped: it needs about 8\.0 GB of memory, and 1\.0 GB are free"):
        check_memory(cell, 1_000_000_000)


def small(*cells: Cell) -> Matrix:
    def line(cell: Cell, done: Finished) -> tuple[str, ...]:
        return (str(len(done.workers)), "")

    table = Table(title="Small", columns=("what", "workers"), cells=cells, line=line, note="Nothing more.")
    return Matrix(name="small", tables=(table,))


def cell_of(title: str, module: str, **fields: object) -> Cell:
    settings = Settings(run_id="", save_every="none")
    made = Cell(title=title, labels=(title,), program=(module,), num_workers=1, settings=settings)
    return msgspec.structs.replace(made, **fields)


@pytest.mark.slow
def test_runs_that_fail_do_not_stop_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that raises, a flag that is refused, one that is skipped, one that never ends; none of them trains."""
    (tmp_path / "burning.py").write_text("raise ValueError('it burns')")
    (tmp_path / "endless.py").write_text("import threading; threading.Event().wait()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    refused = Settings(run_id="", mode="sync", replicas_to_aggregate=0)
    cells = (
        cell_of("burning", "burning"),
        cell_of("refused", "burning", settings=refused),
        cell_of("huge", "burning", needs_bytes=1 << 60),
        cell_of("endless", "endless", limit_s=1.0),
    )
    results = ResultFile(tmp_path / "now")
    try:
        assert measure(small(*cells), tmp_path / "now", results, Progress()) == EXIT_TRAINING
        assert measure(small(cells[2]), tmp_path / "then", results, Progress()) == EXIT_OK
    finally:
        results.close()
    printed = capsys.readouterr().out
    assert "failed: worker:0 failed with exit code 1 (ValueError: it burns); its log: " in printed
    assert "huge           -  skipped: it needs about" in printed
    assert "it did not end within 1 s" in printed and "Nothing more." in printed
    lines = [json.loads(line) for line in results.path.read_text().splitlines()]
    failed = {line["scenario"]: line["cause"] for line in lines if line["kind"] == "failed"}
    assert list(failed) == [cell.title for cell in cells]
    assert "--replicas-to-aggregate is 0" in failed["refused"]
    assert not [child for child in psutil.Process().children(recursive=True) if child.status() != "zombie"]


NIGHTLY = pytest.mark.nightly("a kind of run that the lab cannot start any more, or another signal that leaves some")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("matrix", "text", "kinds"),
    [
        pytest.param("modes", "outer sync, 2 workers", {"cell": 1}, marks=NIGHTLY),
        pytest.param("modes", "2 of 3, worker:2", {"row": 2}, marks=NIGHTLY),
        ("apply", "update, 11M, SGD", {"cell": 1}),
    ],
)
def test_a_tiny_run_from_start_to_table(matrix: str, text: str, kinds: dict[str, int], tmp_path: Path) -> None:
    command = [*LAB, matrix, "--quick", "--reps", "1", "--steps", "5", "--only", text, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*/results.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {kind: len([line for line in lines if line["kind"] == kind]) for kind in kinds} == kinds
    assert "failed" not in done.stdout and "did not end" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=NIGHTLY)])
def test_interrupting_a_whole_run_leaves_nothing_running(number: signal.Signals, tmp_path: Path) -> None:
    command = [*LAB, "modes", "--only", "sync, 2 workers", "--out", str(tmp_path)]
    with running(command) as lab:
        assert lab.stdout is not None
        started: list[psutil.Process] = []
        for line in lab.stdout:  # a line every few seconds
            started = psutil.Process(lab.pid).children(recursive=True)
            if line.startswith("modes: run 1") and len(started) >= 2:
                break
        assert len(started) >= 2
        lab.send_signal(number)
        rest = lab.stdout.read()
        assert lab.wait(timeout=60) == EXIT_INTERRUPTED
    assert "Interrupted" in rest and "Results: " in rest
    assert not [process for process in started if process.is_running()]


# --- how much is left -------------------------------------------------------------------------------------------------


class Heard(Progress):
    """Keeps every line that would be shown for a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def update(self, text: str) -> None:
        self.lines.append(text)


def test_before_anything_is_measured_all_of_the_matrix_is_left_with_its_rows(tmp_path: Path) -> None:
    matrix = modes.matrix(is_quick=True)
    ahead = estimate.ahead(matrix, None, repetitions_left(matrix, Kept()))
    results = ResultFile(tmp_path)
    runs = WholeRuns(matrix, results, Heard(), ahead)
    first, *others = (cell for table in matrix.tables for cell in table.cells)
    runs._waiting = [cell.title for cell in others]
    cells_s = sum(ahead.cells_s.values())
    assert runs._left_s(first, 0.0) == pytest.approx(cells_s + ahead.rows_s) and ahead.rows_s > 10
    assert runs._left_s(first, 1.0) == pytest.approx(cells_s + ahead.rows_s - 1)
    runs._ended = [(10.0, 30.0)]
    assert runs._left_s(first, 0.0) == pytest.approx(3 * cells_s + ahead.rows_s), "what was measured says more"
    results.close()


def test_what_is_left_of_rows_has_the_groups_that_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.lab.measuring.repetitions.IDLE_S", 0.01)
    scenarios = [Scenario(name=name, kind=Kind.CARRIER, what="memcpy") for name in ("copy", "again")]
    scenarios += [Scenario(name=name, kind=Kind.DRIVER, what="no_such_peer") for name in ("theirs", "alone")]
    rows = (Row(title="A/A", scenario="again", beside="copy"),)
    rows += (Row(title="theirs", scenario="theirs", beside="alone", group=1),)
    amounts = Amounts(reps=2, steps=100, carrier_bytes=64_000)
    matrix = Matrix(name="small", scenarios=tuple(scenarios), rows=rows, amounts=amounts, usual_step_us=1e5)
    heard, results = Heard(), ResultFile(tmp_path)
    measure(matrix, tmp_path, results, heard)
    results.close()
    assert heard.lines[0] == "small, part 1 of 2: starting 2 scenarios, about 1 min 22 s left"
    (last,) = [line for line in heard.lines if "repetition 2 of 2" in line][-1:]
    assert last == "small, part 1 of 2: repetition 2 of 2, copy, about 1 min 14 s left", (
        "two starts of 4 s, and twice three segments of 110 steps of 0.1 s each"
    )
