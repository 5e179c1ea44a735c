"""DOES `paceline lab run documents` judge rightly? Rows, looks and commands without a process; then with some."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from running_lab import running

from paceline.cluster.settings import LOG_STYLES, TF
from paceline.cluster.spec import ClusterSpec
from paceline.lab.cells import Finished, Runs
from paceline.lab.matrices import documents
from paceline.lab.matrices.document_rows import ROWS, Kind, Row
from paceline.lab.matrices.document_runs import RUNS, Command, How, Side, commands, pinned
from paceline.lab.matrices.documents import ALL, judge, verdict_lines
from paceline.lab.matrices.looks import (
    NO,
    OPEN,
    OTHER,
    YES,
    Ended,
    EpochTime,
    Judged,
    Number,
    Prints,
    Seen,
    Shares,
    Told,
)
from paceline.lab.matrices.wording import SAME, differences, words
from paceline.lab.measuring.processes import Failed, Process
from paceline.lab.measuring.starting import in_clone
from paceline.lab.scenario import Matrix, only
from paceline.lab.scripts import documents_script
from paceline.launchers.ports import Reserved
from paceline.telemetry import lines

EXAMPLES = Path(__file__).parents[2] / "examples"
LENGTHS = {"000": 264, "001": 159, "002": 228, "003": 119, "004": 157}  # lines of each document
BLOCKS = {  # the first lines of every code block of 001, 003, 004 that is a program
    "001": (84,),
    "003": (32, 50, 62),
    "004": (38, 68, 84, 134),
}
COMMANDS = {  # every command line of 000, 002 and 003
    "000": (
        34,
        35,
        58,
        59,
        60,
        136,
        137,
        138,
        172,
        173,
        174,
        175,
        195,
        196,
        197,
        198,
        218,
        219,
        222,
        241,
        242,
        243,
        246,
    ),
    "002": (4, 6, 8, 117, 123, 129),
    "003": (86, 87, 100),
}


def told(**logs: list[str]) -> Told:
    return Told(
        command="python it.py", seconds=1.0, logs={name.replace("_", "-"): lines for name, lines in logs.items()}
    )


# --- the rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.at} {row.said[:20]}")
def test_a_row_is_whole(row: Row) -> None:
    document, _, lines = row.at.partition(":")
    places = [int(place) for place in re.split(r"[-,]", lines)]
    assert places == sorted(places) and places[-1] <= LENGTHS[document]
    assert row.run in RUNS if row.run else row.why, "what cannot be shown says why"
    assert bool(row.run) == bool(row.look or row.theirs)
    assert not row.run_theirs or row.run_theirs in RUNS


def test_rows_have_every_code_block_and_command_line() -> None:
    begins = {(row.at.partition(":")[0], int(re.split(r"[:\-,]", row.at)[1]), row.kind) for row in ROWS}
    for kind, expected in ((Kind.PROGRAM, BLOCKS), (Kind.COMMAND, COMMANDS)):
        for document, places in expected.items():
            assert {(document, place, kind) for place in places} <= begins


def test_every_run_shows_something_and_its_program_is_here() -> None:
    assert {row.run for row in ROWS if row.run} == set(RUNS)
    for run in RUNS.values():
        assert (EXAMPLES / run.program).is_file()
        assert run.only_ours or (EXAMPLES / "tensorflow" / run.program).is_file()


# --- looks ------------------------------------------------------------------------------------------------------------


def test_lines_are_looked_for_in_their_order() -> None:
    seen = Seen(told=told(ps_0=["I0000 x.cc:1] Started server with target: grpc://a:1", "job_name : ps"]))
    started, job = ("I0000 x.cc:1] Started server with target: grpc://a:1", "Started"), ("job_name : ps", "job_name")
    assert looked("ps-0", started, job).judge(seen) == Judged(YES, f"same: {started[0]}")
    assert looked("ps-0", job, started).judge(seen) == Judged(NO, "not printed")
    assert looked("ps-1", started).judge(seen).mark == NO
    other = looked("ps-0", ("Started server with target: grpc://a:1", "Started"), ("job_name : worker", "job_name"))
    assert other.judge(seen) == Judged(OTHER, 'also "I0000 x.cc:1]"; "ps" for "worker"')


def looked(task: str, *lines: tuple[str, str]) -> Prints:
    texts, patterns = zip(*lines, strict=True)
    return Prints(task, texts, patterns)


def printed_lines() -> list[str]:
    return [line for row in ROWS for look in (row.look, row.theirs) if isinstance(look, Prints) for line in look.lines]


def test_only_the_same_words_are_the_same() -> None:
    """Every printed line of the documents, with a word left out, doubled, misspelt, or in another's place."""
    for line in printed_lines():
        assert differences(line, f"  {line} ") == SAME
        own = words(line)
        for at, word in enumerate(own):
            for changed in ([], [word, word], [f"{word}x"]):
                assert differences(line, " ".join([*own[:at], *changed, *own[at + 1 :]])) != SAME
            swapped = [*own[:at], *reversed(own[at : at + 2]), *own[at + 2 :]]
            assert (differences(line, " ".join(swapped)) == SAME) == (swapped == own)
    for line in printed_lines():
        for other in printed_lines():
            assert (differences(line, other) == SAME) == (words(line) == words(other))


def test_what_is_measured_is_no_other_word_and_the_number_of_a_task_is_one() -> None:
    step = "1524487685.116428: Worker 0: traing step 8054 dome (global step:9960)"
    assert differences(step, "1.5: Worker 0: traing step 1 dome (global step:2)") == SAME
    assert differences(step, "1.5: Worker 1: traing step 1 dome (global step:2)") == '"1:" for "0:"'
    ours = lines.step_line(1.5, 0, 1, 2)
    assert differences(step, ours) == '"training" for "traing"; "done" for "dome"; "step: COUNT)" for "step:COUNT)"'
    cache = "Initialize GrpcChannelCache for job ps -> {0 -> localhost:2222}"
    assert (
        differences(cache, "Cluster: job ps -> {0 -> 127.0.0.1:1}")
        == '"Cluster:" for "Initialize GrpcChannelCache for"'
    )
    placed = "MatMul_1: /job:localhost/replica:0/task:0/device:GPU:3"
    assert "GPU:2" in differences(placed, placed.replace("GPU:3", "GPU:2"))
    after = "After 10000 training step(s), validation cross entropy = 1147.88"
    assert differences(after, "After 200 training step(s), validation cross entropy = 1161") == SAME
    assert differences(after, "After 200 steps, validation cross entropy = 1161") == '"steps," for "training step(s),"'


@pytest.mark.parametrize("style", LOG_STYLES)
def test_what_our_formatters_print_is_the_same_in_the_documents_style_alone(style: str) -> None:
    cluster = ClusterSpec({"local": ["localhost:1", "localhost:2"]})
    made = {
        "004:101": lines.cluster_lines(cluster, style)[0],
        "004:102": lines.started_line("localhost:1", style),
        "004:103-104": lines.waiting_line("/job:local/replica:0/task:1", 20, style=style),
        "002:15-48": lines.step_line(1.5, 0, 1, 2, style),
        "002:50": lines.elapsed_line(1.5, style),
    }
    for at, line in made.items():
        row = next(row for row in ROWS if row.at == at and row.kind is Kind.PRINTED)
        assert isinstance(row.look, Prints)
        assert (differences(row.look.lines[0], line) == SAME) == (style == TF), (at, line)


def test_printed_lines_are_the_documents_own() -> None:
    for row in ROWS:
        document = Path(__file__).parents[1] / "documents" / f"document_{row.at[:3]}.md"
        if row.kind is Kind.PRINTED and row.run:
            assert isinstance(row.look or row.theirs, Prints), "compared, and not only found"
        if isinstance(row.look, Prints) and document.exists():
            assert set(row.look.lines) <= set(document.read_text().splitlines()), row.at


def test_other_words_are_ours_with_a_reason_or_not_as_there() -> None:
    logged, plain = (next(row for row in ROWS if row.at == at) for at in ("002:109", "004:102"))
    log = ["Started server with target: paceline://localhost:1"]
    found = {(row.run, side): Told(logs={"ps-0": log, "hello_first": log}) for row in (logged, plain) for side in Side}
    ours = judge(logged, Side.OURS, found, quick=False)
    assert ours.mark == OTHER and ours.result.startswith("ours: ") and ours.result.endswith(f"({logged.ours})")
    assert '"paceline://ADDRESS" for "grpc://ADDRESS"' in ours.result
    assert judge(plain, Side.OURS, found, quick=False).mark == NO, "no reason is given for these words"
    theirs = judge(plain, Side.THEIRS, found, quick=False)
    assert theirs.mark == OTHER and "ours" not in theirs.result


@pytest.mark.parametrize(("accuracy", "mark"), [("0.72", YES), ("0.68", NO), ("0.76", NO)])
def test_a_number_has_its_range(accuracy: str, mark: str) -> None:
    look = Number("worker-0", r"Test-Accuracy: (\d\.\d+)", 0.69, 0.75)
    log = told(worker_0=["Test-Accuracy: 0.10", f"Test-Accuracy: {accuracy}"])
    assert look.judge(Seen(told=log)).mark == mark
    assert look.judge(Seen(told=log, is_quick=True)).mark == OPEN
    assert look.judge(Seen(told=told(worker_0=[]))).mark == NO


def test_epochs_are_compared_without_the_first() -> None:
    single = told(single=["Epoch 1: cost 9.0, 9.0 s", "Epoch 2: cost 1.0, 1.0 s", "Epoch 3: cost 1.0, 1.0 s"])
    mine = told(worker_0=["Epoch 1: cost 9.0, 6.0 s", "Epoch 2: cost 1.0, 2.0 s", "Epoch 3: cost 1.0, 4.0 s"])
    seen = Seen(told=mine, single=single)
    assert str(EpochTime("worker-0", 3.0).judge(seen)) == f"{YES} 3.00x"
    assert EpochTime("worker-0", 2.9).judge(seen).mark == NO
    assert str(EpochTime("worker-0", 2.0, is_first=True).judge(seen)) == f"{YES} 1.50x"
    assert EpochTime("worker-0", 3.0).judge(Seen(told=mine)).mark == OPEN, "nothing to compare with"


def test_the_first_epoch_is_the_one_of_that_number() -> None:
    late = told(worker_0=["Epoch 7: cost 1.0, 2.0 s", "Epoch 8: cost 1.0, 4.0 s"])
    single = told(single=["Epoch 1: cost 9.0, 9.0 s", "Epoch 2: cost 1.0, 1.0 s"])
    first = EpochTime("worker-0", 2.0, is_first=True).judge(Seen(told=late))
    assert str(first) == f"{OPEN} no epochs to compare with", "it was not printed, or is lost"
    assert str(EpochTime("worker-0", 3.0).judge(Seen(told=late, single=single))) == f"{YES} 3.00x"


def test_epochs_of_a_long_log_are_all_kept(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    lines = [f"placed {number}" for number in range(1000)]
    lines[300], lines[500] = "Epoch 1: cost 9.0, 9.0 s", "Epoch 2: cost 9.0, 8.0 s"
    (tmp_path / "logs" / "worker-0.log").write_text("\n".join(lines))
    kept = documents_script.logs(tmp_path)["worker-0"]
    assert kept == [*lines[:200], lines[300], lines[500], *lines[-200:]]


def test_shares_are_the_last_counts() -> None:
    steps = {"worker_0": (8000, 8087), "worker_1": (1900, 1916)}
    logs = {
        name: [f"1.5: Worker {name[-1]}: traing step {n} dome (global step:9)" for n in steps[name]] for name in steps
    }
    assert str(Shares(3.5, 5.0).judge(Seen(told=told(**logs)))) == f"{YES} 8087 + 1916"
    assert Shares(4.5, 5.0).judge(Seen(told=told(**logs))).mark == NO


# --- verdicts ---------------------------------------------------------------------------------------------------------


def ended(matrix: Matrix, theirs: Told) -> Runs:
    """Every cell of the matrix: ours has said nothing, theirs this."""
    (table,) = matrix.tables
    left = {Side.OURS.value: told(), Side.THEIRS.value: theirs}
    return [(cell, Finished(told=msgspec.Raw(msgspec.json.encode(left[cell.labels[1]])))) for cell in table.cells]


def test_without_tensorflow_its_column_says_so_and_ours_is_judged() -> None:
    lines = verdict_lines(ended(documents.matrix(), Told(missing="not installed")))
    assert len(lines) == len(ROWS) + 1 and lines[-1][0] == ALL
    by_place = {line[0]: line for line in lines}
    assert by_place["000:11"][3:5] == (f"{YES} 1 s", f"{OPEN} not installed")
    assert by_place["002:104"][3] == f"{NO} not printed"
    assert by_place["000:97"][3:5] == (f"{OPEN} not here", f"{OPEN} not here") and "GPU" in by_place["000:97"][-1]
    assert lines[-1][4].startswith(f"0 {YES} 0 {OTHER} 0 {NO} "), "nothing of TensorFlow's was judged"


def test_a_run_that_failed_fails_all_its_rows() -> None:
    lines = verdict_lines(ended(documents.matrix(), Told(failed="ps-0 ended early")))
    assert {line[4] for line in lines if line[0] in ("000:34", "000:38", "004:52")} == {f"{NO} ps-0 ended early"}


def test_rows_of_runs_that_nobody_asked_for_are_left_out() -> None:
    few = only(documents.matrix(is_quick=True), "hello local")
    lines = verdict_lines(ended(few, Told(missing="not installed")))
    assert [line[0] for line in lines] == ["004:38-46", "004:51", "004:52", "004:53", ALL]
    assert judge(ROWS[0], Side.OURS, {}, quick=False) == Judged(OPEN, "not asked for")


def test_what_ran_in_part_is_shown_and_not_marked() -> None:
    partial = [row for row in ROWS if row.is_partial]
    assert {row.at for row in partial} >= {"002:4", "002:6", "002:8", "000:222", "000:225", "001:103-111"}
    assert all(row.why for row in partial) and "001:118" not in {row.at for row in partial}
    (docker,) = [row for row in ROWS if row.at == "002:4"]
    assert judge(docker, Side.OURS, {(docker.run, Side.OURS): told()}, quick=False) == Judged(OPEN, "1 s")
    assert judge(docker, Side.OURS, {(docker.run, Side.OURS): Told(failed="no")}, quick=False) == Judged(NO, "no")
    assert Ended("in another way").judge(Seen(told=told())).mark == OPEN


# --- commands ---------------------------------------------------------------------------------------------------------


def test_the_documents_own_command_lines_start_our_tasks() -> None:
    for run in RUNS.values():
        if run.how in (How.CLUSTER, How.BY_HAND):
            jobs = [word for each in commands(run, Side.OURS, False) for word in each.words if "job_name" in word]
            assert jobs == ["--job_name=ps"] * run.num_ps + ["--job_name=worker"] * run.num_workers
    (plain,) = commands(RUNS["10,000 shared steps"], Side.THEIRS, is_quick=False)
    assert str(plain) == (
        "paceline run --plain --ps 1 --workers 2 --slow worker:1=4.2x distributed.py --train_steps=10000"
    )


def test_ports_and_the_pinned_greeting_are_written_into_copies(tmp_path: Path) -> None:
    run = RUNS["hello pinned"]
    with Reserved() as ports:
        documents_script.copy(run, Side.OURS, EXAMPLES, tmp_path / "work", ports)
    first, second = ((tmp_path / "work" / f"hello_{name}.py").read_text() for name in ("first", "second"))
    assert 'with tf.device("/job:local/task:1"):\n    hello = tf.constant(' in first and "localhost:20000" not in first
    addresses = [re.findall(r'"(localhost:\d+)"', text) for text in (first, second)]
    assert addresses[0] == addresses[1] and len(set(addresses[0])) == 2
    assert 'task:1"):\n    hello' not in second and pinned(second) == second
    assert "ps_svrs = []" in (tmp_path / "work" / "settings.py").read_text()


def test_without_tensorflow_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(documents_script, "find_spec", lambda name: None)
    left = documents_script.carried_out(RUNS["hello local"], Side.THEIRS, True, tmp_path / "work")
    assert left.missing == "not installed" and not (tmp_path / "work").exists()


def test_outside_of_a_clone_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert in_clone(Path("examples") / "no_such_program.py") is None
    monkeypatch.setattr(documents_script, "in_clone", lambda path: None)
    assert "clone" in documents_script.carried_out(RUNS["hello local"], Side.OURS, True, tmp_path / "work").missing


def test_a_program_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "examples"
    source.mkdir()
    (source / "hello_local.py").write_text("print('so far')\nraise SystemExit(3)\n")
    monkeypatch.setattr(documents_script, "in_clone", lambda path: tmp_path / path)
    left = documents_script.carried_out(RUNS["hello local"], Side.OURS, True, tmp_path / "work")
    assert "hello_local" in left.failed and left.logs == {"hello_local": ["so far"]}


def test_one_that_ended_without_its_word_is_not_waited_for(tmp_path: Path) -> None:
    process = Process("silent", [sys.executable, "-c", ""], {}, tmp_path / "silent.log", speaks=False)
    said = Command(log="silent", words=("silent.py",), serves=True, until="Hello")
    with pytest.raises(Failed, match="'Hello' was never said: silent ended early; its log: "):
        documents_script.wait(process, said, [process], time.monotonic() + 2)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody listens where another one is bound")
@pytest.mark.parametrize("side", Side)
def test_ports_are_held_for_the_whole_run(side: Side, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TensorFlow's servers listen there all the same, as ours do: gRPC sets SO_REUSEADDR, too."""
    source = tmp_path / documents_script.EXAMPLES[side]
    source.mkdir(parents=True)
    (source / "hello_local.py").write_text(
        "import errno, settings, socket\nhost, port = settings.worker_svrs[0].split(':')\n"
        "try: socket.socket().bind((host, int(port)))\nexcept OSError as error: print(errno.errorcode[error.errno])\n"
    )
    monkeypatch.setattr(documents_script, "in_clone", lambda path: tmp_path / path)
    monkeypatch.setattr(documents_script, "find_spec", lambda name: name)
    left = documents_script.carried_out(RUNS["hello local"], side, True, tmp_path / "work")
    assert left.logs == {"hello_local": ["EADDRINUSE"]}, left


# --- with processes ---------------------------------------------------------------------------------------------------


LAB = [sys.executable, "-m", "paceline", "lab", "run", "documents", "--quick"]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_greeting_on_both_sides(tmp_path: Path) -> None:
    """TensorFlow's where it is installed; else its column says that it is not."""
    command = [*LAB, "--only", "hello local", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    (results,) = tmp_path.glob("*/results.jsonl")
    kinds = [json.loads(line) for line in results.read_text().splitlines()]
    (verdicts,) = [line["lines"] for line in kinds if line["kind"] == "verdicts"]
    ours = {line["document"]: line["ours"] for line in verdicts}
    assert ours["004:38-46"].startswith(YES), ours
    assert all(ours[at].startswith(f"{YES} same: ") for at in ("004:51", "004:52", "004:53")), ours
    theirs = {line["document"]: line["TensorFlow"] for line in verdicts}
    if documents_script.find_spec("tensorflow") is None:
        assert theirs["004:52"] == f"{OPEN} not installed"
    else:
        assert "logger" not in theirs["004:52"] and theirs["004:52"].startswith(f'{OTHER} also "'), theirs


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    command = [*LAB, "--only", "1 ps + 2 workers, async, paceline", "--out", str(tmp_path)]
    with running(command) as lab:
        assert lab.stdout is not None
        children: list[psutil.Process] = []
        while len(children) < 4:  # the script, the ps and the workers
            assert lab.stdout.readline(), "it has ended before all were started"
            children = psutil.Process(lab.pid).children(recursive=True)
        lab.send_signal(signal.SIGINT)
        assert lab.wait(60) == 130
    gone, alive = psutil.wait_procs(children, timeout=30)
    assert len(gone) >= 4 and not alive
