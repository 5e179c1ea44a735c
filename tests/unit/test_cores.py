"""HOW MANY cores, and how much memory, are there to divide? Not more than a container's quota."""

import os
from pathlib import Path

import psutil
import pytest

import paceline
from paceline.cluster import cores
from paceline.launchers import memory
from paceline.launchers.hosts import machine


@pytest.mark.parametrize(
    ("text", "count"), [("200000 100000\n", 2), ("150000 100000\n", 2), ("5000 100000\n", 1), ("max 100000\n", 8)]
)
def test_a_quota_counts(text: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "cpu.max")
    assert cores.usable_cores() == count
    monkeypatch.setattr(cores, "QUOTA", tmp_path / "none")
    assert cores.usable_cores() == 8


@pytest.mark.parametrize("text", ["512000000\n", "max\n"])
def test_a_containers_memory_counts_for_whoever_asks(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(text)
    monkeypatch.setattr(memory, "LIMIT", tmp_path / "memory.max")
    real = psutil.virtual_memory().total / memory.MB
    assert memory.total_mb() == machine.look().memory_mb == (512.0 if text[0] == "5" else real)


def test_a_machine_is_told_by_all_files_of_ours() -> None:
    whole = machine.digest(Path(paceline.__file__).parent)
    assert machine.look().sources == whole != machine.digest(Path(machine.__file__).parents[1])
