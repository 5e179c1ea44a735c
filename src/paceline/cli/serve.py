"""HOW is one task started by hand? `paceline serve`, with TF1's flags or TF_CONFIG, in any order.

Called by cli/main. Must never start another process: this one becomes the task.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import options as o
from paceline.errors import UsageError

JobName = Annotated[str | None, typer.Option("--job_name", help="ps, worker or chief.")]
TaskIndex = Annotated[int | None, typer.Option("--task_index", help="Position in the job, from 0.")]
ChiefHosts = Annotated[
    str | None, typer.Option("--chief_hosts", metavar="HOST:PORT", help="Address of job chief, if any.")
]
SecretFile = Annotated[str | None, typer.Option("--secret-file", help="What all tasks share; readable by you alone.")]
OptionalScript = Annotated[
    str | None, typer.Argument(metavar="SCRIPT", help="The script; a ps needs none.", show_default=False)
]
NOT_FOR_DISCOVERY = ("script", "args", "module", "version")


def serve(
    ctx: typer.Context,
    script: OptionalScript = None,
    args: o.ScriptArgs = None,
    job_name: JobName = None,
    task_index: TaskIndex = None,
    ps_hosts: o.PsHosts = None,
    worker_hosts: o.WorkerHosts = None,
    chief_hosts: ChiefHosts = None,
    mode: o.Mode = "async",
    replicas_to_aggregate: o.Replicas = None,
    placement: o.Placement = "bytes",
    lane: o.Lane = "auto",
    data: o.Data = "shard",
    save_every: o.SaveEvery = "10m",
    run_dir: o.RunDir = None,
    log_every: o.LogEvery = 0,
    log_device_placement: o.LogPlacement = False,
    lease_s: o.LeaseS = 5.0,
    wait_s: o.WaitS = 300.0,
    secret_file: SecretFile = None,
    module: o.Module = False,
) -> None:
    """Become one task of a cluster: a ps, or a worker that runs SCRIPT."""
    from paceline.cluster.discovery import discover
    from paceline.launchers import entry

    o.settings(ctx.params)  # refuses what discovery does not look at
    folder = str(Path(script).parent) if script and not module else None
    assignment = discover(flags=True, argv=as_argv(ctx.params), script_dir=folder)
    if assignment is None:
        raise UsageError("serve needs --job_name, --task_index, --ps_hosts and --worker_hosts, or TF_CONFIG.")
    if assignment.task.job == "ps":
        if script:
            typer.echo(f"A ps runs no script: {script} is for the workers.")
        raise typer.Exit(entry.become(assignment, None))
    if script is None:
        raise UsageError(f"{assignment.task} needs a script: add it at the end of the command.")
    program = entry.Program(script=script, args=tuple(args or ()), is_module=module)
    entry.check_program(program)
    raise typer.Exit(entry.become(assignment, program))


def as_argv(params: Mapping[str, object]) -> list[str]:
    """The given flags as discovery reads them, without SCRIPT and its arguments.

    >>> as_argv({"job_name": "ps", "task_index": 0, "ps_hosts": None})
    ['--job_name=ps', '--task_index=0']
    """
    flags = {name: value for name, value in params.items() if name not in NOT_FOR_DISCOVERY}
    return [f"--{name}={value}" for name, value in flags.items() if value is not None and value is not False]
