"""WHAT must happen to a run folder before a run begins in it? What an earlier one has told is put aside.

Called by launchers/local, and on other hosts by launchers/host_agent.
"""

from pathlib import Path

import msgspec

from paceline.cluster import moved
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
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
