"""HOW is a cluster started on this host? Checks, makes the run folder, hands over.

Called by `paceline run` and `paceline demo`. Must never make or start anything before every check has passed.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from paceline import files
from paceline.cluster.certificate import check_can_make, make_certificate, remove_certificate
from paceline.cluster.cores import usable_cores
from paceline.cluster.secret import INSECURE
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.cluster.validate import check
from paceline.errors import EXIT_OK, UsageError
from paceline.launchers import closing, descriptors, gpus, plain, ports, resume_check, resume_command
from paceline.launchers.crew import Run
from paceline.launchers.entry import Program, check_program
from paceline.launchers.folders import put_aside, write_json
from paceline.launchers.supervisor import Patience, supervise
from paceline.telemetry.lines import INSECURE_LINE, cluster_lines
from paceline.telemetry.paths import RunPaths, new_run_dir


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: a program, and how many tasks, or at which addresses."""

    program: Program
    ps: int | tuple[str, ...] = 1
    workers: int | tuple[str, ...] = 2
    settings: Settings
    run_dir: str | None = None
    shows_logs: bool = False  # what tasks print is printed here, too


def run(request: Request, patience: Patience | None = None) -> int:
    """Run a cluster on this host to its end; the exit code comes back."""
    with ports.Reserved() as reserved:
        cluster = checked_cluster(request, reserved)
        request, told = with_checkpoint(request)
        paths = folder_of(request)
        with held(paths):
            made = make_folder(request, cluster, paths)
            announce(made, told)
            reserved.before_start()
            begin = plain.supervise if made.settings.plain else supervise
            return begin(made, patience or Patience())


def dry_run(request: Request) -> int:
    """Print what run() would start, and start nothing."""
    with ports.Reserved() as reserved:
        cluster = checked_cluster(request, reserved)
    request, told = with_checkpoint(request)
    settings = request.settings
    print("\n".join([*cluster_lines(cluster, settings.log_style), *told]))
    if settings.plain:
        print("\n".join(plain.commands(request.program, cluster)))
        print("Dry run: nothing was started.")
        return EXIT_OK
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
    gpus.check(request.settings, cluster, gpus.cards())
    descriptors.check(len(cluster.workers))
    if request.settings.tls:
        check_can_make()
    for given in (request.ps, request.workers):
        if not isinstance(given, int):
            ports.check_free(given)
    check_folder(request)
    return cluster


def with_checkpoint(request: Request) -> tuple[Request, list[str]]:
    """Check what --resume names. Return the request with the path of that checkpoint, and the lines that name it."""
    settings, lines = resume_check.check(request.settings, request.run_dir, request.program)
    return msgspec.structs.replace(request, settings=settings), lines


def check_folder(request: Request) -> None:
    """A folder that holds a run is used again only to go on with it, and only when it has ended."""
    is_going_on = request.settings.resume == "auto"
    if request.run_dir is None:
        if is_going_on:
            raise UsageError("--resume auto looks for a checkpoint in the run folder; say which with --run-dir.")
        return
    paths = RunPaths(request.run_dir)
    if paths.config.exists() and not is_going_on:
        raise UsageError(
            f"{request.run_dir} already holds a run; go on with it with --resume auto, or choose another --run-dir."
        )
    if paths.root.is_dir():
        with held(paths):
            pass


def is_on(paths: RunPaths) -> bool:
    """Whether a launcher of this host runs something in this folder now."""
    try:
        with held(paths):
            return False
    except UsageError:
        return True


@contextmanager
def held(paths: RunPaths) -> Iterator[None]:
    """Nobody else runs anything in this folder meanwhile; UsageError when somebody does."""
    folder = os.open(paths.root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"The run in {paths.root} is still on; wait for its end, or end it.") from None
        yield
    finally:
        os.close(folder)


def folder_of(request: Request) -> RunPaths:
    """The run folder, which is there now."""
    paths = RunPaths(request.run_dir if request.run_dir is not None else new_run_dir())
    paths.create()
    return paths


def make_folder(request: Request, cluster: ClusterSpec, paths: RunPaths) -> Run:
    """Put config.json, cluster.json and the secret into the run folder."""
    made = run_in(request, cluster, paths, threads(request.settings, cluster))
    task = {"host": os.uname().nodename, "threads": made.threads}
    devices = gpus.names(made.settings, cluster, gpus.cards())
    fill(made, {each: {**task, **({} if made.settings.plain else {"device": at})} for each, at in devices.items()})
    return made


def run_in(
    request: Request, cluster: ClusterSpec, paths: RunPaths, threads: str, hosts: tuple[str, ...] | None = None
) -> Run:
    """The run that was asked for, in this folder; `hosts`: the flags that name those of the tasks."""
    settings = msgspec.structs.replace(request.settings, run_id=files.as_text(paths.root.name), run_dir=str(paths.root))
    folder = closing.shown(paths.root)
    resume = resume_command.command(request.program, request.ps, request.workers, request.settings, folder, hosts)
    return Run(
        program=request.program,
        cluster=cluster,
        settings=settings,
        paths=paths,
        threads=threads,
        resume="" if settings.plain else resume,
        shows_logs=request.shows_logs,
    )


def fill(run: Run, tasks: Mapping[Task, Mapping[str, str]]) -> None:
    """The files of a run that begins; of each task what it runs on. UsageError where they cannot be written."""
    paths, settings = run.paths, run.settings
    how = {"program": run.program, "cwd": os.getcwd()}  # for those who join later
    is_new = not paths.config.exists()
    try:
        put_aside(paths)
        write_json(paths.config, {**msgspec.structs.asdict(settings), **how})
        write_cluster(run, tasks)
        if not settings.plain:
            paths.write_secret(INSECURE if settings.insecure else secrets.token_bytes(32))
        remove_certificate(paths.root)
        if settings.tls:
            make_certificate(paths.root)
    except OSError as error:  # a full disk is known only when the bytes are written, and then names no file
        if is_new:
            paths.config.unlink(missing_ok=True)  # it would say that the folder holds a run
        why = f"cannot be written: {error.strerror or error}; make room there, or choose another --run-dir"
        raise UsageError(f"The run folder {closing.shown(paths.root)} {why}.") from error


def write_cluster(run: Run, tasks: Mapping[Task, Mapping[str, str]]) -> None:
    """cluster.json: the addresses, and of each task what it runs on."""
    write_json(run.paths.cluster, {**run.cluster.as_dict(), "tasks": {str(task): on for task, on in tasks.items()}})


def threads(settings: Settings, cluster: ClusterSpec) -> str:
    """OMP_NUM_THREADS for every task: the user's, else this host's cores shared out over the workers started here."""
    num_workers = len(cluster.workers[: settings.started_workers])
    return os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // num_workers))


def announce(run: Run, resumed: Sequence[str]) -> None:
    """Print the first lines of a run on this host."""
    lines = first_lines(run, resumed)
    lines += notes(run.settings, run.cluster, closing.shown(run.paths.root))
    print("\n".join([*lines, f"OMP_NUM_THREADS={run.threads} in every task"]), flush=True)


def first_lines(run: Run, resumed: Sequence[str]) -> list[str]:
    """Name the run folder, the cluster, and the checkpoint that is `resumed`."""
    return [
        f"Run folder: {closing.shown(run.paths.root)}",
        *cluster_lines(run.cluster, run.settings.log_style),
        *resumed,
    ]


def notes(settings: Settings, cluster: ClusterSpec, folder: str = "RUN") -> list[str]:
    """What is unusual about this run, GPUs included."""
    devices = [] if settings.plain else gpus.told(settings, cluster, gpus.cards())
    return [*devices, *oddities(settings, cluster, folder)]


def oddities(settings: Settings, cluster: ClusterSpec, folder: str) -> list[str]:
    """That others may join, that somebody is slowed down on purpose, faults, no secret."""
    said = []
    started, room = len(cluster.workers[: settings.started_workers]), len(cluster.workers)
    if started < room:
        said.append(f"{started} of {room} workers are started here; one more: paceline serve --join {folder}")
    if settings.slow:
        said.append(f"Slowed on purpose (--slow): {settings.slow}")
    if settings.chaos:
        said.append(f"Faults will be injected (--chaos, seed {settings.chaos_seed}): {settings.chaos}")
    if settings.insecure:
        said.append(INSECURE_LINE)
    return said
