"""HOW is a cluster started on this host? Checks, makes the run folder, hands over.

Called by `paceline run` and `paceline demo`. Must never make or start anything before every check has passed.
"""

import os
import secrets
import sys
from pathlib import Path

import msgspec

from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec
from paceline.cluster.validate import check
from paceline.errors import EXIT_OK, UsageError
from paceline.launchers import closing, ports
from paceline.launchers.entry import Program, check_program
from paceline.launchers.supervisor import Patience, Run, supervise
from paceline.telemetry.lines import cluster_lines
from paceline.telemetry.paths import RunPaths, new_run_dir


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: a program, and how many tasks, or at which addresses."""

    program: Program
    ps: int | tuple[str, ...] = 1
    workers: int | tuple[str, ...] = 2
    settings: Settings
    run_dir: str | None = None


def run(request: Request, patience: Patience | None = None) -> int:
    """Run a cluster on this host to its end; the exit code comes back."""
    with ports.Reserved() as reserved:
        cluster = checked_cluster(request, reserved)
        made = make_folder(request, cluster)
        announce(made)
        reserved.before_start()
        return supervise(made, patience or Patience())


def dry_run(request: Request) -> int:
    """Print what run() would start, and start nothing."""
    with ports.Reserved() as reserved:
        cluster = checked_cluster(request, reserved)
    settings = request.settings
    print("\n".join(cluster_lines(cluster)))
    print(f"mode {settings.mode_spec}, placement {settings.placement}, lane {settings.lane}, data {settings.data}")
    print("\n".join([*notes(settings, cluster), f"OMP_NUM_THREADS={threads(settings, cluster)} in every task"]))
    print("Dry run: nothing was started.")
    return EXIT_OK


def checked_cluster(request: Request, reserved: ports.Reserved) -> ClusterSpec:
    """The cluster that was asked for, or a UsageError; nothing has been made or started."""
    check_program(request.program)
    jobs = {}
    for job, wanted in (("ps", request.ps), ("worker", request.workers)):
        jobs[job] = reserved.addresses(wanted) if isinstance(wanted, int) else list(wanted)
    cluster = ClusterSpec(jobs)
    check(request.settings, cluster)
    for given in (request.ps, request.workers):
        if not isinstance(given, int):
            ports.check_free(given)
    if request.run_dir is not None and RunPaths(request.run_dir).config.exists():
        raise UsageError(f"{request.run_dir} already holds a run; choose another --run-dir, or remove it.")
    return cluster


def make_folder(request: Request, cluster: ClusterSpec) -> Run:
    """The run folder with config.json, cluster.json and the secret."""
    paths = RunPaths(request.run_dir if request.run_dir is not None else new_run_dir())
    paths.create()
    settings = msgspec.structs.replace(request.settings, run_id=paths.root.name, run_dir=str(paths.root))
    made = Run(
        program=request.program,
        cluster=cluster,
        settings=settings,
        paths=paths,
        threads=threads(settings, cluster),
    )
    task = {"host": os.uname().nodename, "threads": made.threads}
    tasks = {str(each): task for each in [*cluster.ps, *cluster.workers]}
    how = {"program": request.program, "cwd": os.getcwd()}  # for those who join later
    write_json(paths.config, {**msgspec.structs.asdict(settings), **how})
    write_json(paths.cluster, {**cluster.as_dict(), "tasks": tasks})
    paths.write_secret(secrets.token_bytes(32))
    return made


def write_json(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def threads(settings: Settings, cluster: ClusterSpec) -> str:
    """OMP_NUM_THREADS for every task: the user's, else this host's cores shared out over the workers started here."""
    num_workers = len(cluster.workers[: settings.started_workers])
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // num_workers))


def announce(run: Run) -> None:
    """The first lines: the run folder and the cluster."""
    lines = [f"Run folder: {closing.shown(run.paths.root)}", *cluster_lines(run.cluster)]
    lines += notes(run.settings, run.cluster, closing.shown(run.paths.root))
    print("\n".join([*lines, f"OMP_NUM_THREADS={run.threads} in every task"]), flush=True)


def notes(settings: Settings, cluster: ClusterSpec, folder: str = "RUN") -> list[str]:
    """What is unusual about this run: that others may join, that somebody is slowed down on purpose."""
    said = []
    started, room = len(cluster.workers[: settings.started_workers]), len(cluster.workers)
    if started < room:
        said.append(f"{started} of {room} workers are started here; one more: paceline serve --join {folder}")
    if settings.slow:
        said.append(f"Slowed on purpose (--slow): {settings.slow}")
    return said
