"""WHAT happens to a run folder before any task runs? What an earlier run has told is put aside; a failure is told.

Called by launchers/local, hosts/many and ray/on_ray.
"""

from pathlib import Path

import msgspec

from paceline import files
from paceline.cluster import moved
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec
from paceline.telemetry import summary
from paceline.telemetry.ledgers import set_aside
from paceline.telemetry.paths import RunPaths


def put_aside(paths: RunPaths) -> None:
    """What an earlier run in this folder has told is no news of this one; checkpoints and logs go on."""
    paths.summary.unlink(missing_ok=True)
    moved.forget(paths.root)
    set_aside(paths.root)
    told = list(paths.telemetry_folder.glob("*.jsonl"))
    if told:
        number = 1 + sum(1 for _ in paths.telemetry_folder.glob("earlier-*"))
        aside = paths.telemetry_folder / f"earlier-{number}"
        aside.mkdir()
        for path in told:
            path.rename(aside / path.name)


def write_json(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.format(files.as_json(value), indent=2) + b"\n")


def write_failure(settings: Settings, cluster: ClusterSpec, paths: RunPaths, error: str) -> None:
    """summary.json of a run that failed before any task of it was started."""
    told = summary.build(settings, cluster, ([], []), ok=False, wall_s=0.0, restarts=0, lost=[], error=error)
    summary.write(paths.root, told)
