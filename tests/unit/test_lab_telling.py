"""Results are told so that nobody is misled: in narrow terminals, of interrupted runs, of runs that are alike."""

import json
import os
import sys
from collections.abc import Mapping
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli import lab_results
from paceline.cli.main import app
from paceline.cluster import cores
from paceline.errors import UsageError
from paceline.lab import MATRICES, progress
from paceline.lab.results import comparing, reading, report, series, telling
from paceline.lab.results.lines import Result
from paceline.lab.results.result import provenance_of
from paceline.lab.results.telling import Section
from paceline.lab.tables import drawn, is_drawable

RESULTS = Path(__file__).parents[2] / "docs" / "results"
COLUMNS = ("configuration", "runs", "epoch 1 s", "epoch s", "step ms", "samples/s", "whole run s", "remark")
FIGURES = ("2", "0.098 (0.095-0.101)", "0.063 (0.048-0.078)", "0.674", "24956 (23026-26885)", "5.5 (5.2-5.8)")
LONG = "1 ps + 2 workers, async, shm, hidden 16"
TABLE = [(LONG, *FIGURES, ""), ("1 ps + 1 worker", *FIGURES, "failed: 2 of 3 runs: worker:0 failed with exit code 1")]


# --- narrow terminals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [TABLE, TABLE[:1], [("x" * 31, *FIGURES, "y " * 40), ("x", *FIGURES, "z" * 24)]])
def test_a_frame_that_is_drawn_cuts_no_word(table: list[tuple[str, ...]]) -> None:
    width = next(each for each in range(300) if is_drawable(COLUMNS, table, each))
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(drawn(COLUMNS, table))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert width < 170 and all(word in text for line in (COLUMNS, *table) for cell in line for word in cell.split())
    assert all(cell in text for line in table for cell in line[1:-1]), "numbers are not wrapped at all"


def narrow(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    """A terminal of 80 columns; what is printed comes back."""
    shown = StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", shown)
    for name, value in {"COLUMNS": "80", "LINES": "24", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CI", raising=False)
    return shown


def test_a_narrow_terminal_gets_every_configuration_by_lab_show(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = narrow(monkeypatch)
    lab_results._print(Section(title="mine", columns=COLUMNS, lines=TABLE))
    assert f"\n{LONG}  " in shown.getvalue()


def test_a_narrow_terminal_gets_every_configuration_by_lab_run(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = narrow(monkeypatch)
    measured = progress.Progress()
    measured.table("mine", COLUMNS, TABLE)
    measured.close()
    assert LONG in shown.getvalue()


# --- a run of a user's own matrix -------------------------------------------------------------------------------------

ORIGIN = {
    "kind": "provenance", "matrix": "spirals", "date": "2026-11-16", "paceline": "0.1.0", "cores": 2, "plan": "12ab",
    "settings": {"reps": 3, "steps": 300, "warmup_steps": 50, "carrier_bytes": 40_000_000, "seed": 0},
}  # fmt: skip
END = {"kind": "end"}
ALONE = "1 ps + 1 worker, async"


def write(folder: Path, *lines: Mapping[str, object], **origin: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [{**ORIGIN, **origin}, *lines]))
    return path


def ran(name: str, repetition: int = 0, workers: int = 1, step_ms: str = "2.0", **more: object) -> dict[str, object]:
    each = {"steps": 100, "step_ms": {"median": 1.0, "p95": 2.0}, "samples_per_s": 100.0, "epoch_s": 0.01}
    line = {"configuration": name, "step ms": step_ms, "logged": "-", "remark": ""}
    command = ["paceline", "run", "--workers", str(workers), "train.py"]
    told = {"table": "spirals", "title": f"{name}, repetition {repetition + 1}", "labels": [name], "command": command}
    told |= {"repetition": repetition, "line": line, "workers": [{"index": n, **each} for n in range(workers)]}
    return {"kind": "cell", **told, **more}


def together(name: str, ratio: str = "1.000", spread: str = "0.000") -> dict[str, object]:
    line = {"configuration": name, "runs": "3", "logged": "-", "ratio": ratio, "spread": spread, "remark": ""}
    return {"kind": "verdicts", "table": "spirals", "lines": [line]}


RUNS = [ran(name, n) for n in range(2) for name in (ALONE, f"A/A: {ALONE}")]
RUNS += [ran("1 ps + 2 workers, async", n, workers=2) for n in range(2)]


@pytest.mark.parametrize(("matrix", "has_epochs"), [("spirals", False), ("seeds", True), ("accuracy", True)])
def test_only_what_trains_as_document_000_does_is_drawn_beside_it(
    matrix: str, has_epochs: bool, tmp_path: Path
) -> None:
    made = series.pictures(reading.read(write(tmp_path, *RUNS, END, matrix=matrix)))
    assert any(picture.name.endswith("epoch") for picture in made) == has_epochs


def test_the_same_again_is_no_point_of_a_scaling_line(tmp_path: Path) -> None:
    (scaling,) = (
        each for each in series.pictures(reading.read(write(tmp_path, *RUNS, END))) if each.name.endswith("scaling")
    )
    assert isinstance(scaling, series.Lines) and [line.x for line in scaling.lines] == [(1.0, 2.0)]


@pytest.mark.parametrize(
    ("ratio", "spread", "is_said"), [("0.702", "0.1", True), ("1.0", "0.332", True), ("1.0", "0", False)]
)
def test_whole_runs_that_are_far_from_themselves_are_a_warning(
    ratio: str, spread: str, is_said: bool, tmp_path: Path
) -> None:
    result = reading.read(write(tmp_path, *RUNS, together(f"A/A: {ALONE}", ratio, spread), END))
    assert any("One process against itself was off by" in text for text in telling.warnings(result)) == is_said
    failed = reading.read(write(tmp_path, *RUNS, together(f"A/A: {ALONE}", "-", "-"), END))
    assert failed.noise is None


def test_runs_that_are_alike_are_told_apart_after_what_they_say_together(tmp_path: Path) -> None:
    first, runs = telling.sections(reading.read(write(tmp_path, *RUNS, together(ALONE), END)))
    assert (first.title, runs.title) == ("spirals", "spirals: every run")
    assert [line[0] for line in runs.lines[:2]] == [f"{ALONE}, repetition 1", f"A/A: {ALONE}, repetition 1"]
    assert len({line[0] for line in runs.lines}) == len(runs.lines) == 6
    assert runs.words[0][0] == f"{ALONE} (repetition 1)", "of which of them the words are"
    once = telling.sections(reading.read(write(tmp_path, ran(ALONE), END)))[0]
    assert once.lines[0][0] == ALONE and once.words[0][0] == ALONE, "where there is one, its name is enough"


def test_a_column_that_is_empty_in_every_line_is_left_out(tmp_path: Path) -> None:
    told = telling.sections(reading.read(write(tmp_path, *RUNS, together(ALONE), END)))
    assert all("logged" not in section.columns and section.columns[-1] == "remark" for section in told)
    logs = {"configuration": ALONE, "logged": "loss 2", "remark": ""}
    (section,) = telling.sections(reading.read(write(tmp_path, ran(ALONE), ran(ALONE, 1, line=logs), END)))
    assert section.columns == ("configuration", "step ms", "logged", "remark")


def test_the_cause_of_a_failure_has_the_place_of_what_was_not_measured(tmp_path: Path) -> None:
    failed = {"kind": "failed", "scenario": "3 workers", "cause": "worker:2 ended", "table": "spirals"}
    ranged = ran(ALONE, 7, step_ms="0.674 (0.664-0.685)")
    page = report.page(reading.read(write(tmp_path, *RUNS, ranged, failed, END)), [])
    assert '<td class="range">0.674 <span>(0.664-0.685)</span></td>' in page, "the brackets may stand below the number"
    assert (
        '<tr class="failed"><td class="text">3 workers</td><td colspan="2" class="text">failed: worker:2 ended' in page
    )


def test_settings_of_rows_are_not_told_of_whole_runs(tmp_path: Path) -> None:
    def settings(*lines: Mapping[str, object], **origin: object) -> str | None:
        return dict(telling.provenance(reading.read(write(tmp_path, *lines, END, **origin)))).get("settings")

    segment = {"kind": "segment", "repetition": 0, "at": 0, "scenario": "alone", "us": [100.0]}
    assert settings(*RUNS) == "reps 2" and "warmup_steps 50" in str(settings(segment))
    assert settings(*RUNS[:3:2], settings={"reps": 1, "steps": 300}) == "reps 2"


@pytest.mark.parametrize("name", ["seeds-20261116-two-hosts-3-workers", "watch-20261116-quick", "soak-20261115"])
def test_runs_that_ran_once_are_not_told_to_have_run_seven_times(name: str) -> None:
    result = reading.read(RESULTS / f"{name}.jsonl")
    assert "settings" not in dict(telling.provenance(result)) and result.origin.settings.get("reps") != 7


@pytest.mark.parametrize(("name", "reps"), [("watch", 1), ("slow-link", 3), ("overhead", 7)])
def test_a_new_result_says_how_often_its_cells_run(name: str, reps: int) -> None:
    assert provenance_of(MATRICES[name](False), 0.0).settings.reps == reps


def test_the_cores_of_a_result_are_those_of_the_containers_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert provenance_of(MATRICES["watch"](True), 0.0).cores == 1


# --- interrupted runs -------------------------------------------------------------------------------------------------


def test_a_run_that_was_interrupted_is_called_so_wherever_it_is_told(tmp_path: Path) -> None:
    half, whole = (
        write(tmp_path / "half", *RUNS),
        write(tmp_path / "whole", *RUNS, {"kind": "others", "cores": 0.0}, END),
    )
    older = write(tmp_path / "older", *RUNS, plan="")

    def told(path: Path) -> str:
        return " ".join(telling.warnings(reading.read(path)))

    assert "was not finished" in told(half) and "Nobody knows what other programs used" in told(half)
    assert not told(whole) and not told(older), "older files have no line for their end"
    assert "was not finished" in report.page(reading.read(half), [])
    listed = CliRunner().invoke(app, ["lab", "show", "--out", str(tmp_path)]).output.splitlines()
    assert [("not finished" in line) for line in listed if str(tmp_path) in line].count(True) == 1
    assert any("not finished" in line and str(half) in line for line in listed)


def segments(*runs: tuple[str, int | None, float | None]) -> list[dict[str, object]]:
    return [
        {"kind": "segment", "repetition": n // 5, "at": n % 5, "scenario": name, "row": row, "us": us and [us]}
        for n, (name, row, us) in enumerate(runs)
    ]


def test_rows_of_an_interrupted_run_are_made_of_its_segments(tmp_path: Path) -> None:
    whole = [("alone", None, 100.0), ("alone again", 0, 100.0), ("alone", None, 100.0), ("mine", 1, 300.0)]
    second = [("alone", None, 100.0), ("mine", 1, 200.0), ("alone", None, None), ("alone again", 0, 120.0)]
    measured = segments(*whole, ("alone", None, 200.0), *second)
    missing = {"kind": "failed", "scenario": "ray", "cause": "missing: no ray", "table": ""}
    broken = {"kind": "failed", "scenario": "rpc", "cause": "it ended", "table": ""}
    result = reading.read(write(tmp_path, missing, broken, *measured))
    assert [(row.title, row.ratio, row.beside, row.is_noise) for row in result.rows] == [
        ("A/A: alone", 1.0, "alone", True), ("mine", 2.0, "alone", False),
    ]  # fmt: skip
    told = {section.title: section.lines for section in telling.sections(result)}
    assert [line[-1] for line in told["Side by side"]] == ["not finished: 1 repetition"] * 2
    assert told["Missing"] == [("ray", "missing: no ray")] and told["Failed"] == [("rpc", "failed: it ended")]
    assert not reading.read(write(tmp_path, *measured, END)).rows, "a run that ended has said its rows itself"


# --- two of them ------------------------------------------------------------------------------------------------------


def test_what_must_be_known_of_either_is_said_when_two_are_compared(tmp_path: Path) -> None:
    busy = {"kind": "others", "cores": 1.6, "of": "runs", "group": 0}
    failed = {"kind": "failed", "scenario": "3 workers", "cause": "worker:2 ended", "table": "spirals"}
    a, b = write(tmp_path / "a", *RUNS, busy, END), write(tmp_path / "b", ran(ALONE, step_ms="9.0"), failed)
    told = CliRunner().invoke(app, ["lab", "compare", str(a), str(b)]).output
    assert "Mind: A: Other programs used 1.60 cores" in told and "Mind: B: This run was not finished" in told
    assert "In B 3 workers: failed: worker:2 ended" in told


def test_a_single_run_on_either_side_judges_nothing(tmp_path: Path) -> None:
    def of(folder: str, *values: str) -> Result:
        return reading.read(write(tmp_path / folder, *(ran(ALONE, n, step_ms=v) for n, v in enumerate(values)), END))

    twice, once, others = of("a", "1.0", "1.1"), of("b", "9.0"), of("c", "9.0", "9.1")
    for pair, so in (
        ((twice, once), comparing.ONCE),
        ((once, twice), comparing.ONCE),
        ((twice, others), comparing.MORE),
    ):
        assert comparing.compare(*pair).sections[0].lines[0][-1] == so


def test_a_spreadsheet_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("kind,matrix\n")
    with pytest.raises(UsageError, match=r"give results\.jsonl beside it, or their folder"):
        reading.find(str(tmp_path / "results.csv"))
