"""DOES the lab measure what it says? Order, ratios, quartiles, verdicts, table; then real processes side by side."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from running_lab import running

from paceline.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TRAINING, UsageError
from paceline.lab import MATRICES, tables
from paceline.lab.matrices import overhead
from paceline.lab.measuring import starting
from paceline.lab.measuring.processes import Failed, Group, Process, Times
from paceline.lab.measuring.starting import Starter, find_peer
from paceline.lab.progress import Progress
from paceline.lab.results.result import ResultFile, provenance
from paceline.lab.run import Request, main, measure
from paceline.lab.scenario import Amounts, Kind, Matrix, Pair, Row, Scenario, Segment, only, pairs, plan, seconds_left
from paceline.lab.scripts import feeding
from paceline.launchers.ports import Reserved

ROWS = overhead.matrix().rows
LAB = [sys.executable, "-m", "paceline", "lab", "run", "overhead"]


# --- order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repetition", range(20))
def test_every_row_runs_once_between_two_runs_of_what_is_beside_it(repetition: int) -> None:
    segments = plan(ROWS, repetition, seed=0)
    measured = [segment.row for segment in segments if segment.row is not None]
    assert sorted(measured) == list(range(len(ROWS)))
    for at, segment in enumerate(segments):
        if segment.row is not None:
            row = ROWS[segment.row]
            assert segment.scenario == row.scenario
            assert segments[at - 1] == segments[at + 1] == Segment(row.beside)


def test_orders_differ_between_repetitions_and_repeat_with_the_seed() -> None:
    orders = [tuple(s.row for s in plan(ROWS, repetition, seed=3)) for repetition in range(7)]
    assert len(set(orders)) > 1
    assert orders == [tuple(s.row for s in plan(ROWS, repetition, seed=3)) for repetition in range(7)]
    assert orders != [tuple(s.row for s in plan(ROWS, repetition, seed=4)) for repetition in range(7)]


def test_a_ratio_is_to_the_mean_of_before_and_after() -> None:
    segments = [Segment("s"), Segment("a", 0), Segment("s"), Segment("b", 1), Segment("s")]
    assert pairs(segments, [100.0, 150.0, 200.0, 330.0, 240.0]) == [Pair(0, 150.0, 150.0), Pair(1, 330.0, 220.0)]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_row_of_which_a_part_failed_is_left_out(lost: int) -> None:
    times: list[float | None] = [1.0, 2.0, 1.0, 3.0, 1.0]
    times[lost] = None
    segments = [Segment("s"), Segment("a", 0), Segment("s"), Segment("b", 1), Segment("s")]
    assert [pair.row for pair in pairs(segments, times)] == ([] if lost == 2 else [1])


def test_time_left_counts_every_segment_that_remains() -> None:
    assert seconds_left([Segment("a"), Segment("a"), Segment("b")], {"a": 2.0, "b": 5.0}) == 9.0


# --- the matrix ---------------------------------------------------------------------------------------------------


def test_the_overhead_matrix_is_whole() -> None:
    matrix = overhead.matrix()
    names = [each.name for each in matrix.scenarios]
    assert len(set(names)) == len(names) == 12
    assert {name for row in matrix.rows for name in (row.scenario, row.beside)} == set(names)
    assert [row.bar for row in matrix.rows if row.bar] == [1.15, 1.30, 1.30, 1.65, 1.30, 2.0, 1.3]
    assert [row.aim for row in matrix.rows if row.aim] == [1.03, 1.10, 1.10, 1.15]
    assert sum(row.is_noise for row in matrix.rows) == 1


def test_only_keeps_the_noise_row_and_what_the_rows_need() -> None:
    small = only(overhead.matrix(), "OVER 1 ps")
    assert [row.scenario for row in small.rows] == [overhead.AGAIN, overhead.TWO_PS]
    assert {each.name for each in small.scenarios} == {
        overhead.SINGLE,
        overhead.AGAIN,
        overhead.ASYNC,
        overhead.TWO_PS,
    }


def test_every_segment_warms_up_first() -> None:
    for steps in (1, 5, 300, 10_000):
        for kind in Kind:
            untimed, timed = Amounts(steps=steps).of(kind)
            assert (untimed > 0 or kind is Kind.START) and timed > 0
    assert Amounts().warmup_steps >= 50


# --- numbers ------------------------------------------------------------------------------------------------------


def test_quartiles() -> None:
    values = [7.0, 1.0, 5.0, 3.0, 2.0, 6.0, 4.0]
    assert [tables.quantile(values, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)] == [1.0, 2.5, 4.0, 5.5, 7.0]
    assert tables.quantile([3.0], 0.25) == 3.0


def summary_of(*ratios: float, row: Row = ROWS[1]) -> tables.Summary:
    made = tables.summarise(row, [Pair(1, 200.0 * ratio, 200.0) for ratio in ratios])
    assert made is not None
    return made


def test_a_summary_takes_lower_quartiles_and_the_distance_between_quartiles() -> None:
    made = summary_of(1.1, 1.2, 1.3, 1.4, 1.5)
    assert (made.ratio, made.median, made.reps) == (1.2, 1.3, 5)
    assert made.spread == pytest.approx(0.2)
    assert (made.us, made.beside_us, made.least, made.most) == (240.0, 200.0, 1.1, 1.5)
    assert made.quotient == pytest.approx(1.2)
    assert tables.summarise(ROWS[0], []) is None


@pytest.mark.parametrize(
    ("ratio", "told"),
    [
        (1.03, "aim reached"),
        (1.04, "within the bar"),
        (1.15, "within the bar"),
        (1.16, "within bar + A/A spread"),
        (1.21, "OVER THE BAR"),
    ],
)
def test_verdicts(ratio: float, told: str) -> None:
    assert tables.verdict(ROWS[1], summary_of(ratio), noise=0.05) == told


def test_a_noisy_machine_gets_no_verdict() -> None:
    assert tables.verdict(ROWS[1], summary_of(0.9), noise=0.26) == "too noisy to say (A/A spread 0.26)"
    assert tables.verdict(ROWS[1], summary_of(0.9), 0.01, others=0.5) == "too noisy to say (others used 0.50 cores)"
    assert tables.verdict(ROWS[0], summary_of(0.9), noise=0.26) == "-"


def test_the_noise_is_that_of_the_a_a_row_alone() -> None:
    noisy, calm = summary_of(1.0, 3.0), summary_of(0.98, 1.02, row=ROWS[0])
    assert tables.noise_of(ROWS[:2], [calm, noisy]) == pytest.approx(0.02)
    assert tables.noise_of(ROWS[:2], [None, noisy]) == 0.0


def test_the_table_says_what_failed_and_why() -> None:
    rows = ROWS[:3]
    made = tables.cells(rows, [summary_of(1.0, row=rows[0]), None, None], {rows[1].scenario: "worker:0 burned"})
    assert [line[0] for line in made] == [row.title for row in rows]
    assert made[0][3] == "1.000" and made[0][-1] == "-"
    assert made[1][1:] == ("-", "-", "-", "-", "-", "1.15", "1.03", "failed: worker:0 burned")
    assert made[2][-1] == "not measured"
    half = tables.cells(rows[1:2], [summary_of(1.1)], {rows[1].scenario: "it burned"})
    assert half[0][-1] == "within the bar (1 repetitions, then failed: it burned)"


def test_the_plain_table_is_aligned() -> None:
    lines = tables.plain(tables.COLUMNS, tables.cells(ROWS, [None] * len(ROWS), {})).splitlines()
    assert len(lines) == 1 + len(ROWS)
    assert lines[0].split() == ["configuration", "step", "µs", "beside", "µs", *tables.COLUMNS[3:]]
    assert len({line.index(last) for line, last in zip(lines[1:], ["not measured"] * 10, strict=True)}) == 1


# --- refusals -----------------------------------------------------------------------------------------------------


def test_an_unknown_matrix_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    known = rf"\(valid: {', '.join([*MATRICES, 'soak'])}\)"
    with pytest.raises(UsageError, match=rf"no matrix 'overheads'; did you mean 'overhead'\? {known}"):
        main(Request(matrix="overheads", out=str(tmp_path / "x")))
    assert {"overhead", "modes", "apply", "safety", "accuracy", "budget"} <= set(MATRICES)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("amounts", [{"reps": 0}, {"steps": 0}])
def test_nothing_to_measure_is_refused(amounts: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        main(Request(matrix="overhead", **amounts))


@pytest.mark.parametrize(("matrix", "first"), [("overhead", "A/A"), ("modes", "async, 1 worker"), ("apply", "update")])
def test_only_with_a_text_that_no_line_has_is_refused(matrix: str, first: str) -> None:
    with pytest.raises(UsageError, match=f"'nobody' in its title; there is: {first}"):
        main(Request(matrix=matrix, only="nobody"))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="No results can be written"):
        main(Request(matrix="overhead", out=str(tmp_path / "file")))


# --- processes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    made.kill()


def add(group: Group, tmp_path: Path, code: str, runs_along: bool = False) -> Process:
    log = tmp_path / f"{len(group.processes)}.log"
    command = [sys.executable, "-c", code]
    process = Process(f"p{len(group.processes)}", command, {}, log, speaks=True, runs_along=runs_along)
    group.processes.append(process)
    return process


def soon() -> float:
    return time.monotonic() + 20


def test_a_process_that_fails_says_why(group: Group, tmp_path: Path) -> None:
    add(group, tmp_path, "raise ValueError('no such luck')")
    with pytest.raises(Failed, match=r"p0 failed with exit code 1 \(ValueError: no such luck\); its log: .*0\.log"):
        group.await_ready(soon())


def test_a_peer_that_is_missing_says_so(group: Group, tmp_path: Path) -> None:
    add(group, tmp_path, 'print(\'{"missing": "no gloo"}\')')
    with pytest.raises(Failed, match="missing: no gloo"):
        group.await_ready(soon())


def test_a_word_where_a_number_belongs_is_refused(group: Group, tmp_path: Path) -> None:
    add(group, tmp_path, "print('hello')")
    with pytest.raises(Failed, match="p0 said b'hello'"):
        group.await_ready(soon())


def test_all_run_at_once_and_end_with_their_stdin(group: Group, tmp_path: Path) -> None:
    code = (
        "import os,sys; print('{}', flush=True)\nfor line in sys.stdin: print('{\"us\": %d}' % len(line), flush=True)"
    )
    add(group, tmp_path, code)
    add(group, tmp_path, code)
    group.await_ready(soon())
    assert group.run(1, 20, limit_s=20.0) == Times(us=[5.0, 5.0])
    assert group.end(within_s=20.0) == []


def test_one_that_runs_along_is_stopped_when_the_others_are_done(group: Group, tmp_path: Path) -> None:
    """The real other side of the protocol, with steps that only count."""
    code = (
        "from paceline.lab.scripts.orders import Orders; orders = Orders(); done = []\n"
        "def steps(count): done.extend(range(count)); print('steps', len(done), flush=True)\n"
        "orders."
    )
    add(group, tmp_path, code + "obey(steps)")
    add(group, tmp_path, code + "run_along(steps)", runs_along=True)
    group.await_ready(soon())
    for _ in range(3):
        times = group.run(2, 3, limit_s=20.0)
        assert len(times.us) == len(times.along_us) == 1 and times.us[0] > 0 and times.along_us[0] > 0
    assert group.end(within_s=20.0) == []
    assert group.processes[0].log.read_text().split()[-1] == "15"
    assert int(group.processes[1].log.read_text().split()[-1]) >= 3


def test_the_peer_is_found_in_the_clone_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_peer("ddp_gloo")
    assert found is not None and len(found.read_text().splitlines()) < 150
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starting, "__file__", str(tmp_path / "starting.py"))
    assert find_peer("ddp_gloo") is None
    (tmp_path / "bench" / "peers").mkdir(parents=True)
    (tmp_path / "bench" / "peers" / "ddp_gloo.py").touch()
    assert find_peer("ddp_gloo") == tmp_path / "bench" / "peers" / "ddp_gloo.py"


def test_a_failing_scenario_does_not_stop_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With carriers, which need no torch: one that works, one that cannot start, a peer that is not there."""
    scenarios = (
        Scenario(name="copy", kind=Kind.CARRIER, what="memcpy"),
        Scenario(name="copy again", kind=Kind.CARRIER, what="memcpy"),
        Scenario(name="echo", kind=Kind.CARRIER, what="socket"),
        Scenario(name="burning", kind=Kind.CARRIER, what="fire"),
        Scenario(name="peer", kind=Kind.PEER, what="nobody"),
    )
    rows = tuple(Row(title=each.name, scenario=each.name, beside="copy") for each in scenarios[1:])
    amounts = Amounts(reps=2, steps=1, carrier_bytes=64_000)
    matrix = Matrix(name="small", scenarios=scenarios, rows=rows, amounts=amounts)
    results = ResultFile(tmp_path / "now")
    results.begin(provenance("small", amounts, 0.0))
    try:
        assert measure(matrix, tmp_path / "now", results, Progress()) == EXIT_TRAINING
    finally:
        results.close()
    printed = capsys.readouterr().out
    assert "burning: burning failed with exit code 2" in printed
    lines = [json.loads(line) for line in results.path.read_text().splitlines()]
    assert {line["title"] for line in lines if line["kind"] == "row"} == {"copy again", "echo"}
    assert {line["scenario"] for line in lines if line["kind"] == "failed"} == {"burning", "peer"}
    assert lines[0]["kind"] == "provenance" and lines[0]["cores"] >= 1 and lines[0]["settings"]["reps"] == 2
    assert not [child for child in psutil.Process().children(recursive=True) if "paceline.lab" in " ".join(cmd(child))]


def cmd(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


NIGHTLY = pytest.mark.nightly("a kind of row that the lab cannot measure any more, or another signal that leaves some")


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("text", "rows"), [("1 worker, shm", 2), pytest.param("40 MB", 3, marks=NIGHTLY)])
def test_a_tiny_run_from_start_to_table(text: str, rows: int, tmp_path: Path) -> None:
    command = [*LAB, "--reps", "1", "--steps", "5", "--quick", "--only", text, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict" in done.stdout and "failed" not in done.stdout
    (path,) = tmp_path.glob("*/results.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len([line for line in lines if line["kind"] == "row"]) == rows
    assert all(line["us"] for line in lines if line["kind"] == "segment")
    assert "did not end" not in done.stdout


@pytest.mark.slow
def test_a_feeder_says_where_its_time_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    feeder = Scenario(name="feeder", kind=Kind.IN_GRAPH, num_workers=2)
    rows = (Row(title="A/A", scenario="feeder", beside="feeder", is_noise=True),)
    amounts = Amounts(reps=1, steps=5, warmup_steps=1)
    matrix = Matrix(name="small", scenarios=(feeder,), rows=rows, amounts=amounts)
    results = ResultFile(tmp_path / "now")
    try:
        assert measure(matrix, tmp_path / "now", results, Progress()) == EXIT_OK
    finally:
        results.close()
    printed = capsys.readouterr().out
    assert re.search(r"^feeder( +\d+){7}  \d+ %$", printed, re.M) and "did not end" not in printed, printed
    measured = [json.loads(line) for line in results.path.read_text().splitlines() if '"segment"' in line]
    assert len(measured) == 3
    for line in measured:
        assert tuple(line["parts"]) == feeding.PARTS and min(line["parts"].values()) > 0
        assert sum(line["parts"].values()) == pytest.approx(line["us"][0], rel=0.05), "the parts are the step"


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=NIGHTLY)])
def test_interrupting_leaves_nothing_running(number: signal.Signals, tmp_path: Path) -> None:
    command = [*LAB, "--reps", "1000", "--only", "1 worker, shm", "--out", str(tmp_path)]
    with running(command) as lab:
        assert lab.stdout is not None
        for line in lab.stdout:
            if line.startswith("overhead: repetition"):
                break
        started = psutil.Process(lab.pid).children(recursive=True)
        assert len(started) >= 4
        lab.send_signal(number)
        rest = lab.stdout.read()
        assert lab.wait(timeout=60) == EXIT_INTERRUPTED
    assert "Interrupted" in rest and "Results: " in rest
    assert not [process for process in started if process.is_running()]


@pytest.mark.parametrize("kind", [Kind.START, Kind.TOWERS])
def test_what_starts_its_own_workers_is_one_process(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them would be two clusters at once, each slower for the other."""
    commands: list[list[str]] = []

    def noted(name: str, command: list[str], *_: object, **__: object) -> None:
        commands.append(command)

    monkeypatch.setattr("paceline.lab.measuring.starting.Process", noted)
    scenario = Scenario(name="start", kind=kind, what="run", num_ps=1, num_workers=2)
    with Reserved() as ports:
        Starter(tmp_path, tmp_path, 0, ports).start(scenario, Group())
    (command,) = commands
    assert command[-1] == "2", "so many workers, or towers"
