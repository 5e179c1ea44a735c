"""HOW is a cluster started on this host? `paceline run`: flags in, one request for launchers/local out.

Called by cli/main and cli/demo. Must never look at SCRIPT's own arguments.
"""

from collections.abc import Mapping

import msgspec
import typer

from paceline.cli import options as o
from paceline.errors import UsageError


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
    return local.dry_run(request) if params["dry_run"] else local.run(request)


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
