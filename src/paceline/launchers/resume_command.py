"""Write the command that resumes a run: the one that started it, with its folder and `--resume auto`; with the
checkpoint itself where that lies elsewhere.

Called by launchers/local for the last block of a run. Pure. Must never repeat faults that were injected on purpose.
"""

import shlex
from collections.abc import Sequence

import msgspec

from paceline.cluster.settings import Settings
from paceline.launchers.entry import Program

Tasks = int | tuple[str, ...]  # how many, or at which addresses
OWN = ("run_id", "run_dir", "resume", "started_workers", "min_workers", "chaos", "chaos_seed")  # not by name and value


def command(
    program: Program, ps: Tasks, workers: Tasks, settings: Settings, folder: str, hosts: tuple[str, ...] | None = None
) -> str:
    """The command, as one would type it in the folder where the run was started; `hosts`: the flags that name them.

    >>> command(Program(script="train.py", args=("--lr", "1")), 1, 2, Settings(run_id="r", mode="sync"), "runs/r")
    'paceline run --run-dir runs/r --resume auto --ps 1 --workers 2 --mode sync train.py --lr 1'
    """
    words = ["paceline", "run", "--run-dir", folder, "--resume", "auto", *(hosts or ())]
    words += tasks("ps", ps, None) + tasks("worker", workers, settings.started_workers)
    words += flags(settings)
    words += ["-m"] if program.is_module else []
    return shlex.join([*words, program.script, *program.args])


def from_elsewhere(command: str, model: str) -> str:
    """Change such a command for a checkpoint outside of the run folder, which begins a run of its own.

    >>> from_elsewhere("paceline run --run-dir runs/r --resume auto --ps 1 train.py", "/tmp/r/step-00000007")
    'paceline run --resume /tmp/r/step-00000007 --ps 1 train.py'
    """
    words = shlex.split(command)
    if "--run-dir" not in words:
        return command
    at = words.index("--run-dir")
    del words[at : at + 2]
    words[words.index("--resume") + 1] = model
    return shlex.join(words)


def tasks(job: str, given: Tasks, started: int | None) -> list[str]:
    """How many tasks of a job; `started` of them at first."""
    if isinstance(given, tuple):
        return [f"--{job}-hosts", ",".join(given)]
    count = f"{started}:{given}" if started is not None else str(given)
    return ["--ps" if job == "ps" else "--workers", count]


def flags(settings: Settings) -> Sequence[str]:
    """Whatever differs from the defaults."""
    plain = msgspec.structs.asdict(Settings(run_id=""))
    words = []
    for name, value in msgspec.structs.asdict(settings).items():
        if name in OWN or value == plain[name]:
            continue
        flag = "--" + name.replace("_", "-")
        if value is False:
            flag = "--no-" + flag.removeprefix("--")
        words += [flag] if isinstance(value, bool) else [flag, str(value)]
    if settings.min_workers != (settings.started_workers or 1):
        words += ["--min-workers", str(settings.min_workers)]
    return words
