"""CAN a run go on from where `--resume` says? Checked before anything is made, and said in the first lines.

Called by launchers/local, hosts/many, ray/on_ray and `paceline emit`. The chief loads the checkpoint itself.
"""

from pathlib import Path

import msgspec

from paceline.checkpoint.request import AUTO, NONE, requested
from paceline.cluster.settings import Settings
from paceline.launchers.closing import shown
from paceline.telemetry.paths import RunPaths


class Resumption(msgspec.Struct, frozen=True):
    """What `--resume` names, every byte of which was checked."""

    settings: Settings  # where a folder was named, the checkpoint in it
    lines: list[str] = []  # what is resumed, and what was left out as damaged


def check(settings: Settings, run_dir: str | None) -> Resumption:
    """Find and check the checkpoint; UsageError where there is none that can be used."""
    if settings.resume == NONE:
        return Resumption(settings)
    lines: list[str] = []
    folder = RunPaths(run_dir).checkpoints if run_dir is not None else None
    loaded = requested(settings.resume, folder, lines.append)
    if loaded is None:
        return Resumption(settings, [*lines, f"Nothing to resume in {run_dir}: training starts at step 0"])
    if settings.resume != AUTO:
        settings = msgspec.structs.replace(settings, resume=str(loaded.path))
    path = loaded.path if loaded.path.is_relative_to(Path.cwd()) else loaded.path.resolve()
    return Resumption(settings, [*lines, f"Resuming from {shown(path)}: global step {loaded.state.global_step}"])
