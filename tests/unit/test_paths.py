"""Run folder: every file has the name that the contract gives it, and one writer's file is the other's.

Run by `make test`. Touches only its own temporary folder.
"""

import doctest
import os
import re
from pathlib import Path

import pytest

from paceline.cluster.spec import Task
from paceline.errors import UsageError
from paceline.telemetry import paths, summary
from paceline.telemetry.paths import RunPaths, new_run_dir
from paceline.telemetry.read import records
from paceline.telemetry.sink import Sink


def test_examples_in_docstrings_are_true() -> None:
    assert doctest.testmod(paths).failed == 0


def test_names_are_those_of_the_contract(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    named = [run.config, run.cluster, run.logs(Task("ps", 0)), run.telemetry(Task("worker", 1))]
    named += [run.checkpoints, run.summary, run.secret]
    assert [path.relative_to(tmp_path).as_posix() for path in named] == [
        "config.json", "cluster.json", "logs/ps-0.log", "telemetry/worker-1.jsonl", "checkpoints",
        "summary.json", "secret",
    ]  # fmt: skip


def test_what_is_written_at_these_names_is_what_readers_find(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    sink = Sink(run.telemetry(Task("worker", 1)))
    sink.event("start")
    sink.close()
    assert next(iter(records(tmp_path, Task("worker", 1)))).kind == "start"
    assert summary.write(tmp_path, {}) == run.summary


def test_a_new_run_folder_has_its_folders_and_is_the_latest(tmp_path: Path) -> None:
    first, second = new_run_dir(tmp_path / "runs"), new_run_dir(tmp_path / "runs")
    assert first != second
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", second.name)
    assert sorted(entry.name for entry in second.iterdir()) == ["checkpoints", "logs", "telemetry"]
    latest = tmp_path / "runs" / "latest"
    assert latest.resolve() == second.resolve()
    assert os.readlink(latest) == second.name
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_two_runs_of_one_second_with_one_draw_do_not_share_a_folder(tmp_path: Path, monkeypatch) -> None:
    draws = iter(["aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr(paths.secrets, "token_hex", lambda _: next(draws))
    monkeypatch.setattr(paths.time, "strftime", lambda _: "20240101-000000")
    names = [new_run_dir(tmp_path).name for _ in range(2)]
    assert names == ["20240101-000000-aaaa", "20240101-000000-bbbb"]


def test_a_folder_called_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    root = new_run_dir(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([root.name, "latest"])


def test_relative_roots_do_not_follow_the_script(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, made = RunPaths("r1"), new_run_dir()
    monkeypatch.chdir("/")
    assert run.config == tmp_path / "r1" / "config.json"
    assert made.parent == tmp_path / "runs"


def test_the_secret_is_for_the_owner_only(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    run.secret.write_text("old")
    run.secret.chmod(0o644)
    before = os.umask(0)
    try:
        run.write_secret(bytes(range(32)))
    finally:
        os.umask(before)
    assert run.secret.stat().st_mode & 0o777 == 0o600
    assert run.read_secret() == bytes(range(32))


def test_places_that_do_not_work_are_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="No run folder can be made"):
        new_run_dir(tmp_path / "file" / "runs")
    with pytest.raises(UsageError, match="cannot be made"):
        RunPaths(tmp_path / "file").create()
    with pytest.raises(UsageError, match="No readable secret"):
        RunPaths(tmp_path).read_secret()
