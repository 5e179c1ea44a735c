"""WHO may still come? A worker that joins a run which trains already, found by its run folder.

Called by `paceline serve --join`. Must never start anything: it says which task this process becomes.

1. the folder says which cluster, which settings, which program; 2. ps:0 says who is there; 3. a place that nobody
has is taken, and held: two that join at the same moment on one host get different ones.
"""

import os
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from paceline import files
from paceline.cluster.discovery import Assignment
from paceline.cluster.settings import Settings
from paceline.cluster.spec import Task
from paceline.errors import ProtocolError, UsageError
from paceline.launchers import task as tasks
from paceline.launchers.entry import Program
from paceline.telemetry import read
from paceline.telemetry.paths import RunPaths
from paceline.wire import messages as m
from paceline.worker.reach import Running, running

TRY_S = 10.0  # a run that has just been started may not listen yet
PAUSE_S = 0.2


class Config(Settings, frozen=True, kw_only=True):
    """What config.json holds: the settings, what the workers run, and where they were started."""

    program: Program
    cwd: str = "."

    @property
    def settings(self) -> Settings:
        """The settings alone."""
        return Settings(**{name: getattr(self, name) for name in Settings.__struct_fields__})


def read_config(run_dir: Path | str) -> Config:
    """The run's own choices."""
    path = RunPaths(run_dir).config
    try:
        return msgspec.json.decode(files.content(path.parent, path.name), type=Config)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{run_dir} is no run folder of `paceline run`: {path.name} cannot be read ({error})."
        ) from None


def program_of(config: Config) -> Program:
    """What the run's own workers run, also from another folder than the run was started in."""
    program = config.program
    if program.is_module:
        return program
    return msgspec.structs.replace(program, script=os.path.join(config.cwd, program.script))


def join(run_dir: Path | str, index: int | None = None) -> Assignment:
    """This process's place in the run: worker `index`, or the first that is free; UsageError when there is none."""
    run, config = running(run_dir), read_config(run_dir)
    status = ask_status(run)
    free = free_places(run, status)
    if index is not None:
        task = Task("worker", index)
        run.cluster.address(task)
        if task not in free:
            raise UsageError(f"{task} of this run is there, or has done its share; {_whom_instead(free)}.")
        tasks.hold(run.cluster, task)
    else:
        task = first_held(run, free)
    settings = msgspec.structs.replace(config.settings, run_dir=str(RunPaths(run_dir).root))
    return Assignment(run.cluster, task, int(time.time()), settings, run.secret, tasks.JOINED)


def ask_status(run: Running) -> m.Status:
    """Who is there; a ps that does not listen yet is asked again for a while."""
    deadline = time.monotonic() + TRY_S
    while True:
        try:
            channel = run.connect()
            break
        except UsageError:
            if time.monotonic() >= deadline or RunPaths(run.name).summary.exists():
                raise
            time.sleep(PAUSE_S)  # nobody can wake us
    with closing(channel):
        reply = channel.ask(m.AskStatus())[0]
    if not isinstance(reply, m.Status):
        raise ProtocolError(f"ps:0 answered AskStatus with {type(reply).__name__}")
    return reply


def free_places(run: Running, status: m.Status) -> list[Task]:
    """The workers that nobody is: those that never came first, then those that were lost."""
    workers, _ = read.reports(run.name)
    came = {worker.task for worker in workers}
    done = {worker.task for worker in workers if not worker.is_lost}  # ps:0 lets nobody do another one's share again
    taken = {*status.live, *status.missing}
    free = [task for index, task in enumerate(run.cluster.workers) if index not in taken and str(task) not in done]
    return sorted(free, key=lambda task: str(task) in came)


def first_held(run: Running, free: Sequence[Task]) -> Task:
    """The first place whose address nobody has taken meanwhile."""
    for task in free:
        try:
            tasks.hold(run.cluster, task)
        except UsageError:
            continue
        return task
    num = len(run.cluster.workers)
    raise UsageError(
        f"All {num} workers of this run are there, or have done their share; to leave room for more, "
        f"start a run with --workers {num}:{num + 1}."
    )


def _whom_instead(free: Sequence[Task]) -> str:
    return f"free: {', '.join(str(task) for task in sorted(free))}" if free else "and nobody else is missing"
