"""HOW is a cluster started on several hosts? Checks here and there, the code copied if asked, agents, then as on one.

Called by `paceline run --hosts`. Must never start a task before every check has passed, on every host.

1. what can be said without asking anybody: the flags, where every task goes
2. all hosts are asked at once (hosts/preflight)
3. --sync-code (hosts/syncing)
4. the run folder, and an agent on every host (hosts/far)
5. launchers/supervisor, which decides everything, as on one host
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from paceline.cluster import hosts as placing
from paceline.cluster.certificate import check_can_make
from paceline.cluster.hosts import Host, joined, tasks_on
from paceline.cluster.spec import ClusterSpec, Task
from paceline.cluster.validate import check, check_lane
from paceline.errors import EXIT_OK, ClusterError, UsageError
from paceline.launchers import closing, descriptors, gpus, local, memory
from paceline.launchers.crew import Run
from paceline.launchers.entry import THREADS, Program, check_program
from paceline.launchers.folders import write_failure
from paceline.launchers.hosts import preflight, ssh, syncing
from paceline.launchers.hosts.far import Far, lost_s
from paceline.launchers.hosts.frames import Hello, Ready
from paceline.launchers.hosts.preflight import Report
from paceline.launchers.local import Request
from paceline.launchers.nursery import VARIABLE as NURSERY
from paceline.launchers.supervisor import Patience, supervise
from paceline.telemetry.ledgers import note_cut
from paceline.transport.security import keys_dir_of
from paceline.transport.tls import CERTIFICATE, PRIVATE_KEY
from paceline.version import VERSION

Placed = dict[Task, Host]
NO_SCRIPT = 96  # an exit code, beside those of hosts/ssh
MORE_SILENCE_S = 5.0  # an agent waits for longer than the launcher, which then knows first


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """Which hosts, the flags that named them, and whether they get the code."""

    named: tuple[Host, ...]
    flags: tuple[str, ...] = ()
    sync_code: bool = False


def run(request: Request, hosts: Hosts, patience: Patience | None = None) -> int:
    """Run a cluster on these hosts to its end; the exit code comes back."""
    placed = checked(request, hosts)  # 1
    request, resumed = local.with_checkpoint(request)
    report = preflight.of_run(without_folders(placed) if hosts.sync_code else placed)  # 2
    report.check()
    cluster = report.cluster(placed)
    check(request.settings, cluster)
    check_descriptors(cluster, placed, report)
    check_memory(placed, report)
    code = syncing.code_of(request.program, Path.cwd())
    used = list({host.name: host for host in placed.values()}.values())
    program = code.program if hosts.sync_code else program_there(request.program)
    if hosts.sync_code:
        print(syncing.told(code, syncing.sync(code, used)), flush=True)  # 3
    else:
        check_scripts(program, used)
    paths = local.folder_of(request)
    with local.held(paths):
        is_going_on = paths.config.exists()
        if is_going_on and not paths.summary.exists():  # its launcher died: what hosts wrote last never came
            for path in paths.ledgers.glob("*.bin"):
                note_cut(path)
        made = local.run_in(request, cluster, paths, threads="", hosts=hosts.flags)  # 4
        local.fill(made, {task: {"host": host.name} for task, host in placed.items()})  # completed below
        far = Far(made, placed, {name: seen.address for name, seen in report.seen.items()})
        try:
            with syncing.token_in(paths.root) as token:
                told = {host.name: hello(made, program, placed, host, token, is_going_on) for host in used}
                ready = far.open(used, told)
        except ClusterError as error:
            write_failure(made.settings, made.cluster, paths, str(error))
            raise
        try:
            check_cards(made, placed, ready)
        except ClusterError as error:
            far.close()
            write_failure(made.settings, made.cluster, paths, str(error))
            raise
        local.write_cluster(made, {task: runs_on(made, task, host, ready) for task, host in placed.items()})
        announce(made, placed, ready, report, resumed)
        return supervise(made, patience or Patience(), far)  # 5


def dry_run(request: Request, hosts: Hosts) -> int:
    """Print which task would go where, and ask no host anything."""
    placed = checked(request, hosts)
    request, resumed = local.with_checkpoint(request)
    settings = request.settings
    for host in hosts.named:
        print(f"{host.name}: {names(tasks_on(placed, host), settings.started_workers) or 'no task'}")
    print(f"mode {settings.mode_spec}, placement {settings.placement}, lane {settings.lane}, data {settings.data}")
    print("\n".join([*resumed, "Dry run: no host was asked, and nothing was started."]))
    return EXIT_OK


def checked(request: Request, hosts: Hosts) -> Placed:
    """Where every task goes, or a UsageError; nobody has been asked anything."""
    if request.settings.plain:
        raise UsageError("--plain starts tasks on this host only; leave out --hosts, or start each with its own flags.")
    if not isinstance(request.ps, int):
        raise UsageError("--hosts says where tasks go, and so do --ps-hosts and --worker-hosts; leave one out.")
    check_program(request.program)
    num_workers = request.workers if isinstance(request.workers, int) else None
    placed = placing.placed(hosts.named, request.ps, num_workers)
    jobs: dict[str, list[str]] = {}
    for number, (task, host) in enumerate(placed.items(), start=1):
        jobs.setdefault(task.job, []).append(joined(host.name, number))  # as yet no port is known
    check(request.settings, ClusterSpec(jobs))
    check_lane(request.settings.lane, {host.name for host in placed.values()})
    if request.settings.tls:
        check_can_make()
    local.check_folder(request)
    return {task: in_folder(host) for task, host in placed.items()}


def in_folder(host: Host) -> Host:
    """Where nothing is said, tasks start in the folder of the same name there."""
    return host if host.folder else msgspec.structs.replace(host, folder=os.getcwd())


def without_folders(placed: Placed) -> Placed:
    """The same hosts, asked before their folders are there."""
    return {task: msgspec.structs.replace(host, folder="") for task, host in placed.items()}


def program_there(program: Program) -> Program:
    """The script below a host's folder, if it is below this one; else at the same path."""
    return syncing.code_of(program, Path.cwd()).program if _is_below(program) else program


def check_scripts(program: Program, hosts: Sequence[Host]) -> None:
    """ClusterError where a host lacks the script, before anything is made."""
    if program.is_module:
        return
    script = shlex.quote(program.script)
    lines = {
        host.name: f"cd {ssh.quoted_path(host.folder)} || exit {ssh.NO_FOLDER}; test -f {script} || exit {NO_SCRIPT}"
        for host in hosts
    }
    answers = ssh.run_on_all(lines, hosts)
    ssh.check([answer for answer in answers if answer.code != NO_SCRIPT])
    if lacking := [answer.host for answer in answers if answer.code == NO_SCRIPT]:
        told = ", ".join(f"{host.name} (in {host.folder})" for host in lacking)
        raise ClusterError(f"There is no script {program.script} on {told}; --sync-code copies it there.")


def check_descriptors(cluster: ClusterSpec, placed: Placed, report: Report) -> None:
    """ClusterError where a host's ps could not serve so many workers."""
    for name in sorted({placed[task].name for task in cluster.ps}):
        machine = report.seen[name].machine
        need = descriptors.needed(len(cluster.workers), machine.cores)
        if machine.descriptors is not None and machine.descriptors < need:
            raise ClusterError(
                f"A ps with {len(cluster.workers)} worker(s) needs about {need} descriptors, and {name} allows "
                f"{machine.descriptors}; raise it there (ulimit -n {need}) or start fewer workers."
            )


def check_memory(placed: Placed, report: Report) -> None:
    """ClusterError where a host could not even hold so many processes: a slot too many, or a digit."""
    for name, seen in report.seen.items():
        count = sum(host.name == name for host in placed.values())
        if short := memory.lacking(name, count, seen.machine.memory_mb):
            raise ClusterError(f"{short}; give it fewer slots, or --workers.")


def check_cards(run: Run, placed: Placed, ready: Mapping[str, Ready]) -> None:
    """ClusterError where a host's workers could not have the devices that were asked for."""
    for name, told in ready.items():
        workers = [task for task in run.cluster.workers if placed[task].name == name]
        try:
            gpus.check(run.settings, run.cluster, told.cards, workers)
        except UsageError as error:
            raise ClusterError(f"{name}: {error}") from None


def _is_below(program: Program) -> bool:
    script = Path(os.path.normpath(Path.cwd() / program.script))
    return program.is_module or script.is_relative_to(Path.cwd())


def hello(run: Run, program: Program, placed: Placed, host: Host, token: str, is_going_on: bool) -> Hello:
    """All that the agent of one host must know."""
    secret, root = run.paths.read_secret(), run.paths.root
    keys = keys_dir_of(secret)
    here = Path.cwd()
    workers = [task for task in tasks_on(placed, host) if task in run.started]
    return Hello(
        version=VERSION,
        host=host.name,
        settings=run.settings,
        program=program,
        ps=run.cluster.ps,
        secret=bytes(secret),
        certificate=(keys / CERTIFICATE).read_bytes() if keys is not None else b"",
        key=(keys / PRIVATE_KEY).read_bytes() if keys is not None else b"",
        run_dir=str(root.relative_to(here) if root.is_relative_to(here) else root),
        token=token,
        is_going_on=is_going_on,
        num_workers=len(workers),
        threads=os.environ.get(THREADS, ""),
        gpus=host.gpus,
        environ={name: os.environ[name] for name in (NURSERY,) if name in os.environ},
        ports=[int(run.cluster.address(task).rpartition(":")[2]) for task in tasks_on(placed, host)],
        num_spare_ports=len(run.cluster.ps),
        between=host.ports,
        silence_s=lost_s(run.settings) + MORE_SILENCE_S,
    )


def runs_on(run: Run, task: Task, host: Host, ready: Mapping[str, Ready]) -> dict[str, str]:
    """What cluster.json says of a task: its host, its threads, its device there."""
    told = ready[host.name]
    device = gpus.names(run.settings, run.cluster, told.cards)[task]
    return {"host": host.name, "threads": told.threads, "device": device}


def announce(run: Run, placed: Placed, ready: Mapping[str, Ready], report: Report, resumed: Sequence[str]) -> None:
    """Print the first lines: the run folder, the cluster, what is resumed, and where each task runs."""
    lines = local.first_lines(run, resumed)
    for name, told in ready.items():
        tasks = [task for task, host in placed.items() if host.name == name]
        where = "this run folder" if told.is_shared else f"{told.run_dir} meanwhile"
        cards = f", {told.cards} card{'s' if told.cards > 1 else ''}" if told.cards else ""
        has = f"{told.cores} cores{cards}, OMP_NUM_THREADS={told.threads}"
        lines.append(f"{name}: {names(tasks, run.settings.started_workers)}; {has}; {where}")
    lines += [
        f"{name}: an earlier run of this name is in {told.aside} now" for name, told in ready.items() if told.aside
    ]
    lines += [f"Note: {problem.sentence}" for problem in report.problems]
    lines += local.oddities(run.settings, run.cluster, closing.shown(run.paths.root))
    print("\n".join(lines), flush=True)


def names(tasks: Sequence[Task], started: int | None) -> str:
    """Tasks in a line; those of an elastic cluster that are not started at first are marked.

    >>> names([Task("ps", 0), Task("worker", 1)], started=1)
    'ps:0, worker:1 (may join)'
    """
    is_later = [task.job != "ps" and started is not None and task.index >= started for task in tasks]
    return ", ".join(f"{task}{' (may join)' if later else ''}" for task, later in zip(tasks, is_later, strict=True))
