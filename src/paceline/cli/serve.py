"""HOW is one task started by hand? `paceline serve`, with TF1's flags, TF_CONFIG or a scheduler, or --join RUN.

Called by cli/main. Must never start another process: this one becomes the task.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from paceline.cli import options as o
from paceline.cli.kv import run_folder
from paceline.cluster.settings import Settings
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.cluster.discovery import Assignment
    from paceline.launchers.entry import Program

JobName = Annotated[str | None, typer.Option("--job_name", help="ps, worker or chief.")]
TaskIndex = Annotated[int | None, typer.Option("--task_index", help="Position in the job, from 0.")]
ChiefHosts = Annotated[
    str | None, typer.Option("--chief_hosts", metavar="HOST:PORT", help="Address of job chief, if any.")
]
OptionalScript = Annotated[
    str | None, typer.Argument(metavar="SCRIPT", help="The script; a ps needs none.", show_default=False)
]
Join = Annotated[
    str | None,
    typer.Option("--join", metavar="RUN", help="Become a further worker of this run; SCRIPT is its own by default."),
]
ByHandWorkers = Annotated[
    str | None,
    typer.Option("--workers", metavar="MIN:MAX", help="MIN of the MAX worker_hosts are enough to begin."),
]
At = Annotated[
    str | None,
    typer.Option(
        "--at",
        metavar="HOST:PORT",
        help="A ps that is started elsewhere than --ps_hosts says: where. The others find it by the run folder.",
    ),
]
NOT_FOR_DISCOVERY = ("script", "args", "module", "version", "join", "workers", "at", "seed")
WITH_JOIN = ("join", "task_index", "script", "args", "module")


@o.with_settings
def serve(
    ctx: typer.Context,
    script: OptionalScript = None,
    args: o.ScriptArgs = None,
    job_name: JobName = None,
    task_index: TaskIndex = None,
    ps_hosts: o.PsHosts = None,
    worker_hosts: o.WorkerHosts = None,
    chief_hosts: ChiefHosts = None,
    join: Join = None,
    workers: ByHandWorkers = None,
    at: At = None,
    run_dir: o.RunDir = None,
    secret_file: o.SecretFile = None,
    module: o.Module = False,
) -> None:
    """Become one task of a cluster: a ps, or a worker that runs SCRIPT."""
    from paceline.cluster.discovery import discover
    from paceline.launchers import entry

    given = entry.Program(script=script, args=tuple(args or ()), is_module=module) if script else None
    if join is not None:
        refuse_beside_join(ctx)
        raise typer.Exit(join_run(join, task_index, given))
    o.settings(ctx.params)  # refuses what discovery does not look at
    folder = str(Path(script).parent) if script and not module else None
    assignment = discover(flags=True, argv=as_argv(ctx.params), script_dir=folder)
    if assignment is None:
        raise UsageError(
            "serve needs --job_name, --task_index, --ps_hosts and --worker_hosts, or TF_CONFIG, or a scheduler that "
            "starts several tasks at once; `paceline env` shows what was looked at."
        )
    check_room(ctx.params, len(assignment.cluster.workers))
    assignment = seeded(assignment, ctx.params)
    if at is not None:
        assignment = moved_to(assignment, at)
    if assignment.task.job == "ps":
        if script:
            typer.echo(f"A ps runs no script: {script} is for the workers.")
        raise typer.Exit(entry.become(assignment, None))
    if given is None:
        raise UsageError(f"{assignment.task} needs a script: add it at the end of the command.")
    entry.check_program(given)
    raise typer.Exit(entry.become(assignment, given))


def seeded(assignment: "Assignment", params: Mapping[str, object]) -> "Assignment":
    """The same task with --seed, which is not read from a script's own arguments."""
    from paceline.cluster.validate import check

    settings = msgspec.structs.replace(assignment.settings, seed=params["seed"])
    check(settings, assignment.cluster)
    return msgspec.structs.replace(assignment, settings=settings)


def moved_to(assignment: "Assignment", at: str) -> "Assignment":
    """The same task, at another address than its cluster says."""
    from paceline.cluster.spec import split_address

    if assignment.task.job != "ps":
        raise UsageError(f"--at is for a ps; nobody looks for {assignment.task}, so start it anywhere without --at.")
    if assignment.settings.run_dir is None:
        raise UsageError("--at needs --run-dir, a folder that all hosts share: the workers look there where the ps is.")
    split_address(at)
    return msgspec.structs.replace(assignment, at=at)


def join_run(run: str, index: int | None, program: "Program | None") -> int:
    """Become a further worker of a run that trains; its exit code comes back."""
    from paceline.launchers import entry, joining
    from paceline.worker.reach import running

    folder = run_folder(run)
    running(folder)  # refuses one that has ended
    if program is None:
        program = joining.program_of(joining.read_config(folder))
    entry.check_program(program)
    return entry.become(joining.join(folder, index), program)


def refuse_beside_join(ctx: typer.Context) -> None:
    """A run has its settings already."""
    for name in ctx.params:
        source = ctx.get_parameter_source(name)
        if name not in WITH_JOIN and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"--{name} is the run's own with --join; leave it out (--task_index may be given).")


def check_room(params: Mapping[str, object], num_workers: int) -> None:
    """By hand the addresses say how many there are; MAX must agree."""
    room = o.num_workers(params)
    if room is not None and room != num_workers:
        raise UsageError(
            f"--workers is {params['workers']}, but the cluster has {num_workers} workers; let them agree."
        )


def as_argv(params: Mapping[str, object]) -> list[str]:
    """The given flags as discovery reads them, without SCRIPT and its arguments.

    >>> as_argv({"job_name": "ps", "task_index": 0, "ps_hosts": None})
    ['--job_name=ps', '--task_index=0']
    """
    flags = {name: value for name, value in params.items() if name not in NOT_FOR_DISCOVERY}
    flags["started_workers"] = o.started_workers(params)
    plain = msgspec.structs.asdict(Settings(run_id=""))
    is_off = {name: value is False and plain.get(name) is not True for name, value in flags.items()}
    is_given = {name: value is not None and value != "" and not is_off[name] for name, value in flags.items()}
    return [f"--{name}={value}" for name, value in flags.items() if is_given[name]]
