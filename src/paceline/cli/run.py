"""HOW is a cluster started? `paceline run`: flags in, one request for launchers/local, or launchers/hosts/many, out.

Called by cli/main and cli/demo. Must never look at SCRIPT's own arguments.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import typer

from paceline.cli import on_ray
from paceline.cli import options as o
from paceline.cli.host_options import HOST_FLAGS, ClusterFile, Hostfile, Hosts
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.launchers.hosts import many


@o.with_settings
def run(
    ctx: typer.Context,
    script: o.Script,
    args: o.ScriptArgs = None,
    ps: o.Ps = None,
    workers: o.Workers = None,
    ps_hosts: o.PsHosts = None,
    worker_hosts: o.WorkerHosts = None,
    hosts: Hosts = None,
    hostfile: Hostfile = None,
    cluster: ClusterFile = None,
    sync_code: o.SyncCode = False,
    run_dir: o.RunDir = None,
    show_logs: o.ShowLogs = None,
    dry_run: o.DryRun = False,
    module: o.Module = False,
    plain: o.Plain = False,
    on: o.On = None,
    worker_cpus: o.WorkerCpus = 1,
    worker_gpus: o.WorkerGpus = 0,
    colocate: o.Colocate = False,
) -> None:
    """Train SCRIPT on a cluster of ps and worker tasks, on this host or on several."""
    raise typer.Exit(start(ctx.params, script, tuple(args or ()), module))


def start(params: Mapping[str, object], script: str, args: tuple[str, ...], is_module: bool) -> int:
    """Builds the request that the flags describe, checks it, and runs it; the exit code comes back."""
    from paceline.cluster import hosts as placing
    from paceline.launchers import local
    from paceline.launchers.entry import Program

    is_on_ray = on_ray.is_meant(params)
    hosts = named_hosts(params)
    ps = hosts_or_count("ps", params, default=1)
    room = o.num_workers(params)
    slots = placing.num_workers(hosts.named) if hosts is not None else 2
    workers = hosts_or_count("workers", {**params, "workers": room}, default=max(1, slots))
    run_dir = params["run_dir"]
    request = local.Request(
        program=Program(script=script, args=args, is_module=is_module),
        ps=ps,
        workers=workers,
        settings=msgspec.structs.replace(o.settings(params), plain=bool(params.get("plain"))),
        run_dir=str(run_dir) if run_dir else None,
        shows_logs=bool(is_on_ray or hosts if params.get("show_logs") is None else params["show_logs"]),
    )
    if is_on_ray:
        return on_ray.start(request, params)
    if hosts is not None:
        from paceline.launchers.hosts import many

        return many.dry_run(request, hosts) if params["dry_run"] else many.run(request, hosts)
    return local.dry_run(request) if params["dry_run"] else local.run(request)


def named_hosts(params: Mapping[str, object]) -> "many.Hosts | None":
    """The hosts that --hosts, --hostfile or --cluster names; None where none of them was given."""
    given = {flag: str(params[flag]) for flag in HOST_FLAGS if params.get(flag) is not None}
    if not given:
        if params.get("sync_code"):
            raise UsageError("--sync-code copies the script to other hosts; name them with --hosts.")
        return None
    if params["ps_hosts"] or params["worker_hosts"]:
        said = f"--{next(iter(given))}"
        raise UsageError(f"{said} says where tasks go, and so do --ps-hosts and --worker-hosts; leave one out.")
    from paceline.cluster import host_files
    from paceline.launchers.hosts import many

    named = host_files.named(*(given.get(flag) for flag in HOST_FLAGS))
    flags = [word for flag, value in given.items() for word in (f"--{flag}", value)]
    is_synced = bool(params.get("sync_code"))
    flags += ["--sync-code"] if is_synced else []
    return many.Hosts(named=tuple(named), flags=tuple(flags), sync_code=is_synced)


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
