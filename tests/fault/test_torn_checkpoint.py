"""WHAT is left when the writer of a checkpoint dies, or the disk is full? A complete one, whichever moment it was.

The writer runs in a forked process that kills itself at its n-th system call, for every n; a write dies half done.
"""

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from small_checkpoint import STATE, filled, write_step

from paceline.checkpoint.read import load, load_newest, newest, verify
from paceline.checkpoint.retain import retain
from paceline.checkpoint.store import write
from paceline.checkpoint.tensors import Entry
from paceline.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("without_waiting_for_the_disk")
CALLS = ("mkdir", "open", "write", "fsync", "close", "rename", "unlink", "rmdir")


@pytest.fixture
def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process wrote stays without a sync; that is for a host that loses power."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def die_at(number: int) -> None:
    """From now on, the n-th system call of this process that touches files is its last, and not finished."""
    left = number

    def wrapped(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                if name == "write":
                    real(args[0], memoryview(args[1])[: memoryview(args[1]).nbytes // 2])  # type: ignore[arg-type]
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, wrapped(name, getattr(os, name)))


def is_killed_at(number: int, action: Callable[[], object]) -> bool:
    """Do it in a process that dies at its n-th call; False when it was done before that."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            die_at(number)
            action()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the writer failed instead of being killed"
    return os.WIFSIGNALED(status)


def steps_until_done(folder: Path, prepare: Callable[[], object], action: Callable[[], object]) -> Iterator[int]:
    """Kill the action at its first call, its second, … each time on a folder made anew; ends when it was not killed."""
    for number in range(1, 1000):
        shutil.rmtree(folder, ignore_errors=True)
        prepare()
        if not is_killed_at(number, action):
            assert number > 20, "hardly a call was noticed"
            return
        yield number
    pytest.fail("the action never came to its end")


def seed_of(folder: Path) -> int:
    """Which of our checkpoints this is, every byte checked."""
    model = load(folder).model
    return next(s for s in range(10) if all(model[name].data == entry.data for name, entry in filled(s).items()))


@pytest.mark.slow
def test_killed_at_any_call_while_a_further_step_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    seen = set()
    for number in steps_until_done(folder, lambda: write_step(folder, 1), lambda: write_step(folder, 2)):
        last = newest(folder, warn=pytest.fail)
        assert last is not None, number
        assert verify(last) == []
        seen.add(seed_of(last))
        write_step(folder, 3)
        assert not list(folder.glob(".*")), "what the dead writer left was not swept"
        assert verify(folder / "step-00000001") == []
    assert seen == {1, 2}


@pytest.mark.slow
def test_killed_at_any_call_while_the_only_checkpoint_is_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    seen = []
    first, again = (functools.partial(write_step, folder, 5, seed=seed) for seed in (1, 2))
    for number in steps_until_done(folder, first, again):
        last = newest(folder, warn=pytest.fail)
        assert last is not None, number
        seen.append(seed_of(last))
        retain(folder, 3)
        assert [path.name for path in folder.iterdir()] == ["step-00000005"]
        assert seed_of(folder / "step-00000005") == seen[-1]
    assert seen == sorted(seen), "an older one came back"
    assert set(seen) == {1, 2}


@pytest.mark.slow
def test_killed_at_any_call_while_old_ones_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def three() -> None:
        for step in (1, 2, 3):
            write_step(folder, step)

    for _ in steps_until_done(folder, three, lambda: retain(folder, 1)):
        assert newest(folder, warn=pytest.fail) == folder / "step-00000003"
        for left in folder.glob("step-*"):
            assert verify(left) == [], "a folder half removed looks like a checkpoint"
        retain(folder, 1)
        assert [path.name for path in folder.iterdir()] == ["step-00000003"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        pytest.skip(f"NOT TESTED: a full disk needs the right to mount a small one: {done.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True, timeout=60)


def big(seed: int) -> dict[str, Entry]:
    return {"w": Entry("uint8", (1_500_000,), bytes([seed]) * 1_500_000)}


def test_a_full_disk_leaves_the_last_good_checkpoint_and_nothing_else(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    states = [msgspec.structs.replace(STATE, global_step=step) for step in (1, 2, 3)]
    write(folder, big(1), big(2), states[0])
    for _ in range(3):
        with pytest.raises(CheckpointError, match=r"step 2 could not be written .*: No space left on device\. Those"):
            write(folder, big(2), big(3), states[1])
        assert [path.name for path in folder.iterdir()] == ["step-00000001"]
        loaded = load_newest(folder, warn=pytest.fail)
        assert loaded is not None
        assert loaded.state.global_step == 1
        del loaded
    with pytest.raises(CheckpointError, match="No space left on device"):
        write(folder, big(4), big(5), states[0])  # the same step once more
    assert load(folder / "step-00000001").model["w"].data == big(1)["w"].data
    shutil.rmtree(folder / "step-00000001")
    assert verify(write(folder, big(2), big(3), states[1])) == []


def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"step 1200 could not be written to .*file/checkpoints: Not a directory"):
        write(tmp_path / "file" / "checkpoints", {}, {}, STATE)
