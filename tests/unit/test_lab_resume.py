"""DOES an interrupted lab run go on? What is kept, what is not mixed, what files it leaves; with small processes."""

import csv
import json
from pathlib import Path

import msgspec
import pytest

from paceline.cluster.settings import Settings
from paceline.errors import EXIT_OK, EXIT_TRAINING, UsageError
from paceline.lab import MATRICES, estimate
from paceline.lab.cells import Cell, Finished, Table, Verdicts
from paceline.lab.matrices import peers
from paceline.lab.measuring import whole_runs
from paceline.lab.measuring.processes import Times
from paceline.lab.measuring.repetitions import useful
from paceline.lab.progress import Progress
from paceline.lab.results import flat, reading, telling
from paceline.lab.results.kept import Kept, earlier, unfinished
from paceline.lab.results.lines import Measured
from paceline.lab.results.result import ResultFile, plan_of, provenance_of
from paceline.lab.run import Request, main, measure, repetitions_left, told_kept
from paceline.lab.scenario import Amounts, Kind, Matrix, Row, Scenario, Segment, plan
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.usage import TaskUse

SCRIPT = """
import json, pathlib, sys
here = pathlib.Path(__file__).parent
with open(here / "ran.txt", "a") as file: file.write(sys.argv[1] + "\\n")
if sys.argv[1] == "burns" and not (here / "water").exists(): raise ValueError("it burns")
json.dump({"said": sys.argv[1]}, open(sys.argv[sys.argv.index("--told") + 1], "w"))
"""


def line(cell: Cell, done: Finished) -> tuple[str, ...]:
    return (str(msgspec.json.decode(done.told)["said"]), "")


def runs(folder: Path, *words: str) -> Matrix:
    """Whole runs of one process each, without a cluster."""
    script = folder / "script.py"
    if not script.exists():
        script.write_text(SCRIPT)
    cells = tuple(
        Cell(title=word, labels=(word,), program=(str(script), word), is_script=True, num_ps=0, num_workers=1,
             settings=Settings(run_id=""), limit_s=50.0)
        for word in words
    )  # fmt: skip
    verdicts = Verdicts(title="Together", columns=("what",), lines=lambda ended: [(str(len(ended)), "")])
    table = Table(title="Words", columns=("what", "said"), cells=cells, line=line, note="-", verdicts=verdicts)
    return Matrix(name="small", tables=(table,))


def measured(matrix: Matrix, folder: Path, kept: Kept | None = None, is_ended: bool = True) -> int:
    results = ResultFile(folder)
    try:
        if kept is None:
            results.begin(provenance_of(matrix, 0.0))
        code = measure(matrix, folder, results, Progress(), kept)
        if is_ended:
            results.end()
        return code
    finally:
        results.close()


def lines_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(each) for each in (folder / "results.jsonl").read_text().splitlines()]


# --- whole runs ---------------------------------------------------------------------------------------------------


def test_finished_runs_are_skipped_and_failed_ones_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix, folder = runs(tmp_path, "a", "burns", "b"), tmp_path / "out" / "small-1"
    assert measured(matrix, folder, is_ended=False) == EXIT_TRAINING
    (failed,) = [each for each in lines_of(folder) if each["kind"] == "failed"]
    assert "ValueError: it burns" in str(failed["cause"])
    found, said = unfinished(earlier(tmp_path / "out", "small"), provenance_of(matrix, 1.0))
    assert found is not None and "Going on with " in said and "--fresh" in said
    path, kept = found
    assert path.parent == folder and told_kept(matrix, kept) == "Measured already, and skipped: 2 of 3 runs."
    (tmp_path / "water").touch()
    capsys.readouterr()
    assert measured(matrix, folder, kept) == EXIT_OK
    assert (tmp_path / "ran.txt").read_text().split() == ["a", "burns", "b", "burns"]
    printed = capsys.readouterr().out
    assert [line.split() for line in printed.splitlines() if line[:1] in "ab" and line.strip()] == [
        ["a", "a"], ["burns", "burns"], ["b", "b"],
    ], printed  # fmt: skip
    assert (folder / "burns").exists() and (folder / "burns-2").exists(), "the first one's logs stay"
    assert unfinished(earlier(tmp_path / "out", "small"), provenance_of(matrix, 2.0)) == (None, "")
    said = reading.read(folder / "results.jsonl")
    assert [each.run for each in said.cells] == ["a", "b", "burns-2"], "a line names the folder that its run left"
    assert failed["table"] == "Words" and not said.failures
    assert [line for section in telling.sections(said)[:1] for line in section.lines] == [("3", "")]
    rows = list(csv.DictReader(flat.write(folder).read_text().splitlines()))
    assert [(row["kind"], row["title"]) for row in rows if row["kind"] != "verdicts"] == [
        ("cell", "a"), ("cell", "b"), ("cell", "burns"),
    ]  # fmt: skip
    assert [row["together: what"] for row in rows if row["kind"] == "verdicts"] == ["3"], "told twice, counted once"
    assert {row["cores"] for row in rows} == {str(lines_of(folder)[0]["cores"])} and rows[0]["commit"]


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("paceline", "0.0.1", "version of paceline"),
        ("commit", "abc", "commit"),
        ("changes", "abc", "state of the source files"),
        ("plan", "abc", "request"),
        ("cores", 1000, "number of cores"),
    ],
)
def test_results_of_something_else_are_said_and_not_mixed(field: str, value: object, told: str, tmp_path: Path) -> None:
    matrix = runs(tmp_path, "a")
    facts = provenance_of(matrix, 0.0)
    results = ResultFile(tmp_path / "small-1")
    results.begin(msgspec.structs.replace(facts, **{field: value}))
    results.close()
    found, said = unfinished(earlier(tmp_path, "small"), facts)
    assert found is None and f"with another {told}" in said and said.endswith("; nothing of it is taken.")


def left_of(folder: Path, before: Matrix, now: Matrix) -> str:
    """What is said about results of `before`, which have their first run, when `now` is asked for."""
    (table,) = before.tables
    results = ResultFile(folder / f"{before.name}-1")
    results.begin(provenance_of(before, 0.0))
    results.cell(table, table.cells[0], Finished(), (*table.cells[0].labels, "", ""))
    results.close()
    cells = [cell for table in now.tables for cell in table.cells]
    return unfinished(earlier(folder, before.name), provenance_of(now, 1.0), cells)[1]


def test_what_has_changed_in_a_request_is_said(tmp_path: Path) -> None:
    def change(matrix: Matrix, **fields: object) -> Matrix:
        (table,) = matrix.tables
        cells = tuple(msgspec.structs.replace(cell, **fields) for cell in table.cells)
        return msgspec.structs.replace(matrix, tables=(msgspec.structs.replace(table, cells=cells),))

    def twice(matrix: Matrix) -> Matrix:
        (table,) = matrix.tables
        cells = tuple(msgspec.structs.replace(cell, repetition=at) for at, cell in enumerate(table.cells))
        few = msgspec.structs.replace(table, cells=cells)
        return msgspec.structs.replace(matrix, tables=(few,), amounts=Amounts(reps=2))

    first = runs(tmp_path, "a", "b")
    script = first.tables[0].cells[0].program[0]
    for number, (now, told) in enumerate(
        (
            (twice(first), "reps was 1, and is 2"),
            (change(first, seed=1, repetition=2), ""),
            (change(first, seed=1, limit_s=9.0), "seeds were none, and are 1"),
            (runs(tmp_path, "b"), "'a' was measured, and is not asked for"),
            (change(first, program=(script, "a", "--x")), f"'a' was python {script} a, and is python {script} a --x"),
            (runs(tmp_path, "a"), "the script's text, limit_s, or what it had not come to"),
        )
    ):
        said = left_of(tmp_path / str(number), first, now)
        assert (f"another request ({told}); nothing of it" if told else "Going on with ") in said, said


def test_a_changed_script_or_flag_is_another_request(tmp_path: Path) -> None:
    before = plan_of(runs(tmp_path, "a"))
    assert plan_of(runs(tmp_path, "a")) == before != plan_of(runs(tmp_path, "b"))
    (tmp_path / "script.py").write_text(SCRIPT + "\n")
    assert plan_of(runs(tmp_path, "a")) != before


def test_the_newest_of_the_same_request_counts_and_nobody_takes_what_is_being_written(tmp_path: Path) -> None:
    matrix = runs(tmp_path, "a")
    facts = provenance_of(matrix, 0.0)
    for name in ("small-1", "small-2", "small-more-9"):
        results = ResultFile(tmp_path / name)
        results.begin(facts if name != "small-more-9" else msgspec.structs.replace(facts, matrix="small-more"))
        results.close()
    found, _ = unfinished(earlier(tmp_path, "small"), facts)
    assert found is not None and found[0].parent.name == "small-2"
    held = ResultFile(tmp_path / "small-2")
    try:
        found, _ = unfinished(earlier(tmp_path, "small"), facts)
        assert found is not None and found[0].parent.name == "small-1"
        with pytest.raises(UsageError, match="No results can be written"):
            ResultFile(tmp_path / "small-2")
    finally:
        held.close()


def test_half_a_line_is_no_line(tmp_path: Path) -> None:
    matrix, folder = runs(tmp_path, "a", "b"), tmp_path / "small-1"
    measured(matrix, folder, is_ended=False)
    path = folder / "results.jsonl"
    whole = [each for each in path.read_bytes().splitlines(keepends=True) if b'"cell"' in each or b"prov" in each]
    path.write_bytes(b"".join(whole)[:-30])
    kept = Kept(path)
    assert set(kept.cells) == {"a"} and not kept.is_ended
    assert measured(matrix, folder, kept) == EXIT_OK
    assert set(Kept(path).cells) == {"a", "b"} and Kept(path).is_ended


# --- rows ---------------------------------------------------------------------------------------------------------


def rows(reps: int) -> Matrix:
    scenarios = tuple(Scenario(name=name, kind=Kind.CARRIER, what="memcpy") for name in ("copy", "again"))
    row = Row(title="A/A", scenario="again", beside="copy", is_noise=True)
    amounts = Amounts(reps=reps, steps=1, carrier_bytes=64_000)
    return Matrix(name="small", scenarios=scenarios, rows=(row,), amounts=amounts)


def test_finished_repetitions_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.lab.measuring.repetitions.IDLE_S", 0.01)
    folder = tmp_path / "small-1"
    assert measured(rows(2), folder, is_ended=False) == EXIT_OK
    kept = Kept(folder / "results.jsonl")
    assert repetitions_left(rows(3), kept) == [(0, 2)]
    assert told_kept(rows(3), kept) == "Measured already, and skipped: 2 of 3 repetitions of the rows."
    assert measured(rows(3), folder, kept) == EXIT_OK
    segments = [each["repetition"] for each in lines_of(folder) if each["kind"] == "segment"]
    assert segments == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [each["reps"] for each in lines_of(folder) if each["kind"] == "row"] == [2, 3]
    assert set(Kept(folder / "results.jsonl").segment_us()) == {"copy", "again"}
    (row,) = reading.read(folder / "results.jsonl").rows
    assert (row.reps, row.scenario, row.beside, row.is_noise) == (3, "again", "copy", True)
    capsys.readouterr()
    assert measured(rows(3), folder, Kept(folder / "results.jsonl")) == EXIT_OK
    printed = capsys.readouterr().out
    assert "A/A" in printed and "Idle" not in printed, "all were there: nothing was started"


def test_a_scenario_that_ran_after_it_failed_has_not_failed(tmp_path: Path) -> None:
    results = ResultFile(tmp_path / "small-1")
    results.begin(provenance_of(rows(1), 0.0))
    for name in ("copy", "again", "a run"):
        results.failed(name, "it fell", table="Words" if name == "a run" else "")
    results.segment(0, 0, Segment("copy"), Times(us=[1.0]))
    results.segment(0, 1, Segment("again", 0), None)
    results.close()
    assert Kept(results.path).failures == {"again": "it fell"}, "of scenarios; the runs are another matter"
    assert [each.scenario for each in reading.read(results.path).failures] == ["again", "a run"]


def test_a_group_without_a_row_that_can_be_measured_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `peers` without `make peers`: it is said, no idle processes are looked at, and going on skips it."""
    absent = tuple(Scenario(name=name, kind=Kind.DRIVER, what="no_such_peer") for name in ("theirs", "their single"))
    row = Row(title="theirs", scenario="theirs", beside="their single")
    matrix = Matrix(name="small", scenarios=absent, rows=(row,), amounts=Amounts(reps=2, steps=1))
    folder = tmp_path / "small-1"
    measured(matrix, folder, is_ended=False)
    printed = capsys.readouterr().out
    assert "small: skipped, because none of its rows can be measured here." in printed
    assert "Idle" not in printed and "other programs" not in printed and "repetition 1" not in printed
    assert not [each for each in lines_of(folder) if each["kind"] in ("idle", "others")]
    assert repetitions_left(matrix, Kept(folder / "results.jsonl")) == []


def test_what_stands_only_beside_missing_rows_does_not_run() -> None:
    """The single process of a group whose other systems are not installed."""
    matrix = MATRICES["peers"](True)
    segments = plan(matrix.rows, 0, 0, peers.RAY)
    assert {each.scenario for each in useful(segments, {})} == {peers.SINGLE, peers.RAY_ONE, peers.RAY_ASYNC}
    assert useful(segments, {peers.RAY_ONE, peers.RAY_ASYNC}) == []
    few = useful(segments, {peers.RAY_ASYNC})
    assert [each.scenario for each in few] == [peers.SINGLE, peers.RAY_ONE, peers.SINGLE]
    tensorflow = {peers.TF_SINGLE}  # what TensorFlow's rows are compared with
    left = {each.scenario for each in useful(plan(matrix.rows, 0, 0, peers.BARS), tensorflow)}
    assert peers.DDP in left and not left & {peers.TF_SINGLE, peers.TF_ONE, peers.TF_ASYNC}


# --- before it begins ---------------------------------------------------------------------------------------------


def test_a_dry_run_lists_and_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = Request(matrix="modes", only="2 of 3", is_dry=True, out=str(tmp_path / "out"))
    assert main(asked) == EXIT_OK
    printed = capsys.readouterr().out
    assert "sync, 2 of 3, 3 workers  " in printed and "a guess: as on two quiet cores" in printed
    assert "starting 3 scenarios" in printed and "a guess: 4 s each" in printed
    assert printed.splitlines()[-1].startswith("About ") and "nothing was started" in printed
    assert main(Request(matrix="soak", is_dry=True, out=str(tmp_path / "out"))) == EXIT_OK
    assert "its own plan" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


WORDS = {"half an hour": 30.0, "an hour": 60.0, "minute": 1.0, "minutes": 1.0, "min": 1.0, "s": 1 / 60}


def documented(text: str) -> float:
    """Minutes.

    >>> documented("1 min 24 s"), documented("half an hour (5 seeds)")
    (1.4, 30.0)
    """
    text = text.partition(" (")[0]
    if text in WORDS:
        return WORDS[text]
    words = text.split()
    return sum(float(count) * WORDS[unit] for count, unit in zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("name", MATRICES)
def test_the_first_guess_is_within_twice_of_what_the_page_says(name: str) -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "lab_matrices.md"
    (line,) = [line for line in page.read_text().splitlines() if line.startswith(f"| `{name}` |")]
    for is_quick, text in zip((True, False), line.split(" | ")[2:4], strict=True):
        matrix = MATRICES[name](is_quick)
        left = repetitions_left(matrix, Kept())
        guessed = [*estimate.of_cells(matrix, []), *(estimate.of_rows(matrix, {}, left) if matrix.rows else [])]
        assert all(each.source.startswith(estimate.GUESS) for each in guessed)
        minutes = sum(each.seconds for each in guessed) / 60
        assert documented(text) / 2 <= minutes <= 2 * documented(text), f"{text}, and {minutes:.1f} min guessed"


def test_a_run_of_another_length_is_no_estimate_and_one_from_another_seed_is() -> None:
    quick, whole = (MATRICES["seeds"](is_quick).tables[0].cells[0] for is_quick in (True, False))
    other = msgspec.structs.replace(
        quick, title="another", program=tuple("7" if word == "1" else word for word in quick.program)
    )

    def guess(cell: Cell, ran: Cell) -> estimate.Estimate:
        told = Measured(table="", title=ran.title, labels=ran.labels, command=ran.command, line={}, seconds=3.0)
        table = msgspec.structs.replace(MATRICES["seeds"](True).tables[0], cells=(cell,))
        return estimate.of_cells(Matrix(name="seeds", tables=(table,)), [told])[0]

    assert guess(whole, quick).source == estimate.USUAL
    assert guess(quick, other) == estimate.Estimate(quick.title, 3.0, estimate.LIKE_IT)
    assert guess(quick, quick) == estimate.Estimate(quick.title, 3.0, estimate.EARLIER)


def test_a_dry_run_has_one_line_for_runs_that_differ_only_in_seed_or_repetition(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    path = tmp_path / "mine.toml"
    path.write_text('script = "train.py"\nseeds = 2\nbeside = { workers = 1 }\n[axes]\nworkers = [1, 2]')
    assert main(Request(matrix=str(path), is_dry=True, out=str(tmp_path / "out"))) == EXIT_OK
    printed = capsys.readouterr().out.splitlines()
    guessed = [" ".join(line.split()) for line in printed if "a guess" in line]
    assert sorted(guessed) == [
        f"{title} (7 runs) 3 min 30 s a guess: a quarter of its limit"
        for title in ("1 ps + 1 worker", "1 ps + 2 workers", "A/A: 1 ps + 1 worker")
    ]
    assert any(line.startswith("About 10 min 30 s in all") for line in printed)


def test_estimates_come_from_what_was_measured(tmp_path: Path) -> None:
    matrix = runs(tmp_path, "a", "b")
    measured(matrix, tmp_path / "small-1", is_ended=False)
    kept = Kept(tmp_path / "small-1" / "results.jsonl")
    ran = list(kept.cells.values())
    first, other = estimate.of_cells(matrix, ran[:1])
    assert first == estimate.Estimate("a", ran[0].seconds, estimate.EARLIER) and ran[0].seconds > 0
    assert other.source == estimate.OTHERS and other.seconds == ran[0].seconds
    assert [each.source for each in estimate.of_cells(matrix, ran, ["a"])] == [estimate.DONE, estimate.EARLIER]
    us = {"copy": 1e6, "again": 2e6}
    start, row = estimate.of_rows(rows(7), us, [(0, number) for number in range(7)])
    each = sum(rows(7).amounts.of(Kind.CARRIER, 0)) * (
        1 + 2 + 1
    )  # so many steps of a carrier, warm-up and all, of the row and of what is beside it
    assert (row.source, row.seconds) == (estimate.EARLIER, 7 * each) and start.source.startswith(estimate.GUESS)
    assert [each.source for each in estimate.of_rows(rows(7), us, [])] == [estimate.DONE]


def test_what_telemetry_cost_is_said_once_where_tasks_told_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = iter([0.93, 1.62])

    def left(paths: RunPaths, is_alone: bool) -> Finished:
        return Finished(
            tasks=[TaskUse(name="ps:0", telemetry_ms_per_s=next(costs))], told=msgspec.Raw(b'{"said": "x"}')
        )

    monkeypatch.setattr(whole_runs, "read", left)
    assert measured(runs(tmp_path, "a", "b"), tmp_path / "out") == EXIT_OK
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Telemetry took")]
    assert said == ["Telemetry took at most 1.62 ms of processor time a second of a task (ps:0 of b)."]
