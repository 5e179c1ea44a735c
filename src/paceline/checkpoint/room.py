"""Make room for a checkpoint on a full disk, or find another place for the last one.

Called by worker/saver when a checkpoint could not be written. What gives way is what the new one would have replaced:
never the newest checkpoint whose every hash is right, and never what the run was resumed from.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

from paceline.checkpoint.manifest import folder_name
from paceline.checkpoint.read import Found, find, verify
from paceline.checkpoint.retain import to_remove, used_in
from paceline.errors import CheckpointError


def newest_whole(folder: Path) -> Found | None:
    """The newest checkpoint whose every byte is right."""
    return next((each for each in find(folder) if each.is_complete and not verify(each.path)), None)


def give_way(folder: Path, keep: int, in_use: Collection[Path], is_final: bool) -> Path | None:
    """Remove the oldest checkpoint that the next one would replace; for the final one, any but the newest.

    Returns what was removed; None when nothing can be spared.
    """
    whole = newest_whole(folder)
    if whole is None:
        return None
    found = find(folder)
    spared = to_remove(found[found.index(whole) :], 1 if is_final else keep - 1, used_in(folder, in_use))
    if not spared:
        return None
    hidden = folder / f".{spared[-1].name.lstrip('.')}.gone"  # half removed, it must not look like a checkpoint
    try:
        os.rename(spared[-1], hidden)
        shutil.rmtree(hidden)
    except OSError:
        return None  # a disk that can only be read
    return spared[-1]


def elsewhere(name: str, places: Collection[Path], write: Callable[[Path], Path]) -> Path | None:
    """Write it into a new folder in the first of these places that takes it; None when none does."""
    for place in places:
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=place))  # others may write to a place like /tmp
        except OSError:
            continue
        try:
            return write(folder)
        except CheckpointError:
            shutil.rmtree(folder, ignore_errors=True)
    return None


def other_places(first: Path | None) -> Iterator[Path]:
    """Where the command was started, then where temporary files go (TMPDIR)."""
    if first is not None:
        yield first
    with suppress(OSError):
        yield Path(tempfile.gettempdir())


def holds(whole: Found | None, folder: Path, step: int, lineage: int) -> bool:
    """Whether this very update is saved already."""
    return whole is not None and (whole.path, whole.lineage) == (folder / folder_name(step), lineage)
