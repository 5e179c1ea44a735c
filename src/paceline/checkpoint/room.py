"""Make room for a checkpoint on a full disk, or find another place for the last one.

Called by worker/checkpoints/saver when a checkpoint could not be written. What gives way is what the new one would have
replaced: never the newest checkpoint whose every hash is right, and never what the run was resumed from.
"""

import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

from paceline.checkpoint.manifest import folder_name
from paceline.checkpoint.read import Found, find, newest_whole
from paceline.checkpoint.retain import remove, to_remove, used_in
from paceline.errors import CheckpointError


def give_way(folder: Path, keep: int, in_use: Collection[Path], is_final: bool) -> Path | None:
    """Remove the oldest checkpoint that the next one would replace; for the final one, any but the newest. Return what
    was removed, None if nothing can be spared."""
    whole = newest_whole(folder)
    if whole is None:
        return None
    found = find(folder)
    spared = to_remove(found[found.index(whole) :], 1 if is_final else keep - 1, used_in(folder, in_use))
    if not spared:
        return None
    try:
        remove(spared[-1])
    except OSError:
        return None  # a disk that can only be read
    return spared[-1]


def elsewhere(name: str, places: Collection[Path], write: Callable[[Path], Path]) -> Path | None:
    """Write a checkpoint into a new folder in the first of these places that takes it; return None if none does."""
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
    """Yield the folder in which the command was started, then that of temporary files (TMPDIR)."""
    if first is not None:
        yield first
    with suppress(OSError):
        yield Path(tempfile.gettempdir())


def holds(whole: Found | None, folder: Path, step: int, lineage: int) -> bool:
    """Tell whether the newest whole checkpoint is of this very update."""
    return whole is not None and (whole.path, whole.lineage) == (folder / folder_name(step), lineage)
