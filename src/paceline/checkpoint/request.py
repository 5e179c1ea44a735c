"""Load the checkpoint that `--resume` asks for, every byte checked, so that a damaged one is found before a start.

Called by the launcher before it makes a run, and by the chief that loads the checkpoint. What cannot be resumed is a
UsageError: a run must never begin anew because the checkpoint that was asked for is damaged.
"""

from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint import read
from paceline.checkpoint.manifest import MANIFEST
from paceline.checkpoint.read import Loaded
from paceline.errors import CheckpointError, UsageError

AUTO, NONE = "auto", "none"
CHOICES = "give a checkpoint, a run folder, auto or none"


def requested(resume: str, checkpoints: Path | None, warn: Callable[[str], None]) -> Loaded | None:
    """Load what `--resume` means: with auto the newest whole checkpoint of the run folder, None if it has none yet; a
    path must be one, or a folder that has one. `warn` hears of damaged ones that are left out."""
    if resume == NONE:
        return None
    if not resume:
        raise UsageError(f"--resume '': there is no such folder; {CHOICES}.")
    if resume != AUTO:
        return at(Path(resume), warn, f"--resume {resume!r}", CHOICES)
    if checkpoints is None:
        raise UsageError("--resume auto looks into the run folder, and this run has none: give --run-dir.")
    try:
        return read.load_newest(checkpoints, warn)
    except CheckpointError as error:
        raise UsageError(
            f"--resume auto: {error} Choose another --run-dir to start anew, or name another checkpoint with --resume."
        ) from None


def at(path: Path, warn: Callable[[str], None], asked: str, choices: str) -> Loaded:
    """Load the checkpoint at a path, or the newest whole one of the run folder there. A refusal begins with what was
    `asked`, and names the `choices`."""
    if not path.is_dir():
        raise UsageError(f"{asked}: there is no such folder; {choices}.")
    try:
        if (path / MANIFEST).exists():
            return read.load(path)
        found = read.load_newest(read.folder_in(path), warn)
    except CheckpointError as error:
        raise UsageError(f"{asked}: {error}") from None
    if found is None:
        raise UsageError(f"{asked}: there is no whole checkpoint in {read.folder_in(path)}; {choices}.")
    return found
