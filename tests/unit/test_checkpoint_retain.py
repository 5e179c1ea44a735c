"""WHICH checkpoints stay? The newest, those in use, and no folder of a dead writer."""

from pathlib import Path

import pytest
from small_checkpoint import write_step

from paceline.checkpoint.read import Found, newest
from paceline.checkpoint.retain import retain, to_remove


def some(*steps: int, damaged: tuple[int, ...] = ()) -> list[Found]:
    """As `find` gives them: complete ones newest first, then damaged ones."""
    complete = [Found(Path(str(s)), s, 0) for s in sorted(steps, reverse=True)]
    return complete + [Found(Path(str(s)), s, -1, "cut") for s in sorted(damaged, reverse=True)]


@pytest.mark.parametrize(
    ("found", "keep", "gone"),
    [
        (some(), 3, []),
        (some(1, 2, 3), 3, []),
        (some(1, 2, 3, 4, 5), 3, [2, 1]),
        (some(1, 2), 1, [1]),
        (some(1, 2), 0, [1]),
        (some(5, damaged=(1, 9)), 1, [1]),
        (some(damaged=(1, 9)), 1, []),
        (some(1, 2, 3, damaged=(9,)), 2, [1]),
    ],
)
def test_the_newest_complete_ones_stay(found: list[Found], keep: int, gone: list[int]) -> None:
    assert to_remove(found, keep) == [Path(str(step)) for step in gone]


def test_what_is_in_use_stays() -> None:
    assert to_remove(some(1, 2, 3), 1, in_use=[Path("1")]) == [Path("2")]


def test_a_new_lineage_is_newer_than_a_higher_step_of_the_old_one(tmp_path: Path) -> None:
    for step, lineage in ((800, 0), (900, 0), (500, 1)):
        write_step(tmp_path, step, lineage=lineage)
    assert [path.name for path in retain(tmp_path, 1)] == ["step-00000900", "step-00000800"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000500"]


def test_the_one_resumed_from_stays_beside_a_newer_one_that_only_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = write_step(tmp_path, 500)
    write_step(tmp_path, 900)
    monkeypatch.chdir(tmp_path.parent)
    assert retain(tmp_path, 1, in_use=[Path(tmp_path.name) / good.name]) == []
    assert retain(tmp_path, 1) == [good]


def test_what_dead_writers_left_is_swept(tmp_path: Path) -> None:
    folder = write_step(tmp_path, 1)
    for name in (".step-00000002.123-1", ".step-00000001.older", ".step-00000003.gone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("a user's own")
    assert retain(tmp_path, 3) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-00000001"]
    assert newest(tmp_path) == folder
