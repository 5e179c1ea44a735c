"""What gives way on a full disk, and where else the last checkpoint may go."""

import errno
import os
from pathlib import Path

import pytest
from small_checkpoint import write_step

from paceline.checkpoint.read import newest_whole, verify
from paceline.checkpoint.room import elsewhere, give_way, holds
from paceline.checkpoint.store import is_full
from paceline.errors import CheckpointError


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def flip(checkpoint: Path) -> None:
    """One bit; sizes say nothing."""
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_the_final_one_takes_the_room_of_all_but_the_newest_whole_one(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_step(tmp_path, step)
    flip(write_step(tmp_path, 4))  # newer, and looks whole
    assert give_way(tmp_path, 3, [], is_final=True) == tmp_path / "step-00000001"
    assert give_way(tmp_path, 3, [], is_final=True) == tmp_path / "step-00000002"
    assert give_way(tmp_path, 3, [], is_final=True) is None
    assert steps(tmp_path) == [3, 4] and verify(tmp_path / "step-00000003") == []


def test_one_on_the_way_takes_only_what_it_would_replace(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_step(tmp_path, step)
    assert give_way(tmp_path, 4, [], is_final=False) is None  # there would be four
    assert give_way(tmp_path, 3, [], is_final=False) == tmp_path / "step-00000001"
    assert give_way(tmp_path, 3, [], is_final=False) is None
    assert give_way(tmp_path, 1, [], is_final=False) == tmp_path / "step-00000002"
    assert give_way(tmp_path, 1, [], is_final=False) is None  # never the only one


def test_what_was_resumed_from_and_a_folder_without_a_whole_one_stay(tmp_path: Path) -> None:
    first = write_step(tmp_path / "a", 1)
    write_step(tmp_path / "a", 2)
    assert give_way(tmp_path / "a", 1, [first], is_final=True) is None
    for step in (1, 2):
        flip(write_step(tmp_path / "b", step))
    assert give_way(tmp_path / "b", 1, [], is_final=True) is None
    assert give_way(tmp_path / "none", 1, [], is_final=True) is None


def test_the_same_step_of_the_same_lineage_is_there_already(tmp_path: Path) -> None:
    write_step(tmp_path, 7, lineage=1)
    whole = newest_whole(tmp_path)
    assert holds(whole, tmp_path, 7, 1)
    assert not holds(whole, tmp_path, 8, 1) and not holds(whole, tmp_path, 7, 2) and not holds(None, tmp_path, 7, 1)


def test_the_first_place_that_takes_it_and_nothing_left_in_the_others(tmp_path: Path) -> None:
    for name in ("full", "good"):
        (tmp_path / name).mkdir()

    def write(folder: Path) -> Path:
        if folder.parent.name == "full":
            raise CheckpointError("full") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_step(folder, 5)

    places = [tmp_path / "missing", tmp_path / "full", tmp_path / "good"]
    made = elsewhere("paceline-r", places, write)
    assert made is not None and made.parent.parent == tmp_path / "good" and verify(made) == []
    assert list((tmp_path / "full").iterdir()) == []
    assert elsewhere("paceline-r", places[:2], write) is None


@pytest.mark.parametrize(
    ("number", "wants_room"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False), (errno.EROFS, False)]
)
def test_only_a_disk_without_room_is_helped_by_removing(number: int, wants_room: bool) -> None:
    try:
        raise CheckpointError("x") from OSError(number, os.strerror(number))
    except CheckpointError as error:
        assert is_full(error) is wants_room
