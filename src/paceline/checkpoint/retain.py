"""WHICH checkpoints stay? The newest `--keep`; older ones, and what dead writers left, are removed.

Called by the worker that saves, after each save. `to_remove` decides and is pure; `retain` does it. Never removes the
newest complete checkpoint, nor one that the caller says is in use.
"""

import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from paceline.checkpoint.read import Found, find
from paceline.checkpoint.store import sweep
from paceline.errors import CheckpointError


def to_remove(found: Sequence[Found], keep: int, in_use: Collection[Path] = ()) -> list[Path]:
    """Of checkpoints, the newest first: the complete ones beyond `keep`, and damaged ones older than all that stay.

    A damaged one that is newer stays: someone may want to know why. `keep` counts complete ones only.
    """
    complete = [each for each in found if each.is_complete]
    kept = complete[: max(1, keep)]
    if not kept:
        return []
    oldest = min(each.global_step for each in kept)
    gone = complete[len(kept) :] + [each for each in found if not each.is_complete and each.global_step < oldest]
    return [each.path for each in gone if each.path not in in_use]


def used_in(folder: Path, in_use: Collection[Path]) -> list[Path]:
    """Return those checkpoints that lie in this folder, as paths below it."""
    return [folder / path.name for path in in_use if path.resolve().parent == folder.resolve()]


def remove(path: Path) -> None:
    """Remove a checkpoint; until that is done it has another name, because a part of it must not look like one."""
    hidden = path.with_name(f".{path.name.lstrip('.')}.gone")
    os.rename(path, hidden)
    shutil.rmtree(hidden)


def retain(folder: Path, keep: int, in_use: Collection[Path] = ()) -> list[Path]:
    """Remove what need not stay; returns what was removed. `in_use`: a checkpoint that training was resumed from, until
    this run has written one that can take its place."""
    try:
        sweep(folder)
        gone = to_remove(find(folder), keep, used_in(folder, in_use))
        for path in reversed(gone):  # the oldest first
            remove(path)
    except OSError as error:
        raise CheckpointError(f"Old checkpoints in {folder} could not be removed: {error}.") from error
    return gone
