"""cluster/moved: where a ps is that had to be started elsewhere."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.cluster import moved
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import UsageError

PS_0, PS_1 = Task("ps", 0), Task("ps", 1)
CLUSTER = ClusterSpec({"ps": ["a:1", "b:1"], "worker": ["c:1"]})


def test_what_is_said_of_others_stays(tmp_path: Path) -> None:
    moved.write(tmp_path, {PS_0: "x:1"})
    moved.write(tmp_path, {PS_1: "y:1"})
    moved.write(tmp_path, {PS_0: "z:1"})
    assert list(moved.Whereabouts(CLUSTER, tmp_path)) == ["z:1", "y:1"]
    assert moved.address(tmp_path, Task("ps", 2), "own:1") == "own:1"


def test_many_move_at_once(tmp_path: Path) -> None:
    tasks = [Task("ps", index) for index in range(16)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda task: moved.write(tmp_path, {task: f"x:{task.index + 1}"}), tasks))
    assert [moved.address(tmp_path, task, "") for task in tasks] == [f"x:{task.index + 1}" for task in tasks]


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b'{"ps:0": 1}', b'{"ps:0": "no port"}'])
def test_it_never_leads_back(tmp_path: Path, content: bytes | None) -> None:
    """An address that was read once holds, also while the file is gone or damaged: the old ps may still live."""
    where = moved.Whereabouts(CLUSTER, tmp_path)
    assert where[0] == "a:1"
    moved.write(tmp_path, {PS_0: "x:1"})
    assert where[0] == "x:1"
    if content is None:
        (tmp_path / moved.FILE).unlink()
    else:
        (tmp_path / moved.FILE).write_bytes(content)
    assert where[0] == "x:1" and where[:] == ["x:1", "b:1"]


def test_another_start_forgets_it(tmp_path: Path) -> None:
    moved.write(tmp_path, {PS_0: "x:1"})
    moved.forget(tmp_path)
    moved.forget(tmp_path)
    assert moved.address(tmp_path, PS_0, "a:1") == "a:1" and list(tmp_path.iterdir()) == []


def test_an_address_that_none_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no port"):
        moved.write(tmp_path, {PS_0: "x"})
    assert not (tmp_path / moved.FILE).exists()
