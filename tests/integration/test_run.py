"""One run of 2 ps and 2 workers in sync mode, looked at from everywhere: while it trains, and when it has ended.

Worker 0, the chief, makes 20 steps and ends; worker 1 makes 60. Both stand at a gate after step 10, worker 1 again
after step 30.
"""

import json
import re
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_fixtures import PROGRAMS, started_processes
from processes import DEADLINE_S, Gate, Process, Processes
from tensorboardX.proto.event_pb2 import Event

from paceline.cluster.spec import Task
from paceline.telemetry import ledger
from paceline.telemetry.ledger import Kind
from paceline.telemetry.paths import RunPaths

pytestmark = pytest.mark.timeout(180)

IDLE_S = 2.0


@dataclass
class Seen:
    """What was seen while the run went on."""

    paths: RunPaths
    launcher: Process
    listed: Process
    got: Process
    unknown: Process
    idle_cpu: list[float]
    chief_log_at_30: str
    chief_has_ended: bool

    def log(self, task: str) -> list[str]:
        return self.paths.logs(Task.parse(task)).read_text().splitlines()

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads(self.paths.summary.read_text()))


@pytest.fixture(scope="session")  # once in a process of xdist, wherever its tests are given to
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("run")
    with started_processes(folder) as processes:
        gate = Gate(folder)
        gates = [f"--gate={where}:{gate.path}" for where in ("0:10", "1:10", "1:30")]
        flags = ["--ps=2", "--mode=sync", "--run-dir=made", "--log-device-placement", "--log-every=5"]
        script = [PROGRAMS / "train.py", "--epochs-of=0:1", "--epochs-of=1:3", *gates, "--kv"]
        launcher = processes.paceline("run", *flags, *script)
        yield watch(processes, launcher, gate)
        gate.close()


def watch(processes: Processes, launcher: Process, gate: Gate) -> Seen:
    waiting = gate.arrivals(2)
    idle_cpu = cpu_shares([processes.task("ps", i).pid for i in (0, 1)])
    listed = processes.paceline("kv", "ls", "made").ends_with(0)
    got = processes.paceline("kv", "get", "made", "0.weight").ends_with(0)
    unknown = processes.paceline("kv", "get", "made", "0.wait").ends_with(2)
    chief = psutil.Process(waiting["worker:0"].pid)
    for arrival in waiting.values():
        arrival.release()
    at_30 = gate.arrival()
    gone, _ = psutil.wait_procs([chief], timeout=DEADLINE_S)
    paths = RunPaths(processes.folder / "made")
    log = paths.logs(Task("worker", 0)).read_text()
    at_30.release()
    launcher.ends_with(0)
    return Seen(paths, launcher, listed, got, unknown, idle_cpu, log, bool(gone))


def cpu_shares(pids: list[int]) -> list[float]:
    """The part of one core that each process uses while nothing happens; schedstat counts nanoseconds."""
    before = [cpu_ns(pid) for pid in pids]
    threading.Event().wait(IDLE_S)  # nothing is waited for: this is the time that is measured
    return [(cpu_ns(pid) - was) / (IDLE_S * 1e9) for pid, was in zip(pids, before, strict=True)]


def cpu_ns(pid: int) -> int:
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def test_an_idle_ps_uses_no_cpu(seen: Seen) -> None:
    assert max(seen.idle_cpu) < 0.01, seen.idle_cpu


def test_kv_reads_every_variable_while_it_trains(seen: Seen) -> None:
    rows = [line.split("\t") for line in seen.listed.lines]
    assert rows[0] == ["name", "shape", "dtype", "version", "ps", "trained"]
    assert [row[0] for row in rows[1:]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert rows[1][1:3] == ["32x8", "float32"] and rows[1][5] == "trained"
    versions = {row[3] for row in rows[1:]}
    assert "10" in versions and versions <= {"9", "10"}, (
        "ps:0 has decided round 10; ps:1 hears of it with the next pull"
    )
    assert {ps for row in rows[1:] for ps in row[4].split(",")} == {"ps:0", "ps:1"}


def test_kv_get_prints_the_values(seen: Seen) -> None:
    told = dict(line.split(": ", 1) for line in seen.got.lines[:6])
    assert told["name"] == "0.weight" and told["shape"] == "32x8" and told["version"] in ("9", "10")
    numbers = re.findall(r"-?\d+\.\d*(?:e-?\d+)?", "\n".join(seen.got.lines[6:]))
    assert len(numbers) >= 6
    assert len(seen.unknown.lines) == 1 and "0.weight" in seen.unknown.lines[0]


def test_ctx_kv_reads_it_in_the_script(seen: Seen) -> None:
    assert "kv says (32, 8)" in seen.log("worker:1")


def test_a_worker_that_is_done_ends_while_the_others_go_on(seen: Seen) -> None:
    assert seen.chief_has_ended and "Training elapsed time: " in seen.chief_log_at_30
    assert [row["steps"] for row in seen.summary["workers"]] == [20, 60]
    assert seen.summary["workers"][0]["ended_at_s"] < seen.summary["workers"][1]["ended_at_s"]


def test_in_sync_the_round_shrinks_to_those_that_are_left(seen: Seen) -> None:
    assert seen.summary["global_step"] == 60
    assert [row["updates"] for row in seen.summary["ps"]] == [60, 60]
    assert [row["discarded"] for row in seen.summary["workers"]] == [0, 0]


def test_the_placement_table_names_every_slice_and_its_task(seen: Seen) -> None:
    pattern = r"(\S+?)(\[\d+:\d+\])?: \(Variable float32\[.*\], (\d+) bytes\): /job:ps/replica:0/task:(\d)/device:CPU:0"
    rows = [found for line in seen.log("worker:0") if (found := re.fullmatch(pattern, line))]
    assert [row[1] for row in rows if not row[2] or row[2].startswith("[0:")] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    by_ps = {ps: sum(int(row[3]) for row in rows if row[4] == ps) for ps in ("0", "1")}
    assert by_ps["0"] + by_ps["1"] == 4 * (32 * 8 + 32 + 2 * 32 + 2)
    assert abs(by_ps["0"] - by_ps["1"]) <= 128, "bytes: even, at multiples of 64"


def test_the_log_says_mode_and_lane_and_batch(seen: Seen) -> None:
    assert "Worker 0 of 2: mode sync, lane shm, batch 4 a worker, 8 together" in seen.log("worker:0")


def test_every_fifth_step_is_printed(seen: Seen) -> None:
    pattern = r"\d+\.\d{6}: Worker 1: training step (\d+) done \(global step: (\d+)\)"
    steps = [re.fullmatch(pattern, line) for line in seen.log("worker:1")]
    assert [(int(s[1]), int(s[2])) for s in steps if s] == [(n, n) for n in range(5, 61, 5)]


def test_the_run_folder_has_every_file(seen: Seen) -> None:
    root = seen.paths.root
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    tasks = ("ps-0", "ps-1", "worker-0", "worker-1")
    step = "checkpoints/step-00000060"
    wanted = {"config.json", "cluster.json", "summary.json", "secret"}
    wanted |= {f"logs/{task}.log" for task in tasks} | {f"telemetry/{task}.jsonl" for task in tasks}
    wanted |= {f"ledger/{task}.bin" for task in tasks}
    wanted |= {
        f"{step}/{name}" for name in ("model.safetensors", "optimizer.safetensors", "workers.safetensors", "state.json")
    }
    earlier = {name for name in found if name.startswith("checkpoints/") and not name.startswith(step)}
    assert {name.partition("/step-")[2][:8] for name in earlier} <= {"00000020"}, "the chief's, when it ended"
    rest = found - earlier - {name for name in found if name.startswith("tensorboard/")}
    assert rest == wanted | {f"{step}/MANIFEST.json"}
    assert seen.paths.secret.stat().st_mode & 0o077 == 0


def test_what_each_side_wrote_down_is_the_same(seen: Seen) -> None:
    for worker, steps in ((0, 20), (1, 60)):
        mine = ledger.read(seen.paths.root / "ledger" / f"worker-{worker}.bin")
        for ps in (0, 1):
            theirs = ledger.read(seen.paths.root / "ledger" / f"ps-{ps}.bin")
            applied = [r.push_id for r in theirs if (r.kind, r.other) == (Kind.APPLY, worker)]
            assert applied == [r.push_id for r in mine if (r.kind, r.other) == (Kind.PUSH, ps)]
            assert applied == list(range(1, steps + 1))


def test_config_and_cluster_say_what_ran(seen: Seen) -> None:
    config = json.loads(seen.paths.config.read_text())
    assert (config["mode"], config["placement"], config["log_every"]) == ("sync", "bytes", 5)
    cluster = json.loads(seen.paths.cluster.read_text())
    assert len(cluster["ps"]) == 2 and len(cluster["worker"]) == 2
    assert set(cluster["tasks"]) == {"ps:0", "ps:1", "worker:0", "worker:1"}


def test_summary_has_the_contract_s_keys(seen: Seen) -> None:
    summary = seen.summary
    assert summary["run_id"] == "made" and summary["ok"] is True and summary["mode"] == "sync"
    assert summary["restarts"] == 0 and summary["lost"] == [] and summary["wall_s"] > 0
    assert {"cluster", "global_step", "workers", "ps", "staleness", "metrics"} <= summary.keys()
    assert summary["staleness"].keys() == {"mean", "p50", "p95", "max"}
    for row in summary["workers"]:
        wanted = {"index", "steps", "discarded", "step_ms", "first_100_steps_ms", "waited_at_start_s", "first_epoch_s"}
        assert wanted | {"epoch_s", "samples_per_s", "ended_at_s", "metrics"} <= row.keys()
        assert row["step_ms"].keys() >= {"median", "p95"}
    for row in summary["ps"]:
        assert {"index", "updates", "apply_ms", "bytes_in", "bytes_out"} <= row.keys()
    assert summary["workers"][1]["metrics"]["own_step"] == 60
    assert summary["metrics"]["own_step"] == 20, "the chief's last values"


def test_tensorboard_has_the_chief_s_values_at_the_global_step(seen: Seen) -> None:
    (path,) = (seen.paths.root / "tensorboard").iterdir()
    events = [event for event in tensorboard_events(path.read_bytes()) if event.HasField("summary")]
    points = [(e.step, v.simple_value) for e in events for v in e.summary.value if v.tag.endswith("own_step")]
    assert points == [(step, step) for step in range(1, 21)], "in sync the chief's n-th step is global step n"
    assert any(v.tag.endswith("loss") for e in events for v in e.summary.value)


def tensorboard_events(data: bytes) -> Iterator[Event]:
    """The records of a TensorBoard file: length, its checksum, an Event, its checksum."""
    position = 0
    while position < len(data):
        (size,) = struct.unpack_from("<Q", data, position)
        yield Event.FromString(data[position + 12 : position + 12 + size])
        position += 12 + size + 4


def test_the_launcher_prints_folder_cluster_progress_and_summary(seen: Seen) -> None:
    lines = seen.launcher.lines
    assert lines[0] == "Run folder: made" and lines[1].startswith("Cluster: job ps -> {0 -> 127.0.0.1:")
    assert any(re.match(r"\[ *\d+ s\] global step \d+ \| worker:0", line) for line in lines), "plain lines in a pipe"
    assert not any("\x1b" in line for line in lines)
    assert any(re.match(r"Training done; global step 60, \d+\.\d s", line) for line in lines)
    where = "Run folder: made (summary.json, and what the tasks printed in logs/)"
    assert lines[-3:-1] == ["Model: made/checkpoints/step-00000060", where]
    assert lines[-1].startswith("To train further (more epochs or steps): paceline run --run-dir made --resume auto ")
