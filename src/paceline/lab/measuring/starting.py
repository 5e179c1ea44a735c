"""HOW is a scenario brought to life? Its command lines, environments and files, for each kind of scenario.

Called by lab/measuring/repetitions. Starts and returns; waiting, measuring and ending are others' business.
"""

import importlib.metadata
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.cluster.certificate import make_certificate
from paceline.cluster.discovery import CLIENT, Assignment, encode_for_child
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec
from paceline.errors import UsageError
from paceline.lab.measuring.processes import Failed, Group, Process
from paceline.lab.scenario import KERAS, Kind, Scenario
from paceline.launchers.ports import Reserved
from paceline.telemetry.paths import RunPaths
from paceline.transport.grpc import GrpcLane, check_installed
from paceline.transport.security import Secret

PYTHON = (sys.executable, "-P", "-m")
WORKER = "paceline.lab.scripts.worker_script"
KERAS_WORKER = "paceline.lab.scripts.keras_script"
CARRIER = "paceline.lab.scripts.carriers"
FEEDER = "paceline.lab.scripts.feeder_script"
STARTS = "paceline.lab.scripts.start_script"
TOWERS = "paceline.lab.scripts.towers_script"
PEERS = Path("bench") / "peers"
PEERS_VENV = Path(".venv-peers")


class Starter:
    """Starts scenarios, each with a folder of its own below `folder`."""

    def __init__(self, folder: Path, data: Path, carrier_bytes: int, ports: Reserved) -> None:
        self._folder = folder
        self._data = ("--data", str(data))
        self._carrier_bytes = carrier_bytes
        self._ports = ports
        self._environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def start(self, scenario: Scenario, group: Group) -> None:
        """Put the scenario's processes into `group` one by one, so that those that were started are known."""
        trained: tuple[str, ...] = (*self._data, "--what", scenario.what)
        if scenario.straggler is not None:
            trained += ("--straggler", str(scenario.straggler))
        batch = () if scenario.batch is None else ("--batch", str(scenario.batch))
        trained += batch
        worker = KERAS_WORKER if scenario.what == KERAS else WORKER
        one = msgspec.structs.replace(scenario, num_workers=1)  # of what starts its own workers
        if scenario.kind is Kind.SINGLE:
            self._alone(scenario, group, worker, ("single", *trained))
        elif scenario.kind is Kind.PEER:
            self._peer(scenario, group)
        elif scenario.kind is Kind.DRIVER:
            self._driver(scenario, group)
        elif scenario.kind is Kind.START:
            self._alone(one, group, STARTS, (scenario.what, *started(scenario)))
        elif scenario.kind is Kind.CLUSTER:
            self._cluster(scenario, group, (worker, "worker", *trained))
        elif scenario.kind is Kind.TOWERS:
            self._alone(one, group, TOWERS, (*trained, "--towers", str(scenario.num_workers)))
        elif scenario.kind is Kind.IN_GRAPH:
            self._in_graph(scenario, group, trained)
        else:
            load = (scenario.what, "--bytes", str(scenario.load_bytes or self._carrier_bytes))
            if scenario.num_ps:
                self._cluster(scenario, group, (CARRIER, *load))
            else:
                self._alone(scenario, group, CARRIER, load)

    def _paths(self, scenario: Scenario) -> RunPaths:
        paths = RunPaths(self._folder / slug(scenario.name))
        paths.create()
        return paths

    def _alone(self, scenario: Scenario, group: Group, module: str, args: tuple[str, ...]) -> None:
        logs = self._paths(scenario).root / "logs"
        command = [sys.executable, "-P", "-m", module, *args]
        for number in range(scenario.num_workers):
            name = scenario.name if scenario.num_workers == 1 else f"process {number}"
            log = logs / f"process-{number}.log"
            group.processes.append(Process(name, command, self._environ, log, speaks=True))

    def _cluster(self, scenario: Scenario, group: Group, program: tuple[str, ...]) -> None:
        """As `paceline run` does: telemetry, log lines and leases on; only no checkpoint at the end."""
        check_lane(scenario.settings)
        paths = self._paths(scenario)
        jobs = {"ps": scenario.num_ps, "worker": scenario.num_workers}
        cluster = ClusterSpec({job: self._ports.addresses(count) for job, count in jobs.items()})
        whereabouts = {"run_id": f"lab-{slug(scenario.name)}", "run_dir": str(paths.root)}
        settings = msgspec.structs.replace(scenario.settings, **whereabouts, save_every="none", max_restarts=0)
        secret = Secret(secrets.token_bytes(32), _keys_dir(settings, paths))
        self._ports.before_start()
        for task in [*cluster.ps, *cluster.workers]:
            assignment = Assignment(cluster, task, 1, settings, secret, "launcher")
            command = [*_entry(scenario), "--parent", str(os.getpid())]
            is_ps = task.job == "ps"
            command += [] if is_ps else ["--module", *program]
            environ = {**self._environ, **encode_for_child(assignment)}
            is_along = not is_ps and cluster.worker_index(task) == scenario.straggler
            log = paths.logs(task)
            group.processes.append(Process(str(task), command, environ, log, speaks=not is_ps, runs_along=is_along))

    def _in_graph(self, scenario: Scenario, group: Group, args: tuple[str, ...]) -> None:
        """Workers that join, and a client that is none of them."""
        paths = self._paths(scenario)
        jobs = {"ps": 1, "worker": scenario.num_workers}  # a launched cluster names a ps; here nobody needs one
        cluster = ClusterSpec({job: self._ports.addresses(count) for job, count in jobs.items()})
        settings = msgspec.structs.replace(scenario.settings, run_id=f"lab-{slug(scenario.name)}")
        secret = Secret(secrets.token_bytes(32), None)
        self._ports.before_start()
        for task in cluster.workers:
            assignment = Assignment(cluster, task, 1, settings, secret, "launcher")
            environ = {**self._environ, **encode_for_child(assignment)}
            command = [*_entry(scenario), "--parent", str(os.getpid()), "--module", FEEDER, "joins", *args]
            log = paths.logs(task)
            group.processes.append(Process(str(task), command, environ, log, speaks=False, only_serves=True))
        hosts = ("--worker-hosts", ",".join(cluster.job_tasks("worker")))
        command = [*PYTHON, FEEDER, "client", *args, *hosts]  # with the secret of any of them
        group.processes.append(Process(str(CLIENT), command, environ, paths.logs(CLIENT), speaks=True))

    def _peer(self, scenario: Scenario, group: Group) -> None:
        """One process a rank, as torchrun would start them; with ps, one process a task, as TensorFlow does."""
        script = peer(scenario.what)
        logs = self._paths(scenario).root / "logs"
        if scenario.num_ps:
            self._peer_tasks(scenario, group, script, logs)
            return
        host, _, port = self._ports.addresses(1)[0].rpartition(":")
        self._ports.before_start()
        world = {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": str(scenario.num_workers)}
        for rank in range(scenario.num_workers):
            environ = {**self._environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [peers_python(), str(script), *self._data]
            log = logs / f"rank-{rank}.log"
            group.processes.append(Process(f"rank {rank}", command, environ, log, speaks=True))

    def _peer_tasks(self, scenario: Scenario, group: Group, script: Path, logs: Path) -> None:
        hosts = {"ps": self._ports.addresses(scenario.num_ps), "worker": self._ports.addresses(scenario.num_workers)}
        self._ports.before_start()
        cluster = [f"--{job}-hosts={','.join(addresses)}" for job, addresses in hosts.items()]
        cluster += ["--sync"] if scenario.settings.mode == "sync" else []
        for job, addresses in hosts.items():
            for task in range(len(addresses)):
                command = [peers_python(), str(script), *self._data, *cluster, "--job", job, "--task", str(task)]
                log, is_ps = logs / f"{job}-{task}.log", job == "ps"
                process = Process(f"{job}:{task}", command, self._environ, log, speaks=not is_ps, only_serves=is_ps)
                group.processes.append(process)

    def _driver(self, scenario: Scenario, group: Group) -> None:
        """One process that starts the others itself, in its process group or so that they end with it."""
        script, log = peer(scenario.what), self._paths(scenario).root / "logs" / "driver.log"
        hosts = {"ps": scenario.num_ps, "worker": scenario.num_workers}
        cluster = [f"--{job}-hosts={','.join(self._ports.addresses(count))}" for job, count in hosts.items()]
        self._ports.before_start()
        command = [peers_python(), str(script), *self._data, *cluster]
        group.processes.append(Process(scenario.name, command, self._environ, log, speaks=True))


def check_lane(settings: Settings) -> None:
    """Raise Failed where the lane's extra is not installed: then it is missing, and nothing is broken."""
    if settings.lane == GrpcLane.name:
        try:
            check_installed()
        except UsageError as error:
            raise Failed(f"missing: {error}") from None


def _keys_dir(settings: Settings, paths: RunPaths) -> Path | None:
    """The folder with the certificate of a cluster that encrypts."""
    if not settings.tls:
        return None
    try:
        make_certificate(paths.root)
    except UsageError as error:
        raise Failed(f"missing: {error}") from None
    return paths.root


def _entry(scenario: Scenario) -> tuple[str, ...]:
    if scenario.without:
        return (*PYTHON, "paceline.lab.scripts.bare", ",".join(scenario.without))
    return (*PYTHON, "paceline.launchers.entry")


def slug(name: str) -> str:
    """A scenario's name as a folder's.

    >>> slug("1 ps + 2 workers, async, shm")
    '1-ps-2-workers-async-shm'
    """
    return "-".join("".join(c if c.isalnum() else " " for c in name).split())


def started(scenario: Scenario) -> tuple[str, ...]:
    """How large the cluster is that lab/scripts/start_script starts, or whose imports it does."""
    return ("--ps", str(scenario.num_ps), "--workers", str(scenario.num_workers))


def peers_python() -> str:
    """That of `make peers`, when it came to its end; else our own, which may have some of what peers need."""
    installed = in_clone(PEERS_VENV / ".installed")
    return str(installed.parent / "bin" / "python") if installed else sys.executable


def peers_versions(names: Sequence[str]) -> dict[str, str]:
    """What `make peers` has installed of these packages; nothing where it did not come to its end."""
    installed = in_clone(PEERS_VENV / ".installed")
    places = [str(place) for place in installed.parent.glob("lib/python*/site-packages")] if installed else []
    every = importlib.metadata.distributions(path=places) if places else ()
    found = sorted((each.name.lower().replace("_", "-"), each.version) for each in every)  # a wheel may say a_b for a-b
    return {f"{name} of the peers": version for name, version in found if name in names}


def peer(what: str) -> Path:
    """The peer's script; Failed where there is none."""
    script = find_peer(what)
    if script is None:
        raise Failed(f"missing: {PEERS / what}.py is not here; run from a clone of the repository")
    return script


def find_peer(what: str) -> Path | None:
    """The peer's script in the clone that this package, or the current folder, belongs to."""
    return in_clone(PEERS / f"{what}.py")


def in_clone(path: Path) -> Path | None:
    """A file of the repository, which an installed package does not have."""
    here = Path(__file__).resolve()
    for root in [*here.parents, Path.cwd(), *Path.cwd().parents]:
        if (root / path).is_file():
            return root / path
    return None
