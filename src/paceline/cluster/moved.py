"""WHERE is a ps that had to be started elsewhere? moved.json in the run folder: its task, and its address now.

Written by whoever starts a ps on another host (`paceline serve --at`, a launcher), read by everybody who connects, each
time: the addresses that the tasks were started with stay as they are. Must never lead back: an address that was read
once holds until another one is read, also while the file cannot be.
"""

import fcntl
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import overload

import msgspec

from paceline import files
from paceline.cluster.spec import ClusterSpec, Task, split_address
from paceline.errors import UsageError

FILE, LOCK = "moved.json", "moved.lock"


def write(run_dir: Path | str, moves: Mapping[Task, str]) -> None:
    """From now on these tasks are at these addresses; what the file says of others stays."""
    folder = Path(run_dir)
    for address in moves.values():
        split_address(address)
    with (folder / LOCK).open("wb") as lock:
        with suppress(OSError):  # a file system without locks: two moves in one moment are the user's own
            fcntl.flock(lock, fcntl.LOCK_EX)
        told = {**_read(folder), **{str(task): address for task, address in moves.items()}}
        draft = folder / f".{FILE}-{os.getpid()}"
        draft.write_bytes(msgspec.json.encode(told))
        os.replace(draft, folder / FILE)


def address(run_dir: Path | str | None, task: Task, default: str) -> str:
    """Where this task is now.

    >>> address(None, Task("ps", 0), "a:2222")
    'a:2222'
    """
    return default if run_dir is None else _read(Path(run_dir)).get(str(task), default)


def forget(run_dir: Path | str) -> None:
    """Another start of the run: everybody is where the cluster says."""
    for name in (FILE, LOCK):
        (Path(run_dir) / name).unlink(missing_ok=True)


def _read(folder: Path) -> dict[str, str]:
    """What the file says; nothing where there is none, or none that can be read."""
    try:
        told = msgspec.json.decode(files.content(folder, FILE), type=dict[str, str])
        for each in told.values():
            split_address(each)
    except (OSError, msgspec.MsgspecError, UsageError):
        return {}
    return told


class Whereabouts(Sequence[str]):
    """The addresses of a cluster's ps by index; each is looked up when it is asked for.

    >>> Whereabouts(ClusterSpec({"ps": ["a:2222"], "worker": ["b:2222"]}), None)[0]
    'a:2222'
    """

    def __init__(self, cluster: ClusterSpec, run_dir: Path | str | None) -> None:
        self._run_dir = run_dir
        self._known = [cluster.address(task) for task in cluster.ps]

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        self._known[index] = address(self._run_dir, Task("ps", index), self._known[index])
        return self._known[index]

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"Whereabouts({', '.join(self._known)})"
