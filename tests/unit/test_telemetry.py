"""Telemetry: nothing recorded slows or stops training, and what was recorded is found again.

Run by `make test`. No cluster, no sockets; the only waits are for an event, with a limit.
"""

import doctest
import importlib
import json
import math
import os
import struct
import sys
import threading
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from paceline.cluster.devices import Device
from paceline.cluster.settings import LOG_STYLES, TF, Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.launchers.crew import STEPPED
from paceline.launchers.live import SHOWN
from paceline.modes.spec import ModeSpec
from paceline.telemetry import lines, sink, staleness, steps, summary
from paceline.telemetry.background import Background
from paceline.telemetry.read import records, reports, tick_of
from paceline.telemetry.records import ModeChange, PsReport, SplitMs, StepMs, WorkerReport
from paceline.telemetry.sink import Sink
from paceline.telemetry.steps import StepClock
from paceline.telemetry.summaries import EventWriter

WORKER = Task("worker", 0)
CLUSTER = ClusterSpec({"ps": ["h:1"], "worker": ["h:2", "h:3"]})


@pytest.mark.parametrize("name", ["lines", "read", "sink", "staleness", "steps"])
def test_examples_in_docstrings_are_true(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(f"paceline.telemetry.{name}"))
    assert outcome.attempted > 0 and outcome.failed == 0


# ---- lines -----------------------------------------------------------------------------------------------


def test_printed_lines_are_the_contract_word_for_word() -> None:
    assert lines.job_line("ps") == "job_name : ps"
    assert lines.task_line(0) == "task_index : 0"
    assert lines.cluster_lines(CLUSTER) == [
        "Cluster: job ps -> {0 -> h:1}",
        "Cluster: job worker -> {0 -> h:2, 1 -> h:3}",
    ]
    assert lines.started_line("host:2222") == "Started server with target: paceline://host:2222"
    waiting = "Still waiting for response from worker: /job:worker/replica:0/task:1 (20 s)"
    assert lines.waiting_line(Task("worker", 1).device, 20.2) == waiting
    done = "1524487685.116428: Worker 0: training step 8054 done (global step: 9960)"
    assert lines.step_line(1524487685.116428, 0, 8054, 9960) == done
    assert lines.begins_line(1.5) == "Training begins @ 1.500000"
    assert lines.ends_line(2.5) == "Training ends @ 2.500000"
    assert lines.elapsed_line(366.604071) == "Training elapsed time: 366.604071 s"
    assert lines.switched_line("async", "sync", 7, None) == "mode async -> sync at global step 7"
    assert lines.paused_line(2, 3) == "Paused: 2 more workers needed (--min-workers 3)"
    assert lines.going_on_line(1, 0.4) == "Going on: 1 worker is in again, after 0 s"


def test_with_log_style_tf_they_are_the_documents_word_for_word() -> None:
    assert lines.cluster_lines(ClusterSpec({"ps": ["localhost:2222"], "worker": ["h:1", "h:2"]}), TF) == [
        "Initialize GrpcChannelCache for job ps -> {0 -> localhost:2222}",
        "Initialize GrpcChannelCache for job worker -> {0 -> h:1, 1 -> h:2}",
    ]
    assert lines.started_line("localhost:2222", TF) == "Started server with target: grpc://localhost:2222"
    waiting = "CreateSession still waiting for response from worker: /job:local/replica:0/task:1"
    assert lines.waiting_line(Task("local", 1).device, 20.2, style=TF) == waiting
    assert lines.waiting_line(Task("local", 1).device, 0, "no such host", TF) == f"{waiting}: no such host"
    done = "1524487685.116428: Worker 0: traing step 8054 dome (global step:9960)"
    assert lines.step_line(1524487685.116428, 0, 8054, 9960, TF) == done
    assert lines.elapsed_line(366.604071, TF) == "Training elapsed time:366.604071 s"
    assert lines.session_line("c7c88ec51572b4dd", "", TF) == "Start master session c7c88ec51572b4dd with config:"
    on_task_1 = lines.placed_line("Const", "Const", Device.parse("/job:local/replica:0/task:1/cpu:0"), TF)
    assert on_task_1 == "Const: (Const): /job:local/replica:0/task:1/cpu:0"
    on_card = lines.placed_line("MatMul_1", "MatMul", Device.parse("/job:localhost/replica:0/task:0/gpu:3"), TF)
    assert on_card == "MatMul_1: (MatMul): /job:localhost/replica:0/task:0/device:GPU:3"


def test_the_launcher_knows_its_tasks_lines_in_either_style() -> None:
    """What it shows itself is not shown again, and a worker that has made a step is seen to have made one."""
    for style in LOG_STYLES:
        step = lines.step_line(1.5, 0, 7, 9, style).encode()
        assert STEPPED.search(step)
        assert all(SHOWN.search(line.encode()) for line in lines.cluster_lines(CLUSTER, style)) and SHOWN.search(step)
        assert not SHOWN.search(lines.started_line("h:1", style).encode())


# ---- sink ------------------------------------------------------------------------------------------------


def written(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def sink_of(run_dir: Path, task: Task = WORKER) -> Sink:
    return Sink(run_dir / "telemetry" / f"{task.job}-{task.index}.jsonl")


def test_close_drains_in_order_and_ends_with_the_number_of_drops(tmp_path: Path) -> None:
    out = Sink(tmp_path / "new" / "a.jsonl", capacity=1000)
    for number in range(500):
        out.event("count", number=number)
    out.close()
    *counted, last = written(tmp_path / "new" / "a.jsonl")
    assert [record["number"] for record in counted] == list(range(500))
    assert (last["kind"], last["dropped"]) == ("close", 0)
    out.close()
    out.event("late")
    assert out.dropped == 1
    assert not [t for t in threading.enumerate() if t.name == "paceline-telemetry"]


def test_a_line_is_in_the_file_within_a_second_without_close(tmp_path: Path, monkeypatch) -> None:
    arrived = threading.Event()
    write = sink._JsonLines.write

    def write_and_tell(self: sink._JsonLines, line: bytes) -> None:
        write(self, line)
        arrived.set()

    monkeypatch.setattr(sink._JsonLines, "write", write_and_tell)
    out = Sink(tmp_path / "a.jsonl")
    out.tick(step=7)
    assert arrived.wait(1.0)
    assert written(tmp_path / "a.jsonl")[0]["step"] == 7
    out.close()


def test_values_are_taken_at_the_call_and_numpy_numbers_are_numbers(tmp_path: Path) -> None:
    out = Sink(tmp_path / "a.jsonl")
    metrics = {"loss": np.float32(0.5), "bad": math.nan}
    out.tick(metrics=metrics, path=tmp_path)
    metrics["loss"] = np.float32(9)
    out.close()
    record = written(tmp_path / "a.jsonl")[0]
    assert record["metrics"] == {"loss": 0.5, "bad": None}
    assert record["path"] == str(tmp_path)


def test_a_value_that_cannot_be_written_is_dropped_and_counted(tmp_path: Path) -> None:
    out = Sink(tmp_path / "a.jsonl")
    out.event("bad", value=np.zeros(3))
    out.event("good")
    out.close()
    assert [(r["kind"], r.get("dropped")) for r in written(tmp_path / "a.jsonl")] == [
        ("good", None),
        ("close", 1),
    ]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_counts_drops_and_raises_nothing() -> None:
    out = Sink("/dev/full")
    for _ in range(5):
        out.event("lost")
    out.close()
    assert out.dropped == 5


def test_a_folder_that_cannot_be_made_counts_drops(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = Sink(tmp_path / "file" / "a.jsonl")
    out.event("lost")
    out.close()
    assert out.dropped == 1


def test_half_a_line_of_a_killed_task_is_not_glued_to_the_next(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"t":1.0,"kind":"ti')
    out = Sink(path)
    out.event("start")
    out.close()
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()[1:]] == ["start", "close"]


def test_the_file_stays_where_it_was_meant_when_the_script_changes_its_folder(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    out = Sink("a.jsonl")
    monkeypatch.chdir(tmp_path / "elsewhere")
    out.event("start")
    out.close()
    assert (tmp_path / "a.jsonl").exists()


class Gated:
    """A disk that does not answer until the gate opens."""

    def __init__(self) -> None:
        self.entered, self.gate = threading.Event(), threading.Event()
        self.seen: list[int] = []
        self.last: int | None = None

    def write(self, item: int) -> None:
        self.entered.set()
        assert self.gate.wait(10)
        self.seen.append(item)

    def flush(self) -> None:
        pass

    def finish(self, dropped: int) -> None:
        self.last = dropped


def test_a_disk_that_hangs_never_makes_put_or_close_wait_for_it() -> None:
    disk = Gated()
    buffer: Background[int] = Background("test-hang", disk, capacity=2)
    buffer.put(0)
    assert disk.entered.wait(10)
    for item in (1, 2, 3, 4):
        buffer.put(item)
    assert buffer.dropped == 2
    assert not buffer.close(timeout_s=0.0)
    disk.gate.set()
    assert buffer.close(timeout_s=10)
    assert (disk.seen, disk.last) == ([0, 1, 2], 2)


# ---- steps -----------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(steps, "perf_counter", clock)
    return clock


def do_steps(mine: StepClock, clock: Clock, *took_s: float, samples: int = 10) -> None:
    for seconds in took_s:
        clock.now += seconds
        mine.step(samples)


def test_a_report_of_two_epochs_leaves_out_waits_and_evaluations(clock: Clock) -> None:
    mine = StepClock()
    clock.now += 7
    mine.waited(7.0)
    mine.epoch()
    do_steps(mine, clock, 3.0, 1.0)
    clock.now += 50  # evaluation
    mine.epoch()
    do_steps(mine, clock, 1.0, 1.0)
    mine.discarded()
    mine.metrics({"loss": 2.0, "accuracy": 0.5})
    mine.metrics({"loss": 1.0})
    clock.now += 50
    assert mine.report(index=1, ended_at_s=12.0) == WorkerReport(
        index=1,
        steps=4,
        discarded=1,
        step_ms=StepMs(median=1000.0, p95=3000.0),
        split_ms=SplitMs(data=None, compute=1500.0, exchange=0.0, wait=0.0),
        first_100_steps_ms=1500.0,
        waited_at_start_s=7.0,
        first_epoch_s=4.0,
        epoch_s=2.0,
        samples_per_s=40 / 6,
        ended_at_s=12.0,
        metrics={"loss": 1.0, "accuracy": 0.5},
    )


def test_the_parts_of_a_step_add_up_and_what_lies_between_steps_is_none_of_them(clock: Clock) -> None:
    mine = StepClock()
    mine.wait_s += 9  # while it joined
    mine.waited(9.0)
    for _ in range(2):
        mine.epoch()
        for _ in range(2):
            clock.now += 1 + 2  # loads for a second, computes for two
            mine.data_s += 1
            mine.pushing_since_s = clock.now - mine.wait_s
            clock.now += 4 + 8  # pushes, and waits in it
            mine.wait_s += 8
            mine.step(10)
        clock.now += 50  # an evaluation, which loads, takes the last answer and waits for it
        mine.data_s, mine.exchange_s, mine.wait_s = mine.data_s + 20, mine.exchange_s + 20, mine.wait_s + 10
    split = mine.split_ms()
    assert split == SplitMs(data=1000.0, compute=2000.0, exchange=4000.0, wait=8000.0)
    assert split.step == 1e3 * sum(mine._took) / mine.steps
    assert mine.report(index=0, ended_at_s=0.0).split_ms == split


def test_a_step_without_a_push_has_no_exchange_and_one_without_a_loader_no_data(clock: Clock) -> None:
    mine = StepClock()
    assert mine.split_ms() is None
    do_steps(mine, clock, 2.0, 4.0)
    assert mine.split_ms() == SplitMs(data=None, compute=3000.0, exchange=0.0, wait=0.0)


def test_an_exchange_between_two_steps_belongs_to_the_second(clock: Clock) -> None:
    mine = StepClock()
    mine.pushing_since_s = clock.now - mine.wait_s
    do_steps(mine, clock, 1.0)
    mine.exchange_s += 3  # a ctx call has pulled
    do_steps(mine, clock, 3.0 + 4.0)
    assert mine.split_ms() == SplitMs(data=None, compute=2000.0, exchange=2000.0, wait=0.0)


def test_without_steps_there_is_nothing_to_say(clock: Clock) -> None:
    mine = StepClock()
    mine.epoch()
    report = mine.report(index=0, ended_at_s=0.0)
    assert (report.steps, report.step_ms, report.first_100_steps_ms, report.epoch_s) == (0, None, None, None)
    assert report.samples_per_s is None


def test_steps_are_those_of_all_lives_and_times_of_this_one(clock: Clock) -> None:
    mine = StepClock()
    mine.earlier = 500
    do_steps(mine, clock, 2.0, 2.0)
    report = mine.report(index=0, ended_at_s=4.0)
    assert (report.steps, mine.steps) == (502, 2)
    assert (report.samples_per_s, report.first_100_steps_ms) == (5.0, 2000.0)


def test_one_epoch_is_first_and_mean(clock: Clock) -> None:
    mine = StepClock()
    mine.epoch()
    do_steps(mine, clock, 0.5)
    report = mine.report(index=0, ended_at_s=0.5)
    assert (report.first_epoch_s, report.epoch_s) == (0.5, 0.5)


def test_a_long_run_keeps_its_counts_and_its_first_steps_but_not_all_durations(clock: Clock, monkeypatch) -> None:
    monkeypatch.setattr(steps, "KEEP_STEPS", 400)
    mine = StepClock()
    do_steps(mine, clock, *[2.0] * 100, *[1.0] * 1100)
    report = mine.report(index=0, ended_at_s=0.0)
    assert (report.steps, mine.steps) == (1200, 1200)
    assert report.first_100_steps_ms == 2000.0
    assert report.step_ms == StepMs(median=1000.0, p95=1000.0)
    assert report.samples_per_s == 12000 / 1300
    assert len(mine._took) < 400


def test_a_step_costs_less_than_a_microsecond() -> None:
    mine = StepClock()
    costs = []
    for _ in range(50):  # the best of many short stretches: other load on the machine cannot make it faster
        began = perf_counter()
        for _ in range(500):
            mine.step(32)
        costs.append((perf_counter() - began) / 500)
    assert min(costs) < 1e-6


# ---- read ------------------------------------------------------------------------------------------------


def test_records_come_back_in_order_and_by_task(tmp_path: Path) -> None:
    for task in (Task("worker", 1), Task("worker", 0), Task("ps", 0)):
        out = sink_of(tmp_path, task)
        out.event("start", task=str(task))
        out.tick(task=str(task), step=3, global_step=5, metrics={"loss": math.nan})
        out.close()
    assert [r.task for r in records(tmp_path) if r.kind == "start"] == ["ps:0", "worker:0", "worker:1"]
    mine = list(records(tmp_path, Task("worker", 1)))
    assert [(r.kind, r.task) for r in mine] == [
        ("start", "worker:1"),
        ("tick", "worker:1"),
        ("close", "worker:1"),
    ]
    tick = tick_of(mine[1])
    assert tick is not None
    assert (tick.t, tick.step, tick.global_step, tick.metrics) == (mine[1].t, 3, 5, {"loss": None})
    assert tick_of(mine[0]) is None


def test_damaged_lines_and_foreign_files_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "telemetry"
    folder.mkdir()
    damaged = [b"{", b"", b"[1]", b'{"t":"x","kind":"a"}', b'{"t":1}', b'{"t":1,"kind":"\xff"}', b"\xff\x00"]
    (folder / "worker-0.jsonl").write_bytes(b"\n".join([*damaged, b'{"t":1,"kind":"good"}', b'{"t":2,"ki']))
    (folder / "notes.jsonl").write_text('{"t":1,"kind":"foreign"}\n')
    assert [record.kind for record in records(tmp_path)] == ["good"]
    assert list(records(tmp_path / "missing")) == []
    assert reports(tmp_path / "missing") == ([], [])


def test_the_newest_report_of_each_task_counts(tmp_path: Path) -> None:
    out = sink_of(tmp_path)
    for number in (1, 2):
        out.event("start", task="worker:0")
        out.event("report", task="worker:0", report=WorkerReport(index=0, steps=number, step_ms=StepMs(1.0, 2.0)))
    out.close()
    ps = sink_of(tmp_path, Task("ps", 0))
    ps.event("report", task="ps:0", report=PsReport(index=0, updates=9, staleness={"1": {"0": 2}}, global_step=9))
    ps.close()
    workers, servers = reports(tmp_path)
    assert workers == [WorkerReport(index=0, task="worker:0", steps=2, step_ms=StepMs(1.0, 2.0))]
    assert servers == [PsReport(index=0, updates=9, staleness={"1": {"0": 2}}, global_step=9)]


def test_an_end_that_only_ps_0_has_written_down_yet_counts(tmp_path: Path) -> None:
    """By hand ps:0 sums up when it has heard of all ends; a worker's own file may get its last lines after that."""
    worker, ps = sink_of(tmp_path), sink_of(tmp_path, Task("ps", 0))
    worker.event("start", task="worker:0")
    worker.close()
    ps.event("report", task="worker:0", report=WorkerReport(index=0, steps=7))
    ps.close()
    assert reports(tmp_path)[0] == [WorkerReport(index=0, task="worker:0", steps=7)]


def test_a_killed_task_is_told_from_its_last_tick(tmp_path: Path) -> None:
    out = sink_of(tmp_path)
    out.event("start", task="worker:0")
    out.event("report", task="worker:0", report=WorkerReport(index=0, steps=99))  # of the incarnation before
    out.event("start", task="worker:0")
    out.tick(task="worker:0", step=5)
    out.tick(task="worker:0", step=6, metrics={"loss": 0.5})
    out.close()
    ps = sink_of(tmp_path, Task("ps", 0))
    ps.tick(task="ps:0", version=11, global_step=12)
    ps.close()
    workers, servers = reports(tmp_path)
    assert workers == [WorkerReport(index=0, task="worker:0", steps=6, metrics={"loss": 0.5}, is_lost=True)]
    assert servers == [PsReport(index=0, updates=11, global_step=12, is_lost=True)]


# ---- summary ---------------------------------------------------------------------------------------------


def summary_of(cluster: ClusterSpec, told: summary.Reports, lost: tuple[str, ...] = ()) -> dict[str, object]:
    settings = Settings(run_id="r1", mode="sync")
    return summary.build(settings, cluster, told, ok=True, wall_s=2.5, restarts=1, lost=list(lost), error=None)


def test_the_summary_has_the_keys_of_the_contract() -> None:
    workers = [WorkerReport(index=i, steps=10, step_ms=StepMs(1.0, 2.0), metrics={"a": float(i)}) for i in (1, 0)]
    built = summary_of(
        CLUSTER, (workers, [PsReport(index=0, staleness={"0": {"0": 3}, "1": {"4": 1}}, global_step=20)])
    )
    assert (built["run_id"], built["ok"], built["mode"], built["error"]) == ("r1", True, "sync", None)
    assert (built["global_step"], built["wall_s"], built["restarts"], built["lost"]) == (20, 2.5, 1, [])
    assert built["cluster"] == {"ps": ["h:1"], "worker": ["h:2", "h:3"], "num_ps": 1, "num_workers": 2}
    assert [row["index"] for row in built["workers"]] == [0, 1]
    assert set(built["workers"][0]) >= {
        "index", "steps", "discarded", "step_ms", "first_100_steps_ms", "waited_at_start_s", "first_epoch_s",
        "epoch_s", "samples_per_s", "ended_at_s", "metrics",
    }  # fmt: skip
    assert built["workers"][0]["step_ms"] == {"median": 1.0, "p95": 2.0}
    assert set(built["ps"][0]) >= {"index", "updates", "apply_ms", "bytes_in", "bytes_out"}
    assert built["staleness"] == {"mean": 1.0, "p50": 0, "p95": 4, "max": 4}
    assert built["metrics"] == {"a": 0.0}
    assert json.loads(json.dumps(built)) == built


def test_every_worker_of_the_cluster_has_a_row_also_when_it_was_killed(tmp_path: Path) -> None:
    cluster = ClusterSpec({"ps": ["h:1"], "chief": ["h:2"], "worker": ["h:3", "h:4"]})
    chief = sink_of(tmp_path, Task("chief", 0))
    chief.event("report", task="chief:0", report=WorkerReport(index=0, steps=10, metrics={"accuracy": 0.9}))
    chief.close()
    killed = sink_of(tmp_path, Task("worker", 0))
    killed.tick(task="worker:0", step=4)
    killed.close()
    built = summary_of(cluster, reports(tmp_path), lost=("worker:0", "worker:1"))
    rows = [(row["task"], row["index"], row["steps"], row["lost"]) for row in built["workers"]]
    assert rows == [("chief:0", 0, 10, False), ("worker:0", 1, 4, True), ("worker:1", 2, 0, True)]
    assert built["metrics"] == {"accuracy": 0.9}
    assert built["ps"][0]["lost"] is True
    assert built["staleness"] == {"mean": None, "p50": None, "p95": None, "max": None}


def test_what_ps_0_counted_of_each_worker_is_in_its_row() -> None:
    told = [WorkerReport(index=0, task="worker:0", steps=10, discarded=5)]  # worker:1 was killed without a word
    first = PsReport(
        index=0,
        staleness={"0": {"0": 3, "1": 1}, "1": {"10": 2}},
        pushes={"0": 99, "1": 7},
        waited_s={"1": 2.5},
        discarded={"0": 5, "1": 4},
        not_finite={"1": 1},
    )
    built = summary_of(CLUSTER, (told, [first]), lost=("worker:1",))
    rows = [
        [row[key] for key in ("steps", "discarded", "waited_s", "not_finite", "staleness")] for row in built["workers"]
    ]
    assert rows == [
        [10, 5, 0.0, 0, {"mean": 0.25, "p50": 0, "p95": 1, "max": 1}],
        [7, 4, 2.5, 1, {"mean": 10.0, "p50": 10, "p95": 10, "max": 10}],
    ]
    assert built["staleness"] == {"mean": 3.5, "p50": 0, "p95": 10, "max": 10}
    assert built["ps"][0]["staleness"] == {"0": {"0": 3, "1": 1}, "1": {"10": 2}}


def test_the_mode_its_changes_and_a_slowed_worker_are_in_the_summary() -> None:
    assert not {"slow"} & summary_of(CLUSTER, ([], [])).keys()
    settings = Settings(run_id="r1", mode="bounded", staleness=4, slow="worker:1=5x")
    changes = [ModeChange(at_step=40, mode="sync", pause_ms=3.2), ModeChange(at_step=90, mode="async")]
    told = ([], [PsReport(index=0, modes=changes)])
    built = summary.build(settings, CLUSTER, told, ok=True, wall_s=1.0, restarts=0, lost=[], error=None)
    assert (built["mode"], built["mode_spec"], built["slow"]) == ("bounded", "bounded, staleness 4", "worker:1=5x")
    assert built["modes"] == [
        {"at_step": 40, "mode": "sync", "pause_ms": 3.2},
        {"at_step": 90, "mode": "async", "pause_ms": None},
    ]


def test_a_place_of_an_elastic_cluster_that_nobody_took_has_no_row() -> None:
    cluster = ClusterSpec({"ps": ["h:1"], "worker": [f"h:{port}" for port in range(2, 7)]})
    told = [WorkerReport(index=0, task="worker:0", steps=5)]
    first = PsReport(index=0, pushes={"0": 5, "3": 2})  # worker:3 came later, and was killed on another host

    def rows(started: int | None) -> list[str]:
        settings = Settings(run_id="r1", started_workers=started)
        built = summary.build(
            settings, cluster, (told, [first]), ok=True, wall_s=1.0, restarts=0, lost=["worker:1"], error=None
        )
        assert built["cluster"]["num_workers"] == 5
        return [row["task"] for row in built["workers"]]

    assert rows(started=2) == ["worker:0", "worker:1", "worker:3"]
    assert rows(started=None) == [f"worker:{index}" for index in range(5)]


def test_a_report_of_the_old_shape_is_none(tmp_path: Path) -> None:
    ps = sink_of(tmp_path, Task("ps", 0))
    ps.event("report", task="ps:0", report={"index": 0, "updates": 9, "staleness": {"0": 9}})
    ps.close()
    assert reports(tmp_path)[1] == [PsReport(index=0, is_lost=True)]


# ---- staleness -------------------------------------------------------------------------------------------


def test_staleness_percentiles_agree_with_the_values_written_out() -> None:
    counts = {0: 70, 2: 20, 10: 9, 11: 1}
    values = [value for value, count in counts.items() for _ in range(count)]
    found = staleness.spread(counts)
    assert found["mean"] == pytest.approx(np.mean(values))
    for name, percent in (("p50", 50), ("p95", 95), ("max", 100)):
        assert found[name] == np.percentile(values, percent, method="inverted_cdf")
    assert set(staleness.spread({3: 0}).values()) == {None}


def test_a_histogram_for_a_tick_stays_small_and_loses_no_push() -> None:
    counts = {value: value + 1 for value in range(1000)}
    told = staleness.small(counts)
    assert len(told) == 17
    assert list(told)[:2] == ["0", "1"] and told["15"] == 16
    assert sum(told.values()) == sum(counts.values())
    assert staleness.small({}) == {}


ASYNC = ModeSpec(name="async")


@pytest.mark.parametrize(
    ("mode", "optimizer", "options", "counts", "said"),
    [
        (ASYNC, "Adam", [{"lr": 1e-3}], {9: 70, 10: 30}, "async with Adam at a mean staleness of 9.3:"),
        (ASYNC, "Adamax", [{}], {9: 100}, "async with Adamax at"),
        (ASYNC, "SGD", [{"momentum": 0}, {"momentum": 0.9}], {9: 100}, "async with SGD (momentum 0.9) at"),
        (ASYNC, "SGD", [{"momentum": 0.0}], {9: 100}, None),
        (ASYNC, "Adagrad", [{"lr": 0.1}], {9: 100}, None),
        (ASYNC, "Adam", [{}], {9: 99}, None),  # too few to say
        (ASYNC, "Adam", [{}], {8: 100}, None),  # not above 8
        (ModeSpec(name="bounded"), "Adam", [{}], {9: 100}, None),
        (ModeSpec(name="sync"), "Adam", [{}], {9: 100}, None),
        (ModeSpec(name="local", outer="async"), "SGD", [{"momentum": 0.9}], {9: 100}, None),
    ],
)
def test_when_old_gradients_are_a_worry(
    mode: ModeSpec, optimizer: str, options: list[dict[str, float]], counts: dict[int, int], said: str | None
) -> None:
    found = staleness.worry(mode, optimizer, options, counts)
    assert (found or "").startswith(said or "") and (found is None) == (said is None)


def test_the_worry_suggests_only_what_is_not_done_already() -> None:
    ends = {
        scale: (staleness.worry(ModeSpec(name="async", staleness_scale=scale), "Adam", [{}], {9: 100}) or "")
        for scale in (False, True)
    }
    assert ends[False].endswith("old gradients; try --mode bounded, --staleness-scale or a smaller lr")
    assert ends[True].endswith("old gradients; try --mode bounded or a smaller lr")


def test_the_summary_is_written_in_one_move_and_not_finite_is_null(tmp_path: Path, monkeypatch) -> None:
    path = summary.write(tmp_path, {"loss": 1.0})
    summary.write(tmp_path, {"loss": math.nan})
    assert json.loads(path.read_text()) == {"loss": None}

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(summary.os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        summary.write(tmp_path, {"loss": 3.0})
    assert json.loads(path.read_text()) == {"loss": None}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


# ---- TensorBoard -----------------------------------------------------------------------------------------


def events_in(path: Path) -> list[object]:
    """Each record: length (8), its checksum (4), the event, its checksum (4)."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    masked_crc32c = importlib.import_module("tensorboardX.record_writer").masked_crc32c
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        body = data[12 : 12 + length]
        assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked_crc32c(body)
        found.append(event_pb2.Event.FromString(body))
        data = data[16 + length :]
    return found


def test_scalars_are_read_back_from_the_event_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    board = EventWriter(tmp_path)
    assert board.available
    board.scalars({"loss": 0.5, "accuracy": 0.25}, step=100)
    board.scalars({"loss": math.nan}, step=200)
    board.close()
    (path,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    first, *points = events_in(path)
    assert first.file_version == "brain.Event:2"
    values = [(p.step, {v.tag: v.simple_value for v in p.summary.value}) for p in points]
    assert values[0] == (100, {"loss": 0.5, "accuracy": 0.25})
    assert values[1][0] == 200 and math.isnan(values[1][1]["loss"])
    assert board.dropped == 0


def test_points_that_cannot_be_written_are_counted_and_nothing_is_raised(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    (tmp_path / "tensorboard").write_text("in the way")
    board = EventWriter(tmp_path)
    board.scalars({"loss": 0.5}, step=1)
    board.close()
    assert board.dropped == 1


def test_without_tensorboardx_nothing_is_written_and_it_says_so(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    board = EventWriter(tmp_path)
    assert not board.available
    board.scalars({"loss": 0.5}, step=1)
    board.close()
    assert list(tmp_path.iterdir()) == []


def test_linked_telemetry_is_left_out_and_said(tmp_path: Path) -> None:
    (tmp_path / "run" / "telemetry").mkdir(parents=True)
    (tmp_path / "other.jsonl").write_text('{"t": 1.0, "kind": "tick", "step": 7}\n')
    (tmp_path / "run" / "telemetry" / "worker-0.jsonl").symlink_to(tmp_path / "other.jsonl")
    with pytest.warns(UserWarning, match="worker-0.jsonl: it is a symbolic link"):
        assert list(records(tmp_path / "run")) == []
