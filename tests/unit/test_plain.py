"""Plain runs, as far as no process is needed: who may be slowed how long, what looks at processes add up to."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cluster import plain
from paceline.cluster.settings import Settings
from paceline.cluster.sources import tf_config
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import UsageError
from paceline.launchers import live
from paceline.launchers import plain as launcher
from paceline.launchers.crew import Run
from paceline.launchers.entry import Program
from paceline.launchers.slowing import Pace
from paceline.launchers.supervisor import End
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.records import Tick
from paceline.telemetry.sampler import Sampler, Utilisation
from paceline.telemetry.sink import append
from paceline.telemetry.usage import Look

WORKER = Task("worker", 1)


@given(
    factor=st.floats(1.1, 20),
    turns=st.lists(st.tuples(st.floats(0.001, 0.5), st.floats(0, 0.3)), min_size=30, max_size=60),
)
def test_a_pace_holds_though_no_sleep_is_exact(factor: float, turns: list[tuple[float, float]]) -> None:
    """Whatever a stop takes longer than asked for is taken off the next ones."""
    pace, ran_s, stood_s = Pace(factor), 0.0, 0.0
    for run_s, late_s in turns:
        stop_s = pace.stop_s(run_s)
        assert stop_s >= 0
        pace.stood(stop_s + late_s)
        ran_s += run_s
        stood_s += stop_s + late_s
    owed_s = ran_s * (factor - 1)
    assert stood_s >= owed_s - 1e-6
    lates_s = sum(late_s for _, late_s in turns)
    assert stood_s <= owed_s + lates_s + 1e-6


def test_a_pace_is_exact_where_stops_are_late_and_short_enough() -> None:
    pace, stood_s = Pace(4.2), 0.0
    for _ in range(1000):
        asked_s = pace.stop_s(0.02)
        pace.stood(asked_s + 0.01)
        stood_s += asked_s + 0.01
    assert (1000 * 0.02 + stood_s) / (1000 * 0.02) == pytest.approx(4.2, abs=0.01)


def test_what_a_task_used() -> None:
    sampler = Sampler()
    sampler.begin(WORKER, 100.0)
    cores = [
        sampler.note(WORKER, Look(at_s=at_s, cpu_s=cpu_s, rss_bytes=rss))
        for at_s, cpu_s, rss in ((101.0, 0.5, 10), (102.0, 2.0, 30), (103.0, 1.9, 20), (103.05, 2.0, 20))
    ]
    assert cores == pytest.approx([0.5, 1.5, 0.0, 0.0]), "a child that ended takes its time along"
    sampler.end(WORKER, 3.0, 106.0)
    assert sampler.utilisation(WORKER) == Utilisation(cpu_s=3.0, cores_mean=0.5, cores_max=1.5, rss_bytes_max=30)
    assert sampler.utilisation(Task("ps", 0)) == Utilisation()


def test_a_look_too_soon_makes_no_maximum() -> None:
    sampler = Sampler()
    sampler.begin(WORKER, 100.0)
    sampler.note(WORKER, Look(at_s=100.001, cpu_s=0.1, rss_bytes=0))
    sampler.end(WORKER, 0.2, 101.0)
    assert sampler.utilisation(WORKER).cores_max == 0.2


def test_one_that_is_gone_is_not_seen() -> None:
    sampler = Sampler()
    sampler.begin(WORKER, 0.0)
    assert sampler.look({WORKER: 2**22 + 1}, 1.0) == {}


def test_tf_config_is_what_we_read_ourselves() -> None:
    cluster = ClusterSpec({"ps": ["a:1", "b:1"], "worker": ["a:2", "b:2"]})
    found = tf_config(plain.tf_config_of(cluster, WORKER))
    assert found is not None
    assert found[0] == cluster and (found[1].type, found[1].index) == ("worker", 1)


def test_every_setting_is_meant_or_refused() -> None:
    """A new setting is refused with --plain until somebody says that it is meant."""
    other: dict[str, object] = {"str": "other", "int": 7, "float": 7.5, "bool": True}
    default = Settings(run_id="r", plain=True)
    plain.check(default)
    for name in set(Settings.__struct_fields__) - plain.MEANT:
        value = getattr(default, name)
        changed = not value if isinstance(value, bool) else other[type(value).__name__] if value is not None else 1
        with pytest.raises(UsageError, match=name.replace("_", "-")):
            plain.check(Settings(**{"run_id": "r", "plain": True, name: changed}))  # type: ignore[arg-type]


def test_what_a_program_finds_in_its_environment_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain program is not ours: what is put there may change what it does."""
    cluster = ClusterSpec({"ps": ["a:1"], "worker": ["a:2"]})
    settings, paths = Settings(run_id="r", plain=True), RunPaths(tmp_path)
    run = Run(program=Program(script="t.py"), cluster=cluster, settings=settings, paths=paths, threads="2")
    monkeypatch.setattr(os, "environ", {"TF_NUM_INTEROP_THREADS": "7"})
    assert len(run.environ) > 3 and run.environ["TF_NUM_INTEROP_THREADS"] == "7", "the user's own stays"
    assert run.environ["GOMP_SPINCOUNT"] == "1000"
    page = (Path(__file__).parents[2] / "docs" / "run_plain.md").read_text()
    assert [name for name in (*run.environ, "TF_CONFIG", "CUDA_VISIBLE_DEVICES") if f"`{name}`" not in page] == []
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "ACTIVE"})
    assert "GOMP_SPINCOUNT" not in run.environ, "whoever says how OpenMP's threads wait means it"


@pytest.mark.parametrize(
    ("failures", "end", "code", "error"),
    [
        ({}, End.WORKERS_ENDED, 0, None),
        ({}, End.OUR_FAULT, 3, "the launcher failed"),
        ({WORKER: 1}, End.INTERRUPTED, 130, "interrupted"),
        ({WORKER: 1}, End.WORKERS_ENDED, 1, "worker:1 failed with exit code 1"),
        ({WORKER: 2}, End.WORKERS_ENDED, 2, "worker:1 failed with exit code 2"),
        ({WORKER: 3}, End.WORKERS_ENDED, 1, "worker:1 failed with exit code 3"),
        ({WORKER: 4}, End.WORKERS_ENDED, 1, "worker:1 failed with exit code 4"),
        ({WORKER: -11}, End.WORKERS_ENDED, 1, "worker:1 was killed by SIGSEGV"),
        ({Task("ps", 0): 4}, End.PS_LOST, 3, "ps:0 failed with exit code 4"),
    ],
)
def test_exit_codes_of_a_program_that_is_not_ours_mean_nothing_to_us(
    failures: dict[Task, int], end: End, code: int, error: str | None
) -> None:
    """But 2, which argparse has taught everybody."""
    assert launcher.verdict(failures, end) == (code, error)


def test_what_one_sees_of_a_plain_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = Tick(cores=0.756, rss_bytes=300 << 20, phase="runs", is_seen=True)
    assert live.row(WORKER, seen, None) == ("worker:1", "", "", "", "0.76 cores, 300 MiB", "runs")
    paths = RunPaths(tmp_path)
    paths.create()
    for task in (Task("ps", 0), WORKER):
        append(paths.telemetry(task), "tick", task=str(task), cores=0.5, rss_bytes=1 << 20, phase="runs", is_seen=True)
    view = live.PlainLines(ClusterSpec({"ps": ["a:1"], "worker": ["a:2", "b:2"]}), paths)
    view.update({WORKER: 0})
    assert capsys.readouterr().out.strip().endswith("s] ps:0 0.50 cores, 1 MiB | worker:1 ended")
