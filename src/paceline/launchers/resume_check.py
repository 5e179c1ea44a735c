"""Find and check what `--resume` names before a run is made, so that a start which cannot resume is refused.

Called by launchers/local, hosts/many, ray/on_ray and `paceline emit`. The chief loads the checkpoint itself.
"""

import tokenize
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.checkpoint.request import AUTO, NONE, requested
from paceline.checkpoint.state import State
from paceline.cluster.settings import Settings
from paceline.errors import UsageError
from paceline.launchers.closing import shown
from paceline.launchers.entry import Program
from paceline.telemetry.paths import RunPaths


def check(settings: Settings, run_dir: str | None, program: Program) -> tuple[Settings, list[str]]:
    """Find and check the checkpoint. Return the settings with its path where they named a folder, and lines that say
    what is resumed, and what was left out as damaged. Refuse if no checkpoint can be used, or if the script's loop
    would begin again; the worker checks the loop, too, because it knows which one it is in."""
    if settings.resume == NONE:
        return settings, []
    lines: list[str] = []
    folder = RunPaths(run_dir).checkpoints if run_dir is not None else None
    loaded = requested(settings.resume, folder, lines.append)
    if loaded is None:
        return settings, [*lines, f"Nothing to resume in {run_dir}: training starts at step 0"]
    refuse_plain_loop(loaded.state, program, f"--resume {settings.resume}")
    if settings.resume != AUTO:
        settings = msgspec.structs.replace(settings, resume=str(loaded.path))
    path = loaded.path if loaded.path.is_relative_to(Path.cwd()) else loaded.path.resolve()
    return settings, [*lines, f"Resuming from {shown(path)}: global step {loaded.state.global_step}"]


def refuse_plain_loop(state: State, program: Program, asked: str) -> None:
    """Refuse to resume a script that still has the loop which made the checkpoint and would count from 0 again."""
    loop = state.loop
    if not (loop.begins_again and loop.text and state.global_step):
        return
    own = Path(program.script)
    path = own if own.name == Path(loop.file).name and not program.is_module else Path(loop.file)
    with suppress(OSError, SyntaxError, UnicodeDecodeError), tokenize.open(path) as source:  # in its own encoding
        if loop.stands_in(source.read()):
            raise UsageError(loop.refusal(asked, state.global_step))
