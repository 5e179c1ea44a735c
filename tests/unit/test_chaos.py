"""What --chaos says: parsed, refused with a sentence, told in words; who is hit when; and that a fault fires once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as some
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.cluster import chaos
from paceline.cluster.discovery import Assignment
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.cluster.validate import check
from paceline.errors import UsageError
from paceline.launchers.chaos import Chaos, PsFaults, of_ps
from paceline.launchers.nursery import Forked
from paceline.telemetry import read
from paceline.telemetry.faults import FaultLog, Injected, injected
from paceline.telemetry.paths import RunPaths
from paceline.worker.step import injection

CLUSTER = ClusterSpec({"ps": ["a:1"], "worker": ["a:2", "a:3", "a:4"]})
TASKS = [*CLUSTER.ps, *CLUSTER.workers]
ALL = (
    "kill=ps:0@500,stop=worker:1@200:10s,delay=worker:2:50ms,limit=worker:1:5mbit,flip=1e-6,swallow-acks=worker:0:50,"
    "kill=worker:?@every:29s,cut=worker:1@300:2s,nan=worker:1@50,flip=worker:2@7"
)


def test_every_kind_is_read() -> None:
    told = {f.text: (f.who, f.at_step, f.every_s, f.lasts_s, f.amount) for f in chaos.parse(ALL)}
    assert told == {
        "kill=ps:0@500": ("ps:0", 500, None, 0.0, 0.0),
        "stop=worker:1@200:10s": ("worker:1", 200, None, 10.0, 0.0),
        "delay=worker:2:50ms": ("worker:2", None, None, 0.05, 0.0),
        "limit=worker:1:5mbit": ("worker:1", None, None, 0.0, 625_000.0),
        "flip=1e-6": ("", None, None, 0.0, 1e-6),
        "swallow-acks=worker:0:50": ("worker:0", None, None, 0.0, 50.0),
        "kill=worker:?@every:29s": ("worker:?", None, 29.0, 0.0, 0.0),
        "cut=worker:1@300:2s": ("worker:1", 300, None, 2.0, 0.0),
        "nan=worker:1@50": ("worker:1", 50, None, 0.0, 0.0),
        "flip=worker:2@7": ("worker:2", 7, None, 0.0, 0.0),
    }
    assert chaos.parse("") == () and chaos.parse("  ") == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kil=ps:0@5", "did you mean 'kill'"),
        ("kill", "write it as kill=ps:0@500"),
        ("kill=ps:0", "write it as kill=ps:0@500"),
        ("kill=ps:0@0", "steps count from 1"),
        ("stop=worker:1@5", "write it as stop=worker:1@200:10s"),
        ("stop=worker:1@5:0s", "of 0 is no fault"),
        ("kill=?@every:0s", "of 0 is no fault"),
        ("limit=worker:1:0mbit", "of 0 is no fault"),
        ("flip=2", "between 0 and 1"),
        ("flip=0", "between 0 and 1"),
        ("swallow-acks=worker:0:0", "0 answers are none"),
        ("kill=worker:?@5", "a random task needs a time"),
        ("delay=worker:?:5ms", "a random task needs a time"),
        ("nan=ps:0@5", "nan is made by a worker"),
        ("cut=?@every:5s:1s", "cut is made by a worker"),
        ("kill=ps:0@5,kill=ps:0@5", "twice"),
        ("kill=ps:0@5,,", "there is no fault ''"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_would(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refusal:
        chaos.parse(text)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "lane", "sentence"),
    [
        ("kill=worker:3@5", "auto", "this cluster has no worker:3; its tasks are ps:0, worker:0, worker:1, worker:2"),
        ("kill=chief:?@every:5s", "auto", "this cluster has no chief:?"),
        ("limit=worker:1:5mbit", "shm", "use --lane auto or tcp"),
        ("swallow-acks=worker:1:5", "inproc", "use --lane auto or tcp"),
        ("kill=worker:1@5", "inproc", "all tasks are one process"),
    ],
)
def test_a_run_that_cannot_have_a_fault_does_not_start(text: str, lane: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refusal:
        check(Settings(run_id="r", chaos=text, lane=lane), CLUSTER)
    assert sentence in str(refusal.value)
    check(Settings(run_id="r", chaos=ALL), CLUSTER)


@given(some.text(alphabet="kilstopcutnadey=:@?,.0159ewrkm-", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        faults = chaos.parse(text)
    except UsageError:
        return
    assert all(chaos.explain(fault) for fault in faults)


@given(some.integers(0, 2**31), some.integers(1, 1000))
def test_the_same_seed_hits_the_same_task(seed: int, nth: int) -> None:
    [fault] = chaos.parse("kill=worker:?@every:5s")
    hit = chaos.victim(fault, nth, TASKS, seed)
    assert hit in CLUSTER.workers
    assert hit == chaos.victim(fault, nth, list(reversed(TASKS)), seed)


def test_a_random_victim_is_everybody_in_turn() -> None:
    [fault] = chaos.parse("kill=?@every:5s")
    hits = [chaos.victim(fault, nth, TASKS, seed=1) for nth in range(1, 400)]
    assert {str(task) for task in hits} == {str(task) for task in TASKS}
    assert all(hits.count(task) > 60 for task in TASKS)
    assert hits != [chaos.victim(fault, nth, TASKS, seed=2) for nth in range(1, 400)]


def test_the_command_tells_faults_in_words_and_refuses_nothing() -> None:
    told = CliRunner().invoke(app, ["chaos", ALL])
    assert told.exit_code == 0
    for words in ("killed (SIGKILL)", "SIGSTOP) for 10 s", "at most 5 Mbit/s", "a random worker is killed", "NaN"):
        assert words in told.output
    assert isinstance(CliRunner().invoke(app, ["chaos", " "]).exception, UsageError)


# --- making them -------------------------------------------------------------------------------------------------


def assigned(folder: Path, text: str, task: str, **values: object) -> Assignment:
    paths = RunPaths(folder)
    paths.create()
    paths.config.write_text("{}")
    settings = Settings(run_id="r", chaos=text, run_dir=str(folder))
    settings = msgspec.structs.replace(settings, **values)
    return Assignment(CLUSTER, Task.parse(task), 1, settings, b"s" * 32, "launcher")


def spoiled(made: injection.Injection, steps: range) -> list[int]:
    """The steps at which the gradient was spoiled."""
    found: list[int] = []
    for step in steps:
        made.before_push(step, lambda step=step: found.append(step))  # type: ignore[misc]
    return found


def test_a_fault_happens_at_its_step_and_once_over_restarts(tmp_path: Path) -> None:
    assignment = assigned(tmp_path, "nan=worker:1@3,nan=worker:1@6,nan=worker:2@4", "worker:1")
    first = injection.of(assignment)
    assert first is not None and spoiled(first, range(1, 5)) == [3]
    again = injection.of(assignment)  # its process was started again, and counts from 1
    assert again is not None and spoiled(again, range(1, 10)) == [6]
    assert injected(tmp_path, chaos.parse(assignment.settings.chaos)) == [
        Injected(fault="nan=worker:1@3", task="worker:1", times=1, steps=[3]),
        Injected(fault="nan=worker:1@6", task="worker:1", times=1, steps=[6]),
        Injected(fault="nan=worker:2@4", task=None, times=0),
    ]


def test_a_timed_fault_of_a_worker_hits_only_its_victim(tmp_path: Path) -> None:
    text = "nan=worker:?@every:10ms"
    hits = {}
    for task in CLUSTER.workers:
        made = injection.of(assigned(tmp_path, text, str(task), chaos_seed=5))
        assert made is not None
        made._began_s, made._timed = time.time() - 3600.0, dict.fromkeys(made._timed, 1)
        hits[task] = spoiled(made, range(1, 101))  # each look finds one that is due
    [fault] = chaos.parse(text)
    for task, steps in hits.items():
        assert steps == [nth for nth in range(1, 101) if chaos.victim(fault, nth, CLUSTER.workers, 5) == task]
    assert sum(map(len, hits.values())) == 100


def test_who_is_not_named_has_no_injection(tmp_path: Path) -> None:
    assert injection.of(assigned(tmp_path, "nan=worker:1@3,kill=worker:?@every:5s", "worker:0")) is None
    assert injection.of(assigned(tmp_path, "", "worker:0")) is None


def test_by_hand_nobody_would_wake_a_stopped_task(tmp_path: Path) -> None:
    assignment = assigned(tmp_path, "stop=worker:1@3:1s", "worker:1")
    with pytest.raises(UsageError, match="nobody would wake"):
        injection.of(msgspec.structs.replace(assignment, source="flags"))
    with pytest.raises(UsageError, match="--run-dir"):
        injection.of(assigned(tmp_path, "nan=worker:1@3", "worker:1", run_dir=None))


def test_a_ps_strikes_when_its_version_is_there_or_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    struck: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda pid, number: struck.append((pid, number)))
    assignment = assigned(tmp_path, "stop=ps:0@3:1s,kill=ps:0@5,kill=worker:0@1", "ps:0")
    made = of_ps(assignment)
    assert isinstance(made, PsFaults)
    made.at_version(2)
    assert struck == []
    made.at_version(3)
    assert len(struck) == 1
    made.at_version(7)  # several rounds were carried at once
    assert len(struck) == 2
    assert of_ps(assignment) is None, "both have happened"


def test_a_task_that_has_ended_is_not_hit_though_its_exit_is_not_taken_in_yet(tmp_path: Path) -> None:
    paths, worker = RunPaths(tmp_path / "run"), Task("worker", 0)
    paths.create()
    settings = Settings(run_id="r", run_dir=str(paths.root), chaos="kill=worker:0@every:1s")
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie, as between an exit and its being read
        made = Chaos(settings, [worker], paths, One(worker, process.pid))
        [fault] = chaos.parse(settings.chaos)
        assert not made.hit(fault, 1)
    assert not FaultLog(paths, worker).done()
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        assert Chaos(settings, [worker], paths, One(worker, process.pid)).hit(fault, 1)
        assert process.wait(60) == -signal.SIGKILL
    assert FaultLog(paths, worker).done() == {fault.text}


class One:
    """One task that the launcher still takes for running."""

    def __init__(self, task: Task, pid: int) -> None:
        self._task, self._pid = task, pid

    def running(self, job: str | None = None) -> list[Task]:
        return [self._task]

    def status(self, task: Task) -> str | None:
        return Forked(self._pid).status()

    def signal(self, task: Task, number: signal.Signals) -> bool:
        os.kill(self._pid, number)
        return True


def test_a_record_stands_on_a_line_of_its_own_behind_half_a_line(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.create()
    task = Task("worker", 0)
    paths.telemetry(task).write_bytes(b'{"t": 1.0, "kind": "tick", "st')
    [fault] = chaos.parse("nan=worker:0@3")
    FaultLog(paths, task).write(fault, 3)
    assert [record.kind for record in read.records(tmp_path)] == ["chaos"]
    assert FaultLog(paths, task).done() == {"nan=worker:0@3"}
