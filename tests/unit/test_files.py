"""Files that lie in a run folder: nothing but plain ones is opened, and no open waits."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline import files
from paceline.cluster import moved
from paceline.cluster.spec import Task
from paceline.errors import UsageError
from paceline.launchers.nursery import open_log
from paceline.launchers.pieces import Piece, keep
from paceline.telemetry import losses, sink
from paceline.telemetry.ledger import Kind, Ledger
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.sink import Sink

VICTIM = b"the user's own\n"


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def hard(path: Path, victim: Path) -> None:
    os.link(victim, path)


def fifo(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def device(path: Path, victim: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path, victim: Path) -> None:
    path.mkdir()


def writes(root: Path, made: Path) -> list[Callable[[], object]]:
    """Everything that writes to a file of that name, in a task, a launcher, and for another host."""
    name = made.relative_to(root).as_posix()
    if name.endswith(".jsonl"):

        def records() -> None:
            task = Sink(made)
            task.event("start", task="ps:0")
            task.close()
            assert task.dropped

        return [lambda: sink.append(made, "over"), records, lambda: keep(root, Piece(name, 0, b"x\n"))]
    if name.endswith(".bin"):
        return [lambda: Ledger(made).write(Kind.PULL), lambda: keep(root, Piece(name, 0, bytes(32)))]
    return [lambda: open_log(made).write(b"printed\n"), lambda: keep(root, Piece(name, 0, b"x\n"))]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("plant", [link, hard, fifo, device, folder])
@pytest.mark.parametrize("name", ["logs/ps-0.log", "telemetry/ps-0.jsonl", "ledger/ps-0.bin"])
def test_what_is_written_goes_nowhere_else_and_nobody_waits(
    name: str, plant: Callable[[Path, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_told", set())
    victim, made = tmp_path / "victim", tmp_path / "run" / name
    victim.write_bytes(VICTIM)
    made.parent.mkdir(parents=True)
    plant(made, victim)
    for write in writes(tmp_path / "run", made):
        try:
            write()
        except OSError as error:
            assert made.name in str(error)
    assert victim.read_bytes() == VICTIM


@pytest.mark.timeout(60)
@pytest.mark.parametrize("plant", [link, fifo, device, folder])
def test_what_is_read_is_small_and_plain(plant: Callable[[Path, Path], None], tmp_path: Path) -> None:
    victim, paths = tmp_path / "victim", RunPaths(tmp_path / "run")
    victim.write_text('{"plain": true, "ps": ["a:1"], "worker": ["b:1"], "ps:0": "c:1"}')
    paths.root.mkdir()
    for path in (paths.config, paths.cluster, paths.secret, paths.root / moved.FILE):
        plant(path, victim)
    assert not paths.is_plain and paths.read_by_hand() is None
    with pytest.raises(UsageError, match="No readable cluster"):
        paths.read_cluster()
    with pytest.raises(UsageError, match="No readable secret"):
        paths.read_secret()
    assert moved.address(paths.root, Task("ps", 0), "a:1") == "a:1"


def test_a_folder_on_the_way_that_is_a_link_is_not_entered(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    root.mkdir()
    for name in ("logs", "telemetry", "ledger"):
        (root / name).symlink_to(outside)
    sink.append(root / "telemetry" / "ps-0.jsonl", "over")
    open_log(root / "logs" / "ps-0.log").write(b"printed\n")
    with pytest.raises(OSError, match="symbolic link"):
        Ledger(root / "ledger" / "ps-0.bin")
    assert list(outside.iterdir()) == []


def test_small_files_have_a_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(10))
    assert files.content(tmp_path, "file", 10) == bytes(10)
    with pytest.raises(files.Unusable, match="larger than 9 bytes"):
        files.content(tmp_path, "file", 9)


def test_a_log_that_cannot_be_opened_keeps_no_task_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_bytes(b"")  # no folder
    with open_log(tmp_path / "logs" / "ps-0.log") as output:
        output.write(b"printed\n")
    assert "logs/ps-0.log cannot be written" in capfd.readouterr().err
    with open_log(tmp_path / "removed" / "logs" / "ps-0.log") as output:  # is made again
        output.write(b"printed\n")
    assert (tmp_path / "removed" / "logs" / "ps-0.log").read_bytes() == b"printed\n"
