"""HOW does a run become actors of a Ray cluster? `paceline run --on ray`: reserves, places, supervises, clears away.

Called by cli/run. Must never leave an actor or a reservation behind, nor make a run folder before there is room for the
run. Whether tasks are started again, and what is printed, is decided as on one machine: by launchers/supervisor.

1. check what can be checked here; 2. connect; 3. reserve bundles, all at once; 4. an actor for every task says where it
is; 5. that makes the cluster, and the run folder; 6. supervise; 7. end the actors, give the bundles back.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import ceil
from pathlib import Path
from typing import Any

import msgspec

from paceline.cluster import chaos
from paceline.cluster.certificate import check_can_make
from paceline.cluster.cores import usable_cores
from paceline.cluster.spec import ClusterSpec, Task
from paceline.cluster.validate import check, check_lane
from paceline.errors import EXIT_OK, ClusterError, UsageError
from paceline.launchers import local, memory
from paceline.launchers.crew import Run
from paceline.launchers.entry import Program, check_program
from paceline.launchers.folders import write_failure
from paceline.launchers.hosts.syncing import token_in
from paceline.launchers.ports import LOOPBACK
from paceline.launchers.private import for_gitignore, private_below
from paceline.launchers.ray.actors import CONCURRENT, Place, TaskActor
from paceline.launchers.ray.bundles import Bundles, Wish, bundles, fit, machines_told, resources, told
from paceline.launchers.ray.bundles import check as check_wish
from paceline.launchers.ray.growing import Growth, growth
from paceline.launchers.ray.member import Member
from paceline.launchers.ray.ray_cluster import Where, connected, find, parse, why
from paceline.launchers.ray.team import Away, Team, check_version
from paceline.launchers.supervisor import Patience, supervise
from paceline.telemetry.paths import RunPaths

EXCLUDES = ["/runs", ".git", ".venv*", "__pycache__", "/.paceline"]
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set where `ray job submit` has started us
LATER = "later.invalid"  # the host of a worker that has none yet; nobody needs to reach a worker
LOOK_S = 0.5
SAY_FIRST_S, SAY_EVERY_S = 2.0, 10.0
ASK_S = 20.0
HEAD = "node:__internal_head__"  # what Ray's first machine alone has
ACTOR_S = 60.0  # from a bundle that is reserved to an actor that answers


class OnRay(msgspec.Struct, frozen=True, kw_only=True):
    """What --on and its flags say."""

    on: str
    worker_cpus: float = 1.0
    worker_gpus: float = 0.0
    is_colocated: bool = False

    @property
    def flags(self) -> list[str]:
        """As one would type them."""
        words = ["--on", self.on]
        words += ["--worker-cpus", f"{self.worker_cpus:g}"] if self.worker_cpus != 1 else []
        words += ["--worker-gpus", f"{self.worker_gpus:g}"] if self.worker_gpus else []
        return [*words, *(["--colocate"] if self.is_colocated else [])]


def run(request: local.Request, how: OnRay) -> int:
    """Run a cluster on Ray to its end; the exit code comes back."""
    wish = checked(request, how)
    request, resumed = local.with_checkpoint(request)
    asked = bundles(wish)
    where = find(how.on, os.environ)
    shipped, folder = packed(request.program)
    if not where.address:
        check_memory(wish, memory.total_mb())
    brought = travelling(folder, os.environ) if where.address else None
    with connected(where, own_cpus(asked, wish), brought, runtime_env) as ray:
        said(where)
        with reserved(ray, asked, request.settings.wait_s) as group, Actors(ray, wish, request, group) as actors:
            for task, place in asked.of.items():
                actors.make(task, place)
            host = "" if where.address else LOOPBACK
            settle(ray, actors.members, host)
            return supervised(actors, how, Away(program=shipped, host=host), asked.later, resumed)


def own_cpus(asked: Bundles, wish: Wish) -> int:
    """What a Ray that is started for this run alone is told to have: all that the run may ask for.

    >>> wish = Wish(ps=1, workers=40, started=1, worker_cpus=2.0)
    >>> own_cpus(bundles(wish), wish)
    81
    """
    needed = sum(bundle["CPU"] for bundle in asked.wanted) + len(asked.later) * wish.worker_cpus
    return max(usable_cores(), ceil(needed))


def check_memory(wish: Wish, memory_mb: float) -> None:
    """Refuse what a Ray of this machine alone could not hold; any other one has as many CPUs as it says.

    >>> check_memory(Wish(ps=1, workers=2), 8000.0)
    """
    each_mb = memory.TASK_MB + memory.ACTOR_MB
    if short := memory.lacking("This machine", wish.ps + wish.workers, memory_mb, each_mb):
        raise UsageError(f"{short}; ask for less, or name a Ray cluster with --on ray://HOST.")


def dry_run(request: local.Request, how: OnRay) -> int:
    """Print what run() would ask Ray for, and start nothing."""
    asked = bundles(checked(request, how))
    resumed = local.with_checkpoint(request)[1]
    print(f"Asks Ray for {told(asked.wanted)}, spread over its machines")
    for task, place in asked.of.items():
        print(f"{task} in bundle {place}")
    if asked.later:
        print(f"{', '.join(map(str, asked.later))}: when there is room")
    print("\n".join([*resumed, "Dry run: nothing was started."]))
    return EXIT_OK


def checked(request: local.Request, how: OnRay) -> Wish:
    """1. What is asked for, or a UsageError."""
    settings = request.settings
    parse(how.on)
    if isinstance(request.ps, tuple) or isinstance(request.workers, tuple):
        raise UsageError("--on ray finds the addresses itself; leave out --ps_hosts and --worker_hosts.")
    if settings.plain:
        raise UsageError("--plain starts programs on this host; leave out --on, or let the script use paceline.")
    if any(fault.is_sent for fault in chaos.parse(settings.chaos)):
        raise UsageError("--on ray: faults by the clock need processes of this host; say at which step, as in @500.")
    check_program(request.program)
    wish = Wish(
        ps=request.ps,
        workers=request.workers,
        started=settings.started_workers,
        worker_cpus=how.worker_cpus,
        worker_gpus=how.worker_gpus,
        is_colocated=how.is_colocated,
    )
    check_wish(wish)
    check(settings, cluster_of({}, wish))
    if settings.tls:
        check_can_make()
    local.check_folder(request)
    return wish


def cluster_of(places: Mapping[Task, Place], wish: Wish) -> ClusterSpec:
    """5. Who listens where; whoever has no place yet has an address that leads nowhere."""
    jobs: dict[str, list[str]] = {}
    for number, task in enumerate([*_tasks("ps", wish.ps), *_tasks("worker", wish.workers)], start=1):
        address = places[task].address if task in places else f"{LATER}:{number}"
        jobs.setdefault(task.job, []).append(address)
    return ClusterSpec(jobs)


def _tasks(job: str, count: int) -> list[Task]:
    return [Task(job, index) for index in range(count)]


def packed(program: Program) -> tuple[Program, Path]:
    """The user's folder, which travels, and the program as it is called there: the folder one is in, else the script's.

    >>> packed(Program(script="train", is_module=True))[0].script
    'train'
    """
    here = Path.cwd()
    if program.is_module:
        return program, here
    script = Path(program.script).resolve()
    folder = here if script.is_relative_to(here) else script.parent
    return msgspec.structs.replace(program, script=str(script.relative_to(folder))), folder


def travelling(folder: Path, environ: Mapping[str, str]) -> Path | None:
    """The folder, if Ray is to copy it; a job that was submitted has brought it along."""
    if "working_dir" in environ.get(JOB, ""):
        return None
    if folder in (Path.home(), Path("/")):
        raise UsageError(f"--on ray would copy all of {folder}; put the script into a folder of its own.")
    return folder


def runtime_env(folder: Path) -> dict[str, object]:
    """What of a folder Ray copies to its machines; all of it is looked through, which may take long."""
    private = private_below(folder, EXCLUDES, follows_links=True)  # as Ray does
    return {"working_dir": str(folder), "excludes": [*EXCLUDES, *map(for_gitignore, private)]}


def said(where: Where) -> None:
    """Which Ray it is."""
    if where.address:
        print(f"Ray: {where.address} ({where.said_by})", flush=True)
    else:
        print("Ray: none was found, so one was started for this run (RAY_ADDRESS or --on ray://HOST:PORT names one)")


@contextmanager
def reserved(ray: Any, asked: Bundles, wait_s: float) -> Iterator[Any]:
    """3. A placement group with all bundles; ClusterError when they can never fit, or did not in time."""
    from ray.util.placement_group import placement_group, remove_placement_group

    check_can_fit(ray, asked, wait_s)
    group = placement_group(asked.wanted, strategy="SPREAD")
    try:
        wait_for_room(ray, group, asked, wait_s)
        yield group
    finally:
        with suppress(Exception):
            remove_placement_group(group)


def check_can_fit(ray: Any, asked: Bundles, wait_s: float) -> None:
    """Refuse at once where waiting cannot help: the machines, and those an autoscaler may add, hold too little. Says
    that it waits for an autoscaler."""
    machines = machines_of(ray)
    if fit(asked.wanted, machines):
        return
    short = f"asks for {told(asked.wanted)}, and Ray has {machines_told(machines)}"
    try:
        first = {HEAD: 0.001} if any(HEAD in machine for machine in machines) else {}
        answer = ray.get(ray.remote(num_cpus=0, resources=first)(growth).remote(), timeout=ASK_S)
        may_come = msgspec.json.decode(answer, type=Growth | None)
        grows = may_come.told() if may_come is not None else ""
    except ray.exceptions.GetTimeoutError:  # a busy Ray has not said that nothing comes
        may_come, grows = Growth(), f"; whether machines may be added was not said within {ASK_S:g} s"
    except ray.exceptions.RayError as error:
        raise ClusterError(f"This run {short}; whether it may grow could not be asked: {why(error)}") from None
    if may_come is not None and may_come.kinds is not None:
        may_come = may_come if fit(asked.wanted, [*machines, *may_come.machines(len(asked.wanted))]) else None
    if may_come is None:
        raise UsageError(f"This run can never fit: it {short}{grows}; ask for less, or add machines.")
    print(f"This run {short}{grows}: waiting for them, up to {wait_s:g} s (--wait-s)", flush=True)


def machines_of(ray: Any) -> list[dict[str, float]]:
    """What each machine of the cluster has, in use or not."""
    return [dict(each["Resources"]) for each in ray.nodes() if each["Alive"]]


def wait_for_room(ray: Any, group: Any, asked: Bundles, wait_s: float) -> None:
    """Until all bundles are reserved; says what is missing, and for how long it will wait."""
    began_s, said_s = time.monotonic(), 0.0
    while not group.wait(timeout_seconds=LOOK_S):
        waited_s = time.monotonic() - began_s
        free = resources(ray.available_resources())
        if waited_s >= wait_s:
            raise ClusterError(
                f"gave up after {waited_s:.0f} s (--wait-s): the run asks Ray for {told(asked.wanted)}, and {free} is "
                f"free of {machines_told(machines_of(ray))}."
            )
        if waited_s - said_s >= (SAY_EVERY_S if said_s else SAY_FIRST_S):
            said_s = waited_s
            print(
                f"Waiting for Ray ({waited_s:.0f} s of {wait_s:g}): asked for {told(asked.wanted)}; free now: {free}",
                flush=True,
            )


class Actors:
    """4. The actors of a run; all of them end with it."""

    def __init__(self, ray: Any, wish: Wish, request: local.Request, group: Any) -> None:
        self.ray = ray
        self.wish = wish
        self.request = request
        self.members: dict[Task, Member] = {}
        self._group = group

    def make(self, task: Task, bundle: int | None = None) -> None:
        """An actor in its bundle; without one, when there is room. It has no arguments, for Ray shows those."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = self.wish.of_ps if task.job == "ps" else self.wish.of_worker
        options: dict[str, Any] = {
            "num_cpus": needs["CPU"],
            "num_gpus": needs.get("GPU", 0),
            "max_restarts": self.request.settings.max_restarts,
            "max_concurrency": CONCURRENT,
        }
        if bundle is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, bundle)
        handle = self.ray.remote(TaskActor).options(**options).remote()
        self.members[task] = Member(task, handle, is_later=bundle is None)

    def __enter__(self) -> "Actors":
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members.values():
            with suppress(Exception):
                self.ray.kill(member.handle)


def settle(ray: Any, members: Mapping[Task, Member], host: str) -> None:
    """Hear from every actor where it is, and that it is one of ours."""
    asked = {task: member.handle.place.remote(host, 0) for task, member in members.items()}
    for task, member in members.items():
        try:
            member.place = msgspec.json.decode(ray.get(asked[task], timeout=ACTOR_S), type=Place)
        except ray.exceptions.GetTimeoutError:
            raise ClusterError(f"the Ray actor of {task} did not answer within {ACTOR_S:g} s.") from None
        except ray.exceptions.RayError as error:
            raise ClusterError(f"the Ray actor of {task} could not be made: {why(error, ray)}") from None
        check_version(member.place)


def supervised(actors: Actors, how: OnRay, away: Away, later: Sequence[Task], resumed: Sequence[str]) -> int:
    """5. and 6. The run folder, and the run."""
    request = actors.request
    places = {task: member.place for task, member in actors.members.items() if member.place is not None}
    cluster = cluster_of(places, actors.wish)
    check_lane(request.settings.lane, {place.machine for place in places.values()})
    paths = local.folder_of(request)
    with local.held(paths), token_in(paths.root) as token:
        run = make_folder(request, how, cluster, paths, places)
        announce(run, places, resumed)
        for task in later:
            actors.make(task)
        team = Team(actors.ray, run, actors.members, msgspec.structs.replace(away, token=token))
        try:
            team.settle_all()
        except ClusterError as error:
            write_failure(run.settings, cluster, paths, str(error))
            raise
        return supervise(run, Patience(), team)


def make_folder(
    request: local.Request, how: OnRay, cluster: ClusterSpec, paths: RunPaths, places: Mapping[Task, Place]
) -> Run:
    """As on one machine, and cluster.json says which machine each task is on."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, int(how.worker_cpus)))
    run = local.run_in(request, cluster, paths, threads, tuple(how.flags))
    local.fill(run, {task: on_machine(task, place, threads) for task, place in places.items()})
    return run


def on_machine(task: Task, place: Place, threads: str) -> dict[str, str]:
    """What cluster.json says of a task."""
    cards = {"cards": place.cards} if place.cards and task.job != "ps" else {}
    return {"host": place.machine, "threads": threads, **cards}


def announce(run: Run, places: Mapping[Task, Place], resumed: Sequence[str]) -> None:
    """Print the first lines: the run folder, the cluster, what is resumed, and where each task runs."""
    lines = local.first_lines(run, resumed)
    by_machine: dict[str, list[str]] = {}
    for task, place in places.items():
        by_machine.setdefault(f"{place.machine} ({place.host})", []).append(str(task))
    lines += [f"{machine}: {', '.join(tasks)}" for machine, tasks in by_machine.items()]
    room, started = len(run.cluster.workers), len(run.started)
    if started < room:
        lines.append(f"{started} of {room} workers are started; the others join when Ray has room for them")
    if os.environ.get(JOB) and run.paths.root.is_relative_to(Path.cwd()):
        lines.append("This is a Ray job: what it writes below its folder goes with it; --run-dir PATH keeps the run")
    print("\n".join([*lines, f"OMP_NUM_THREADS={run.threads} in every task"]), flush=True)
