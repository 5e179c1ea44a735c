"""Results are found, read and told again: also old ones, cut ones, and never what is none."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.errors import UsageError
from paceline.lab.results import comparing, facts, flat, reading, telling
from paceline.lab.results.limits import verdict
from paceline.lab.scripts.watched import Watched
from paceline.telemetry.limit import Limit

RESULTS = Path(__file__).parents[2] / "docs" / "results"
COMMITTED = sorted(RESULTS.glob("*.jsonl"))
ORIGIN = {
    "kind": "provenance", "matrix": "mine", "date": "2026-11-16T02:00:00+0000", "paceline": "0.1.0", "commit": "a" * 40,
    "is_changed": False, "torch": "2.13.0", "python": "3.11.7", "system": "Linux", "cpu": "EPYC", "cores": 2,
    "load": [0, 0, 0], "settings": {"reps": 7, "seed": 0},
}  # fmt: skip
FIRST = "2 workers"
CARRIED = {"carrier_bytes": 40_000_000}
SOCKET = {"kind": "segment", "repetition": 0, "at": 0, "scenario": "raw socket", "us": [80_000.0]}  # 1 GB/s


def cell(title: str = FIRST, line: Mapping[str, str] | None = None, **more: object) -> dict[str, object]:
    shown = {"mode": "async", "step ms": "2.0", "remark": ""} | dict(line or {})
    command = ["paceline", "run", "--workers", "1", "-m", "x"]
    left = {"workers": [], "ps": [], "staleness": {"mean": None, "p95": None}, "global_step": 3, "told": {}}
    return {"kind": "cell", "table": "Runs", "title": title, "command": command, "line": shown, **left, **more}


def row(title: str, ratio: float, spread: float = 0.01) -> dict[str, object]:
    times = {"us": 100 * ratio, "beside_us": 100.0, "ratio": ratio, "median": ratio, "spread": spread}
    rest = {"least": ratio, "most": ratio, "quotient": ratio, "verdict": "-"}
    return {"kind": "row", "title": title, "reps": 7, **times, **rest}


def write(path: Path, *lines: Mapping[str, object], end: str = "\n", **origin: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(line) for line in [{**ORIGIN, **origin}, *lines]) + end)
    return path


# --- where ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_committed_result_is_read_and_told(path: Path) -> None:
    result = reading.read(path)
    told = telling.sections(result)
    assert told and all(section.lines for section in told)
    assert all(len(line) == len(section.columns) for section in told for line in section.lines)


def test_a_result_is_found_by_file_folder_and_matrix_in_both_layouts(tmp_path: Path) -> None:
    old = write(tmp_path / "results-20261116-010000.jsonl", date="2026-11-16T01:00:00+0000")
    (tmp_path / "20261116-010000").mkdir()
    newer = write(tmp_path / "mine-20261116-020000" / "results.jsonl")
    write(tmp_path / "other-1" / "results.jsonl", matrix="other", date="2026-11-17T00:00:00+0000")
    assert reading.find(str(old)) == old
    assert reading.find(str(tmp_path / "20261116-010000")).resolve() == old
    assert reading.find(str(newer.parent)) == newer
    assert reading.find("mine-20261116-020000", tmp_path) == newer
    assert reading.find("mine", tmp_path) == newer, "the newest of that matrix"
    assert [origin.matrix for _, origin in reading.listed(tmp_path)] == ["other", "mine", "mine"]


def test_what_is_not_there_is_refused_with_what_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none at all"):
        reading.find("mine", tmp_path)
    write(tmp_path / "mine-1" / "results.jsonl")
    with pytest.raises(UsageError, match="did you mean 'mine'"):
        reading.find("mime", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="There is no result in"):
        reading.find(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# a page\n", "no result of the lab: line 1"),
        ("", "no result of the lab"),
        ('{"kind":"row"}\n', "does not say where the numbers come from"),
        (json.dumps(ORIGIN) + '\n{"kind":"row","title":7}\n', "a format that this version does not know: line 2"),
    ],
)
def test_what_is_no_result_is_refused_in_a_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=says):
        reading.read(path)


# --- what -------------------------------------------------------------------------------------------------------------


def test_a_cut_line_an_unknown_kind_and_what_was_measured_again(tmp_path: Path) -> None:
    failed = {"kind": "failed", "scenario": FIRST, "cause": "it ended"}
    again = [cell("other", {"step ms": "9"}), failed, cell("other", {"step ms": "3"}), cell(), {"kind": "news"}]
    path = write(tmp_path / "results.jsonl", *again, end='\n{"kind":"cell","tab')
    result = reading.read(path)
    assert result.num_cut == 1 and result.unknown == ["news"]
    assert [each.line["step ms"] for each in result.cells] == ["3", "2.0"], "the last one of each counts"
    assert not result.failures, "it went well when the run went on"
    assert any("cut off" in text for text in telling.warnings(result))


def test_a_failure_is_told_in_its_table_with_its_cause(tmp_path: Path) -> None:
    failed = {"kind": "failed", "scenario": "3 workers", "cause": "worker:2 ended"}
    missing = {"kind": "failed", "scenario": "4 workers", "cause": "skipped: no memory"}
    result = reading.read(write(tmp_path / "results.jsonl", cell(), failed, missing))
    (section,) = telling.sections(result)
    assert [line[0] for line in section.lines] == ["async", "3 workers", "4 workers"]
    assert [line[-1] for line in section.lines[1:]] == ["failed: worker:2 ended", "skipped: no memory"]


def test_a_scenario_that_failed_side_by_side_is_not_lost(tmp_path: Path) -> None:
    idle = {"kind": "idle", "cores": 0.0, "processes": 2}
    failed = {"kind": "failed", "scenario": "ray", "cause": "missing: no ray"}
    result = reading.read(write(tmp_path / "results.jsonl", cell(), idle, failed, row("A/A: x", 1.0)))
    assert telling.sections(result)[-1].lines == [("ray", "missing: no ray")]


def test_utilisation_in_a_line_becomes_facts(tmp_path: Path) -> None:
    worker = {"index": 0, "steps": 1000, "step_ms": {"median": 1.0, "p95": 2.0}}
    worker["split_ms"] = {"data": 0.1, "compute": 0.8, "exchange": 0.1, "wait": 0.0}
    pair = {"worker": "worker:0", "ps": "ps:0", "lane": "tcp", "pushed_bytes": 34 * 10**7, "pulled_bytes": 34 * 10**7}
    more = {
        "workers": [worker],
        "ps": [{"index": 0, "updates": 1000, "apply_ms": 0.1}],
        "tasks": [{"name": "worker:0", "cpu_cores": 0.9}, {"name": "ps:0", "cpu_cores": 0.2, "net": None}],
        "pairs": [pair],
    }
    result = reading.read(write(tmp_path / "results.jsonl", cell(**more), SOCKET, settings=CARRIED))
    known = facts.facts(result, result.cells[0])
    assert known.used_cores == pytest.approx(1.1) and known.machine_cores == 2
    assert known.ps[0].busy_share == pytest.approx(0.1)
    assert known.link_share == pytest.approx(0.68), "680 MB in a second, of what loopback carries"
    assert verdict(known).limit is Limit.COMPUTE
    looking = reading.read(write(tmp_path / "looking.jsonl", cell(**{**more, "pairs": [{**pair, "lane": "shm"}]})))
    assert facts.facts(looking, looking.cells[0]).ps[0].cores is None, "it looks for the next push, and may use a core"
    alone = reading.read(write(tmp_path / "alone.jsonl", cell(**more)))
    assert facts.facts(alone, alone.cells[0]).link_share is None, (
        "what a socket carries on that machine nobody measured"
    )


def test_a_cable_whose_rate_is_known_is_told_by_the_bytes_that_crossed_it() -> None:
    known = reading.read(RESULTS / "slow-link-20261116-quick.jsonl")
    told = {each.title: facts.facts(known, each) for each in known.cells}
    assert told["sync, free, 1"].cable is None, "of a cable that nobody limited nothing is known"
    slow = told["sync, 10mbit, 1"].cable
    assert slow is not None and (slow.rate, slow.behind) == ("10 Mbit/s", ("worker:2",)) and slow.share > 0.9
    assert {verdict(each).limit for title, each in told.items() if "10mbit" in title} == {Limit.LINK}
    limited = reading.read(RESULTS / "links-20261116-limited.jsonl")
    ((name, words),) = (pair for section in telling.sections(limited) for pair in section.words)
    assert name.endswith("100 Mbit/s") and words.startswith("Link limits: the bytes keep the cable of 100 Mbit/s busy")


def test_the_share_of_an_in_graph_client_is_known_from_its_parts(tmp_path: Path) -> None:
    client_us = {"pick": 100.0, "send": 300.0, "wait": 200.0, "update": 400.0}
    line = cell(workers=[{"index": 0}, {"index": 1}], ps=[], told={"points": [], "client_us": client_us})
    result = reading.read(write(tmp_path / "results.jsonl", line))
    assert facts.facts(result, result.cells[0]).client_share == pytest.approx(0.8)
    assert telling.limits(result, result.cells)[0][1].startswith("Client limits: it is busy 80 % of a step")


# --- what went on, what was tried again -------------------------------------------------------------------------------


def logged(run: Path, accuracy: float) -> None:
    """What a run leaves from which its curve is read."""
    (run / "telemetry").mkdir(parents=True)
    (run / "summary.json").write_text("{}")
    tick = {"t": 1.0, "kind": "tick", "task": "worker:0", "global_step": 5, "metrics": {"accuracy": accuracy}}
    (run / "telemetry" / "worker-0.jsonl").write_text(json.dumps(tick) + "\n")


def test_a_curve_is_that_of_the_run_which_the_line_names(tmp_path: Path) -> None:
    for name, accuracy in (("2-workers", 0.1), ("2-workers-2", 0.9), ("2-workers-3", 0.5)):
        logged(tmp_path / name, accuracy)
    lines = [cell(run="2-workers-2"), cell("2: workers", run="2-workers-3"), cell("2-workers"), cell("x", run="gone")]
    found = reading.read(write(tmp_path / "results.jsonl", *lines)).cells
    assert [[tick.accuracy for tick in each.ticks] for each in found] == [[0.9], [0.5], [0.1], []]


def test_groups_of_rows_do_not_overwrite_each_other(tmp_path: Path) -> None:
    titles = ("A/A: x", "mine")
    lines = []
    for group, mine in enumerate(titles):
        for at, (scenario, index) in enumerate([("alone", None), (f"{mine}, run", group), ("alone", None)]):
            segment = {"kind": "segment", "repetition": 0, "at": at, "scenario": scenario, "row": index, "us": [100.0]}
            lines.append({**segment, "group": group})
    old = reading.read(write(tmp_path / "results.jsonl", *lines, *(row(title, 1.5) for title in titles)))
    assert len(old.segments) == 6
    assert [(each.scenario, each.beside) for each in old.rows] == [
        ("A/A: x, run", "alone"), ("mine, run", "alone"),
    ]  # fmt: skip
    named = {**row("the same again", 1.0), "scenario": "again", "beside": "alone", "is_noise": True}
    new = reading.read(write(tmp_path / "new.jsonl", *lines, named))
    assert new.rows[0].is_noise and (new.rows[0].scenario, new.rows[0].beside) == ("again", "alone")
    assert new.noise == pytest.approx(0.01), "what the row says of itself counts, not its title"


def test_a_run_that_was_interrupted_in_a_repetition_is_read(tmp_path: Path) -> None:
    names = [("alone", None), ("mine", 0), ("alone", None), ("alone", None), ("mine", 0)]
    lines = [
        {"kind": "segment", "repetition": n // 3, "at": n % 3, "scenario": scenario, "row": index, "us": [100.0]}
        for n, (scenario, index) in enumerate(names)
    ]
    assert len(reading.read(write(tmp_path / "results.jsonl", *lines)).segments) == 5
    told = reading.read(write(tmp_path / "old.jsonl", *lines, row("mine", 1.0))).rows
    assert [(each.scenario, each.beside) for each in told] == [("mine", "alone")]


def test_what_failed_twice_is_told_once_and_what_ran_later_did_not_fail(tmp_path: Path) -> None:
    def failed(scenario: str, cause: str, **more: object) -> dict[str, object]:
        return {"kind": "failed", "scenario": scenario, "cause": cause, **more}

    def said(value: str) -> dict[str, object]:
        return {"kind": "verdicts", "table": "Together", "lines": [{"what": value, "remark": ""}]}

    ran = {"kind": "segment", "repetition": 1, "at": 0, "scenario": "ray", "row": 0, "us": [100.0]}
    before = [cell(), failed("3 workers", "first", table="Runs"), failed("ray", "it fell", table=""), said("2 runs")]
    after = [failed("3 workers", "then", table="Runs"), ran, said("3 runs")]
    result = reading.read(write(tmp_path / "results.jsonl", *before, *after))
    assert [(each.scenario, each.cause, each.table) for each in result.failures] == [("3 workers", "then", "Runs")]
    told = telling.sections(result)
    assert [section.title for section in told] == ["Together", "Runs"]
    assert told[0].lines == [("3 runs", "")], "what was said before the run went on is of fewer runs"
    parts = reading.read(write(tmp_path / "two.jsonl", *before, {**ORIGIN}, *after))
    assert telling.sections(parts)[0].lines == [("2 runs", ""), ("3 runs", "")], "two runs in one file: both count"
    gone = reading.read(write(tmp_path / "gone.jsonl", cell(), failed(FIRST, "later", table="Runs")))
    assert [each.cause for each in gone.failures] == ["later"], "a failure after a success is no less one"


# --- cards and bytes --------------------------------------------------------------------------------------------------


def used_cell() -> dict[str, object]:
    spread = {"mean": 30.4, "peak": 41.0}
    gpu = {"index": 1, "name": "GTX 1080", "power_w": spread, "power_limit_w": 180.0, "busy_percent": spread}
    gpu |= {"fan_percent": None, "temperature_c": spread, "memory_mib": spread, "memory_total_mib": 8114}
    net = {"outer_sent_bytes": 5, "outer_received_bytes": 6, "loopback_bytes": 7}
    pair = {"worker": "worker:0", "ps": "ps:0", "lane": "tcp", "pushed_bytes": 11, "pulled_bytes": 12}
    task = {"name": "worker:0", "cpu_cores": 0.9, "memory_mb": 80.0, "peak_memory_mb": 90.0, "net": net, "gpus": [gpu]}
    return cell(tasks=[task, {"name": "ps:0", "cpu_cores": 0.2}], pairs=[pair], seed=3)


def test_what_cards_did_is_in_a_table(tmp_path: Path) -> None:
    (_, section) = telling.sections(reading.read(write(tmp_path / "results.jsonl", used_cell(), cell("other"))))
    shown = dict(zip(section.columns, section.lines[0], strict=True))
    assert len(section.lines) == 1 and shown == {
        "run": FIRST, "task": "worker:0", "GPU": "gpu:1", "fan %": "-", "°C": "30 / 41", "W": "30 / 41 (180)",
        "MiB": "30 / 41 (8114)", "busy %": "30 / 41", "card": "GTX 1080",
    }  # fmt: skip


def test_tasks_cards_and_pairs_are_lines_of_the_spreadsheet(tmp_path: Path) -> None:
    text = flat.as_csv(reading.read(write(tmp_path / "results.jsonl", used_cell())))
    lines = {(row["kind"], row["task"]): row for row in csv.DictReader(text.splitlines())}
    assert list(lines) == [
        ("cell", ""),
        ("task", "worker:0"),
        ("card", "worker:0"),
        ("task", "ps:0"),
        ("pair", "worker:0"),
    ]
    worker, card, pair = lines["task", "worker:0"], lines["card", "worker:0"], lines["pair", "worker:0"]
    assert (worker["cpu_cores"], worker["peak_memory_mb"], worker["host loopback_bytes"]) == ("0.9", "90.0", "7")
    assert (card["card index"], card["card name"], card["card power_w mean"]) == ("1", "GTX 1080", "30.4")
    assert (card["card power_w peak"], card["card temperature_c peak"]) == ("41.0", "41.0")
    assert (pair["other task"], pair["ps"], pair["lane"], pair["pulled_bytes"]) == ("ps:0", "", "tcp", "12")
    assert {(row["title"], row["seed"], row["cpu"]) for row in lines.values()} == {(FIRST, "3", "EPYC")}


@pytest.mark.parametrize(
    ("name", "seeds", "repetitions"),
    [
        ("seeds-20261116-quick", "1", "1"),
        ("seeds-20261116-two-hosts-2-workers", "1; 2; 3; 4; 5", "1"),
        ("slow-link-20261116-quick", "", "1"),
        ("overhead-20261116", "", "7"),
    ],
)
def test_the_spreadsheet_says_which_seeds_and_how_many_repetitions(name: str, seeds: str, repetitions: str) -> None:
    rows = list(csv.DictReader(flat.as_csv(reading.read(RESULTS / f"{name}.jsonl")).splitlines()))
    assert {(row["seeds"], row["repetitions"]) for row in rows} == {(seeds, repetitions)}


# --- facts ------------------------------------------------------------------------------------------------------------


def busy_cell(told: object, data: float | None = 0.1, **more: object) -> dict[str, object]:
    split = {"data": data, "compute": 0.8, "exchange": 0.1, "wait": 0.0}
    worker = {"index": 0, "steps": 1000, "step_ms": {"median": 1.0, "p95": 2.0}, "waited_s": 0.5, "split_ms": split}
    ps = [{"index": 0, "updates": 1000, "apply_ms": 0.1}]
    return cell(workers=[worker], ps=ps, told=told, wall_s=5.0, **more)


def test_a_watched_run_is_not_taken_to_have_trained_from_its_first_process_on(tmp_path: Path) -> None:
    told = msgspec.to_builtins(Watched(wall_s=5.0, cpu_s={"ps:0": 1.0}))
    result = reading.read(write(tmp_path / "results.jsonl", busy_cell(told)))
    known = facts.facts(result, result.cells[0])
    assert known.ps[0].busy_share == pytest.approx(0.1), "of the second in which it trained, not of five"
    assert known.workers[0].step_ms == 1.0 and known.workers[0].wait_share == pytest.approx(0.5)
    assert known.start_share == pytest.approx(0.8) and not known.is_told, "a second of five, by its steps"


def test_how_long_a_script_trained_that_tells_nothing_is_the_mean_step_not_the_median(tmp_path: Path) -> None:
    split = {"data": 0.4, "compute": 0.3, "exchange": 0.3, "wait": 0.5}
    worker = {"index": 0, "steps": 80, "step_ms": {"median": 0.6, "p95": 4.9}, "waited_s": 0.06, "split_ms": split}
    pair = {"worker": "worker:0", "ps": "ps:0", "lane": "tcp", "pushed_bytes": 60 * 10**6, "pulled_bytes": 0}
    ps = [{"index": 0, "updates": 80, "apply_ms": 0.45}]
    line = cell(workers=[worker], ps=ps, pairs=[pair], tasks=[{"name": "ps:0", "cpu_cores": 0.01}], wall_s=3.5)
    result = reading.read(write(tmp_path / "results.jsonl", line, SOCKET, settings=CARRIED))
    known = facts.facts(result, result.cells[0])
    assert facts.trained_s(result.cells[0]) == pytest.approx(0.12)
    assert known.ps[0].busy_share == pytest.approx(0.3) and known.workers[0].wait_share == pytest.approx(0.5)
    assert known.link_share == pytest.approx(0.5) and known.num_steps == 80
    told = str(verdict(known))
    assert told.startswith("Launch, and what the script does beside its steps, take 97 %") and "ps CPU" not in told
    assert known.ps[0].cores is None, "of the whole run, so of its start and not of its steps"


def test_a_script_that_prepares_no_loader_has_its_data_in_compute(tmp_path: Path) -> None:
    result = reading.read(write(tmp_path / "results.jsonl", busy_cell({}, data=None)))
    told = str(verdict(facts.facts(result, result.cells[0])))
    assert told.partition(". ")[2].startswith("Worker compute limits: 89 % of a step is compute (with data)"), told


@pytest.mark.parametrize(
    ("scenario", "settings"),
    [("raw socket", {"carrier_bytes": 40_000_000}), ("40 MB there and back, socket", {"carrier_bytes": 5})],
)
def test_what_a_socket_carries_is_known_from_both_matrices_that_measure_it(
    scenario: str, settings: dict[str, int], tmp_path: Path
) -> None:
    segment = {"kind": "segment", "repetition": 0, "at": 0, "scenario": scenario, "us": [80_000.0]}
    result = reading.read(write(tmp_path / "results.jsonl", segment, settings=settings))
    assert facts.socket_speed(result) == pytest.approx(1e9)


# --- two of them ------------------------------------------------------------------------------------------------------


def test_a_difference_is_judged_by_the_noise_of_both(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", row("A/A: x", 1.0, 0.02), row("near", 1.10), row("far", 1.10), row("gone", 1.0))
    b = write(tmp_path / "b.jsonl", row("A/A: x", 1.0, 0.03), row("near", 1.14), row("far", 1.30), row("new", 1.0))
    told = comparing.compare(reading.read(a), reading.read(b))
    (section,) = told.sections
    assert {line[0]: line[-1] for line in section.lines} == {"near": comparing.NOISE, "far": comparing.MORE}
    assert told.only == ["only in A: gone", "only in B: new"] and told.num_equal == 1
    assert not told.unlike


def test_cells_are_compared_by_their_means_over_seeds(tmp_path: Path) -> None:
    def seeds(*values: str) -> list[dict[str, object]]:
        return [cell(f"async, seed {n}", {"step ms": value}) for n, value in enumerate(values)]

    a = reading.read(write(tmp_path / "a.jsonl", *seeds("1.0", "1.2"), cell("once", {"step ms": "5"})))
    b = reading.read(write(tmp_path / "b.jsonl", *seeds("2.0", "2.2"), cell("once", {"step ms": "6"})))
    (section,) = comparing.compare(a, b).sections
    assert section.lines[0] == ("async", "step ms", "1.1", "2.1", "+1", "+90.9 %", "0.4", comparing.MORE)
    assert section.lines[1][-1] == comparing.ONCE


def test_other_code_machine_or_settings_are_said_loudly(tmp_path: Path) -> None:
    a = reading.read(write(tmp_path / "a.jsonl", row("x", 1.0)))
    other = {"paceline": "0.2.0", "commit": "b" * 40, "cores": 4, "settings": {"reps": 3, "seed": 0}}
    b = reading.read(write(tmp_path / "b.jsonl", row("x", 1.0), **other))
    names = [text.partition(":")[0] for text in comparing.unlike(a, b)]
    assert names == ["version of paceline", "commit", "cores", "setting reps"]


# --- the verbs --------------------------------------------------------------------------------------------------------


def test_the_verbs_list_show_and_compare(tmp_path: Path) -> None:
    a = write(tmp_path / "mine-1" / "results.jsonl", cell(), row("A/A: x", 1.0))
    b = write(tmp_path / "mine-2" / "results.jsonl", cell(line={"step ms": "3.0"}), cores=4)
    run = CliRunner()
    listed = run.invoke(app, ["lab", "show", "--out", str(tmp_path)])
    assert listed.exit_code == 0 and str(a) in listed.output and str(b) in listed.output
    shown = run.invoke(app, ["lab", "show", str(a)])
    assert shown.exit_code == 0 and "processor: EPYC, 2 cores" in shown.output and "Runs\n" in shown.output
    compared = run.invoke(app, ["lab", "compare", str(a), str(b)])
    assert "NOT THE SAME: cores: 2 in A, 4 in B" in compared.output and "+50.0 %" in compared.output
    none = run.invoke(app, ["lab", "show", "--out", str(tmp_path / "nothing")])
    assert none.exit_code == 0 and "There are no results" in none.output
