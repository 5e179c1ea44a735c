"""WHICH task would this process be, and who says so? `paceline env`: what discovery finds, and what it looked at.

Called by cli/main. Starts nothing, and must never print a secret.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options as o
from paceline.cli.serve import ChiefHosts, JobName, OptionalScript, TaskIndex, as_argv
from paceline.errors import EXIT_USAGE
from paceline.telemetry.output import complain

if TYPE_CHECKING:
    from paceline.cluster.discovery import Look

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def env(
    ctx: typer.Context,
    script: OptionalScript = None,
    job_name: JobName = None,
    task_index: TaskIndex = None,
    ps_hosts: o.PsHosts = None,
    worker_hosts: o.WorkerHosts = None,
    chief_hosts: ChiefHosts = None,
    as_json: Json = False,
) -> None:
    """Show which task of which cluster a process started like this would be, and why. Exit code 2: it is refused."""
    from paceline.cluster.discovery import look_everywhere

    flags = {name: ctx.params[name] for name in ("job_name", "task_index", "ps_hosts", "worker_hosts", "chief_hosts")}
    looks = look_everywhere(as_argv(flags), script_dir=Path(script).parent if script else ".")
    typer.echo(json.dumps(as_dict(looks)) if as_json else "\n".join(as_lines(looks)))
    first = decisive(looks)
    if first is None or not first.is_refused:
        return
    complain(f"Refused: {first.source}: {first.why}")
    raise typer.Exit(EXIT_USAGE)


def decisive(looks: "Sequence[Look]") -> "Look | None":
    """The first that has a task, or that refuses; None: no cluster."""
    return next((look for look in looks if look.task is not None or look.is_refused), None)


def as_dict(looks: "Sequence[Look]") -> Mapping[str, object]:
    """The same for programs: `found_by` is null without a cluster, `refused` unless something must be changed."""
    first = decisive(looks)
    found = first if first is not None and first.task is not None else None
    return {
        "found_by": found.source if found else None,
        "why": found.why if found else None,
        "refused": first.why if first is not None and first.is_refused else None,
        "task": str(found.task) if found else None,
        "cluster": found.cluster.as_dict() if found and found.cluster else None,
        "looked_at": [
            {"source": look.source, "why": look.why, "task": str(look.task) if look.task else None} for look in looks
        ],
    }


def as_lines(looks: "Sequence[Look]") -> list[str]:
    """What people read: the outcome first, then every source in the order of discovery."""
    from paceline.telemetry.lines import cluster_lines

    first = decisive(looks)
    if first is None:
        lines = ["No cluster was found: a script started here trains alone, in one process."]
    elif first.cluster is None or first.task is None:
        lines = ["A task that is started like this is refused."]
    else:
        address = f" at {first.cluster.address(first.task)}" if first.task.job in first.cluster.jobs else ""
        lines = [f"Found by: {first.source}: {first.why}", f"This task: {first.task}{address}"]
        lines += cluster_lines(first.cluster)
    lines += ["", "Looked at, in this order:"]
    width = max(len(look.source) for look in looks)
    return [*lines, *(f"  {look.source:<{width}}  {verdict(look, first)}" for look in looks)]


def verdict(look: "Look", first: "Look | None") -> str:
    """One source in a few words: used, not there, or too late."""
    if look is first:
        return f"refused: {look.why}" if look.is_refused else f"used: {look.why}"
    if look.task is not None and first is not None:
        return f"{look.task} by {look.why}, but {first.source} comes first"
    return look.why
