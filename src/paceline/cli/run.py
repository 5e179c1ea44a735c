"""HOW is a cluster started on this host? `paceline run`: flags in, one request for launchers/local out.

Called by cli/main and cli/demo. Must never look at SCRIPT's own arguments.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import typer

from paceline.cli import options as o
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.launchers import local


@o.with_settings
def run(
    ctx: typer.Context,
    script: o.Script,
    args: o.ScriptArgs = None,
    ps: o.Ps = None,
    workers: o.Workers = None,
    ps_hosts: o.PsHosts = None,
    worker_hosts: o.WorkerHosts = None,
    run_dir: o.RunDir = None,
    dry_run: o.DryRun = False,
    module: o.Module = False,
    plain: o.Plain = False,
    on: o.On = None,
    worker_cpus: o.WorkerCpus = 1,
    worker_gpus: o.WorkerGpus = 0,
    colocate: o.Colocate = False,
) -> None:
    """Train SCRIPT on a cluster of ps and worker tasks on this host."""
    raise typer.Exit(start(ctx.params, script, tuple(args or ()), module))


def start(params: Mapping[str, object], script: str, args: tuple[str, ...], is_module: bool) -> int:
    """Builds the request that the flags describe, checks it, and runs it; the exit code comes back."""
    from paceline.launchers import local
    from paceline.launchers.entry import Program

    ps = hosts_or_count("ps", params, default=1)
    workers = hosts_or_count("workers", {**params, "workers": o.num_workers(params)}, default=2)
    run_dir = params["run_dir"]
    request = local.Request(
        program=Program(script=script, args=args, is_module=is_module),
        ps=ps,
        workers=workers,
        settings=msgspec.structs.replace(o.settings(params), plain=bool(params.get("plain"))),
        run_dir=str(run_dir) if run_dir else None,
    )
    if params.get("on") is not None:
        return on_ray(request, params)
    refuse_ray_flags(params)
    return local.dry_run(request) if params["dry_run"] else local.run(request)


def on_ray(request: "local.Request", params: Mapping[str, object]) -> int:
    """The same request, for the machines of a Ray cluster."""
    from paceline.launchers import on_ray

    how = on_ray.OnRay(
        on=str(params["on"]),
        worker_cpus=float(str(params["worker_cpus"])),
        worker_gpus=float(str(params["worker_gpus"])),
        is_colocated=bool(params["colocate"]),
    )
    return on_ray.dry_run(request, how) if params["dry_run"] else on_ray.run(request, how)


def refuse_ray_flags(params: Mapping[str, object]) -> None:
    """What only Ray can be asked for."""
    plain: dict[str, object] = {"worker_cpus": 1, "worker_gpus": 0, "colocate": False}
    for name, value in plain.items():
        if params.get(name, value) != value:
            raise UsageError(f"--{name.replace('_', '-')} is for --on ray; add that, or leave it out.")


def hosts_or_count(flag: str, params: Mapping[str, object], default: int) -> int | tuple[str, ...]:
    """Addresses if they were given, else how many tasks; both at once must agree."""
    hosts_flag = "ps_hosts" if flag == "ps" else "worker_hosts"
    given, text = params[flag], params[hosts_flag]
    count = given if isinstance(given, int) else None
    hosts = o.addresses(str(text)) if text else ()
    if count is not None and count < 1:
        raise UsageError(f"--{flag} is {count}; a cluster needs at least 1.")
    if hosts and count is not None and count != len(hosts):
        has = f"{len(hosts)} address{'es' if len(hosts) > 1 else ''}"
        raise UsageError(f"--{flag} is {count} but --{hosts_flag} has {has}; leave out --{flag}.")
    return hosts or (default if count is None else count)
