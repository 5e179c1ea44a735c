"""A report is one page that needs no network, escapes what users named, and draws only what was measured."""

import builtins
import json
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.lab.cells import Worker
from paceline.lab.results import plots, reading, report, series
from paceline.lab.results.drawables import Bars, Group, Line, Lines
from paceline.lab.results.lines import Measured, Result
from paceline.lab.scripts.watched import Look, Watched
from paceline.telemetry.records import SplitMs
from paceline.telemetry.usage import Net

RESULTS = Path(__file__).parents[2] / "docs" / "results"
NASTY = "<script>alert('x')</script> & $x_1$"


class Checked(HTMLParser):
    """Counts tags; notes everything that a browser would fetch, and ids that are there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href", "xlink:href") and not str(value).startswith("#"):
                self.fetched.append(str(value))

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(page: Path) -> Checked:
    parser = Checked()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser


def nasty_run(folder: Path) -> Path:
    """Everything a result can have, with names that no page may take literally."""
    origin = {"kind": "provenance", "matrix": NASTY, "date": "2026-11-16", "paceline": "0.1.0", "cores": 2}
    lines: list[Mapping[str, object]] = [origin]
    for count in (1, 2):
        split = {"data": 0.1, "compute": 0.8, "exchange": 0.1, "wait": 0.0}
        worker = {"steps": 100, "step_ms": {"median": 1.0, "p95": 2.0}, "samples_per_s": 100.0, "split_ms": split}
        pair = {"ps": "ps:0", "lane": "tcp", "pushed_bytes": 1000, "pulled_bytes": 1000}
        names = [f"worker:{n}" for n in range(count)]
        gpu = {"index": 0, "busy_percent": {"mean": 30.0, "peak": 60.0}}
        lines.append({
            "kind": "cell", "table": NASTY, "title": f"{NASTY}, {count} workers",
            "command": ["paceline", "run", "--workers", str(count)],
            "line": {"what": NASTY, "workers": str(count), "remark": ""},
            "workers": [{"index": n, **worker} for n in range(count)],
            "ps": [{"index": 0, "updates": 100, "apply_ms": 0.1, "staleness": {"0": {"0": 5, "1": 3}}}],
            "told": {"points": [{"at_s": 1.0, "updates": 10, "accuracy": 0.5}, {"at_s": 2.0, "accuracy": 0.6}]},
            "tasks": [{"name": name, "cpu_cores": 0.5, "peak_memory_mb": 9.0, "gpus": [gpu]} for name in names],
            "pairs": [{"worker": name, **pair} for name in names],
        })  # fmt: skip
    lines.append({"kind": "failed", "scenario": "3 workers", "cause": f"it said {NASTY}"})
    folder.mkdir(parents=True)
    path = folder / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_report_is_one_page_that_fetches_and_runs_nothing(tmp_path: Path) -> None:
    nasty_run(tmp_path / "run")
    page = report.write(tmp_path / "run")
    seen = checked(page)
    assert page == tmp_path / "run" / "report.html"
    assert "script" not in seen.tags and "img" not in seen.tags and "link" not in seen.tags
    assert seen.fetched == [] and "@import" not in page.read_text()
    assert len(seen.ids) == len(set(seen.ids)), "pictures in one page must not share ids"
    assert NASTY in seen.text, "what was named is shown as it was written"
    assert f"failed: it said {NASTY}" in seen.text and "limits" in seen.text
    names = {path.stem.rpartition("-")[2] for path in (tmp_path / "run" / "pictures").glob("*.svg")}
    assert names == {"time", "updates", "scaling", "efficiency", "step", "staleness", "cpu", "memory", "gpu", "network"}
    assert {path.stem for path in page.parent.glob("pictures/*.svg")} == {
        path.stem for path in page.parent.glob("pictures/*.png")
    }
    assert seen.tags["svg"] == len(names)


def test_without_matplotlib_the_tables_are_there_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: object, **more: object) -> object:
        if name == "paceline.lab.results.plots":
            raise ImportError("No module named 'matplotlib'")
        return real(name, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    nasty_run(tmp_path / "run")
    seen = checked(report.write(tmp_path / "run"))
    assert "pip install 'paceline[lab]'" in seen.text and seen.tags["table"] == 2 and "svg" not in seen.tags


def test_a_run_without_a_result_gets_a_sentence(tmp_path: Path) -> None:
    assert report.told(tmp_path).startswith("There is no report: There is no result in")


def test_the_verb_writes_beside_the_run_or_where_it_is_told(tmp_path: Path) -> None:
    source = RESULTS / "overhead-20261115.jsonl"
    told = CliRunner().invoke(app, ["lab", "report", str(source), "--to", str(tmp_path / "x")])
    assert told.exit_code == 0 and told.output.strip() == str(tmp_path / "x" / "report.html")
    assert (tmp_path / "x" / "pictures" / "ratios.png").stat().st_size > 1000
    path = tmp_path / "mine-1" / "results.jsonl"
    path.parent.mkdir()
    path.write_bytes((RESULTS / "soak-20261115.jsonl").read_bytes())
    told = CliRunner().invoke(app, ["lab", "report", str(path)])
    assert Path(told.output.strip()) == path.parent / "report.html"


def test_no_two_pictures_have_one_name() -> None:
    tables = ["x" * 70 + "a", "x" * 70 + "b", "y z", "y+z"]
    split = SplitMs(0.1, 0.8, 0.1, 0.0)
    cells = [
        Measured(table=table, title="t", command=(), line={}, workers=[Worker(index=0, split_ms=split)])
        for table in tables
    ]
    names = [picture.name for picture in series.pictures(Result(path=Path("x"), origins=[], cells=cells))]
    assert len(names) == len(set(names)) == 4


def test_a_watched_run_is_drawn_over_time() -> None:
    looks = [
        Look(at_s=at, cores={"ps:0": 0.1, "worker:0": at}, hosts=[Net(loopback_bytes=int(2e6 * at))])
        for at in (0.0, 0.5, 1.0)
    ]
    told = msgspec.Raw(msgspec.json.encode(Watched(looks=looks, wall_s=1.0)))
    cells = [Measured(table="t", title=name, command=(), line={}, told=told) for name in ("a", "b")]
    first, second, both = series.pictures(Result(path=Path("x"), origins=[], cells=cells))
    assert isinstance(first, Lines) and first.title == "Processor over time: a" and first.name != second.name
    assert first.lines == (Line("ps:0", (0.0, 0.5, 1.0), (0.1, 0.1, 0.1)), Line("worker:0", *[(0.0, 0.5, 1.0)] * 2))
    assert isinstance(both, Lines) and both.lines == (
        Line("a", (0.5, 1.0), (2.0, 2.0)),
        Line("b", (0.5, 1.0), (2.0, 2.0)),
    )


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("accuracy-20261116", {"epoch", "updates"}),
        ("in-graph-20261116", {"ratios", "parts"}),
        ("modes-slowed-20261115", {"time", "updates"}),
        ("scale-20261116-quick", {"pushes"}),
        ("soak-20261115", set()),
    ],
)
def test_only_what_was_measured_is_drawn(name: str, kinds: set[str]) -> None:
    made = series.pictures(reading.read(RESULTS / f"{name}.jsonl"))
    assert {picture.name.rpartition("-")[2] for picture in made} == kinds


def test_epochs_stand_beside_the_documents() -> None:
    (bars,) = (
        each
        for each in series.pictures(reading.read(RESULTS / "accuracy-20261116.jsonl"))
        if isinstance(each, Bars) and each.name.endswith("epoch")
    )
    measured, document = bars.groups
    at = bars.categories.index("1 ps + 2 workers, async")
    assert document.values[at] == 5.45 and 0 < (measured.values[at] or 0) < 5.45


QUICK = "seeds-20261116-quick"  # as it was written before its scripts told their course and their batch


def drawn(name: str, what: str) -> Lines | Bars:
    made = series.pictures(reading.read(RESULTS / f"{name}.jsonl"))
    return next(each for each in made if each.name.endswith(what))


def test_epochs_of_a_quick_run_are_compared_as_ratios_on_two_hosts_too() -> None:
    made = series.pictures(reading.read(RESULTS / f"{QUICK}.jsonl"))
    assert not any(each.title.startswith("Time of an epoch") for each in made), "55 batches beside 550"
    bars = drawn(QUICK, "epoch-over-single")
    assert isinstance(bars, Bars)
    document = dict(zip(bars.categories, bars.groups[1].values, strict=True))
    assert document["two hosts: 1 ps + 2 workers, async"] == pytest.approx(5.2 / 1.3)
    assert document["two hosts: 1 ps + 3 workers, async"] == pytest.approx(18.1 / 3 / 1.3)
    assert document["two hosts: 1 ps + 2 workers, sync"] is None and bars.mark == 1.0
    assert "single process" not in bars.categories


def test_samples_a_second_are_known_from_steps_batch_and_time() -> None:
    scaling, efficiency = drawn(QUICK, "scaling"), drawn(QUICK, "efficiency")
    assert isinstance(scaling, Lines) and isinstance(efficiency, Lines)
    assert [line.label for line in scaling.lines] == ["1 ps, async", "1 ps, sync"]
    one = 100 / (1.024253479263941 + 0.18150639510052066 + 0.07104136854468379) * 1e3
    assert [line.x for line in scaling.lines] == [(1.0, 2.0)] * 2 and scaling.lines[1].y[0] == pytest.approx(one)
    assert efficiency.lines[0].y == (1.0, pytest.approx(scaling.lines[0].y[1] / (2 * one)))


def test_a_script_that_tells_its_course_is_drawn_against_time_and_updates() -> None:
    course = [{"at_s": float(n), "updates": 10 * n, "accuracy": 0.1 * n} for n in (1, 2, 3)]
    end = {"updates": 30, "accuracy": 0.3, "digest": "x"}
    told = msgspec.Raw(msgspec.json.encode({"points": [end], "course": course}))
    cell = Measured(table="t", title="a", command=(), line={}, told=told)
    against = {each.name: each for each in series.pictures(Result(path=Path("x"), origins=[], cells=[cell]))}
    time, updates = against["t-accuracy-time"], against["t-accuracy-updates"]
    assert isinstance(time, Lines) and time.lines[0].x == (1.0, 2.0, 3.0)
    assert isinstance(updates, Lines) and updates.lines[0].x == (10.0, 20.0, 30.0)


def test_a_process_alone_stands_beside_the_runs_of_each_number_of_workers() -> None:
    told = msgspec.Raw(b'{"course": [{"at_s": 1.0, "updates": 1, "accuracy": 0.1}]}')
    alone = Measured(table="t", title="alone", command=(), line={}, told=told)
    many = [
        Measured(table="t", title=f"run {n}", command=(), line={}, told=told, workers=[Worker(index=0)] * (1 + n % 2))
        for n in range(10)
    ]
    made = series.pictures(Result(path=Path("x"), origins=[], cells=[alone, *many]))
    crowds = {each.title: [line.label for line in each.lines] for each in made if isinstance(each, Lines)}
    assert {title: labels[0] for title, labels in crowds.items() if " time: " in title} == {
        "Accuracy against time: t, 1 worker": "alone", "Accuracy against time: t, 2 workers": "alone",
    }  # fmt: skip
    assert all(len(labels) == len(set(labels)) == 6 for labels in crowds.values())


def test_pushes_of_null_workers_are_drawn_for_each_load_and_told_in_words() -> None:
    picture = drawn("scale-20261116-quick", "1-MB-pushes")
    assert isinstance(picture, Lines) and picture.is_doubled
    assert [line.label for line in picture.lines] == ["shm, 1 ps", "shm, 2 ps", "tcp, 1 ps", "grpc, 1 ps"]
    assert picture.lines[0].x == (1.0, 4.0, 16.0) and round(picture.lines[0].y[0]) == 4057
    shown = CliRunner().invoke(app, ["lab", "show", str(RESULTS / "scale-20261116-quick.jsonl")]).output
    text = " ".join(shown.split())
    assert "1 MB, shm: With 1 ps more than 1 worker does not pay: at most 4037 pushes/s" in text
    assert "a second ps pays: 1.26 times as many pushes/s" in text and "a second ps does not pay: 0.74 times" in text
    page = report.page(reading.read(RESULTS / "scale-20261116-quick.jsonl"), [])
    assert "With 1 ps more than 4 workers do not pay" in page and "the 2 cores of one machine" in page


@pytest.mark.parametrize(
    "picture",
    [
        Lines(name="l", title="t", x_label="s", y_label="y", lines=(Line("_a $x$", (1.0, float("nan")), (2.0, 3.0)),)),
        Bars(name="b", title="t", unit="u", categories=("x" * 90, "y"), groups=(Group("g", (None, 3.0)),)),
        Bars(name="m", title="t", unit="u", categories=tuple(map(str, range(99))), groups=(Group("g", (1.0,) * 99),)),
    ],
    ids=["not finite, odd names", "not measured, a long name", "more than fit"],
)
def test_odd_numbers_and_names_are_drawn(picture: Lines | Bars) -> None:
    text = plots.svg(picture)
    assert text.startswith("<svg") and text == plots.svg(picture), "the same picture is the same text"


def test_axes_of_lines_that_end_far_apart_have_plain_numbers() -> None:
    lines = (Line("a", (0.3, 0.9), (0.0, 1.0)), Line("b", (0.3, 9.0), (0.0, 1.0)))
    text = plots.svg(Lines(name="l", title="t", x_label="s", y_label="y", lines=lines))
    assert plots.is_wide(lines) and "mathdefault" not in text and ">0.5<" in text
