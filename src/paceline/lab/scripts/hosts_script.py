"""HOW does a cluster run on hosts of its own? Tasks in network namespaces, watched until the last one has ended.

Started by lab/measuring/whole_runs, or by hand as root:

    python -m paceline.lab.scripts.hosts_script --run-dir runs/two --hosts ps:0,worker:0/worker:1 -m MODULE

leaves summary.json as `paceline run` does, and what it saw of processors and cables in lab.json, unless the program
tells something there itself. One host without root is the machine itself. Must never leave a process behind.

1. make the hosts, 2. start the tasks in them, 3. look at them until the workers and then the ps have ended, 4. end
what is left, sum up.
"""

import argparse
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from paceline.cluster.discovery import Assignment, encode_for_child
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import EXIT_OK, EXIT_TRAINING
from paceline.lab.measuring.hosts import Host, hosts, lacking
from paceline.lab.measuring.interrupts import interruptible, undisturbed
from paceline.lab.measuring.processes import Process
from paceline.lab.measuring.starting import PYTHON
from paceline.lab.scripts.curves import TOLD
from paceline.lab.scripts.watched import Look, Watched, net_of
from paceline.launchers import closing, gpus
from paceline.launchers.ports import Reserved
from paceline.telemetry import read, summary
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.sampler import Sampler
from paceline.transport.security import Secret

FIRST_PORT = 2222
LOOK_S = 0.5
PS_S = 10.0  # for a ps, after the last worker
END_S = 3.0  # for a ps that is asked to end; the lab kills this process when it takes much longer


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    placed = [[Task.parse(task) for task in host.split(",")] for host in args.hosts.split("/")]
    paths = RunPaths(args.run_dir)
    paths.create()
    with interruptible(), there(placed, args.rate, args.every) as (cluster, at):
        whereabouts = {"run_id": paths.root.name, "run_dir": str(paths.root), "max_restarts": 0}
        settings = msgspec.convert({"run_id": "", **msgspec.json.decode(args.settings)}, Settings)
        settings = msgspec.structs.replace(settings, **whereabouts)
        watch = Watch(at)
        tasks = Tasks(cluster, settings, paths, args.program, at)
        try:
            failed = tasks.follow(watch)
        finally:
            with undisturbed():
                tasks.end()
    return sum_up(cluster, settings, paths, failed, watch.watched(is_alone=any(host for host in at.values())))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--hosts", required=True, help="tasks of a host with commas, hosts with slashes")
    parser.add_argument("--rate", default="", help="of the last host's cable, as tc writes it: 10mbit")
    parser.add_argument("--every", action="store_true", help="--rate is of every host's cable")
    parser.add_argument("--settings", default="{}", help="as JSON")
    parser.add_argument(
        "-m", dest="program", nargs=argparse.REMAINDER, required=True, help="the module that every worker runs"
    )
    return parser.parse_args(argv)


Places = dict[Task, Host | None]


@contextmanager
def there(
    placed: Sequence[Sequence[Task]], rate: str = "", is_of_every: bool = False
) -> Iterator[tuple[ClusterSpec, Places]]:
    """1. Every task's address and host; None: the machine itself, where one host is asked for that cannot be had."""
    if len(placed) == 1 and lacking():
        with Reserved() as ports:
            addresses = dict(zip(placed[0], ports.addresses(len(placed[0])), strict=True))
            ports.before_start()
            yield cluster_of(addresses), dict.fromkeys(placed[0])
        return
    with hosts(len(placed), is_switched=is_of_every) as made:
        for host in (made if is_of_every else made[-1:]) if rate else []:
            host.limit(rate)
        at: Places = {task: host for host, tasks in zip(made, placed, strict=True) for task in tasks}
        addresses = {
            task: f"{host.address}:{FIRST_PORT + number}"
            for host, tasks in zip(made, placed, strict=True)
            for number, task in enumerate(tasks)
        }
        yield cluster_of(addresses), at


def cluster_of(addresses: dict[Task, str]) -> ClusterSpec:
    """
    >>> cluster_of({Task("worker", 1): "b:1", Task("ps", 0): "a:1", Task("worker", 0): "a:2"}).as_dict()
    {'ps': ['a:1'], 'worker': ['a:2', 'b:1']}
    """
    jobs: dict[str, list[str]] = {}
    for task in sorted(addresses):
        jobs.setdefault(task.job, []).append(addresses[task])
    return ClusterSpec(jobs)


class Watch:
    """Looks at tasks and at the interfaces of their hosts."""

    def __init__(self, at: Places) -> None:
        self._pids = list(dict.fromkeys("self" if host is None else str(host.pid) for host in at.values()))
        self._sampler = Sampler()
        self._began_s = time.monotonic()
        self._ended_s = self._began_s
        self._tasks: set[Task] = set()
        self.looks: list[Look] = []

    def begin(self, task: Task) -> None:
        self._tasks.add(task)
        self._sampler.begin(task, time.monotonic())

    def look(self, pids: dict[Task, int]) -> None:
        now_s = time.monotonic()
        cores = {str(task): round(seen[0], 3) for task, seen in self._sampler.look(pids, now_s).items()}
        nets = [net_of(Path(f"/proc/{pid}/net/dev").read_text(encoding="utf-8")) for pid in self._pids]
        self.looks.append(Look(at_s=round(now_s - self._began_s, 3), cores=cores, hosts=nets))
        self._ended_s = now_s

    def watched(self, is_alone: bool) -> Watched:
        cpu_s = {str(task): self._sampler.utilisation(task).cpu_s for task in sorted(self._tasks)}
        return Watched(looks=self.looks, wall_s=self._ended_s - self._began_s, cpu_s=cpu_s, is_alone=is_alone)


class Tasks:
    """The processes of all tasks."""

    def __init__(
        self, cluster: ClusterSpec, settings: Settings, paths: RunPaths, program: Sequence[str], at: Places
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._paths = paths
        self._program = program
        self._at = at
        self._secret = Secret(secrets.token_bytes(32), None)
        self._processes: dict[Task, Process] = {}

    def follow(self, watch: Watch) -> dict[Task, int]:
        """2 and 3. Until all have ended, or one has failed; the exit codes of those that have."""
        for task in [*self._cluster.ps, *self._cluster.workers]:
            self._processes[task] = self._start(task)
            watch.begin(task)
        watch.look(self._pids())
        workers = [self._processes[task] for task in self._cluster.workers]
        while not all(process.code is not None for process in workers) and not self._failed():
            next(process for process in workers if process.code is None).is_gone(LOOK_S)
            watch.look(self._pids())
        failed = self._failed()
        if not failed:
            self._wait_for_ps(watch)
        return failed

    def _wait_for_ps(self, watch: Watch) -> None:
        """It ends by itself when its workers have closed."""
        deadline_s = time.monotonic() + PS_S
        for process in self._processes.values():
            process.is_gone(deadline_s - time.monotonic())
        watch.look(self._pids())

    def _start(self, task: Task) -> Process:
        host = self._at[task]
        command = [*(host.enter if host else ()), *PYTHON, "paceline.launchers.entry", "--parent", str(os.getpid())]
        command += [] if task.job == "ps" else ["--module", *self._program]
        assignment = Assignment(self._cluster, task, 1, self._settings, self._secret, "launcher")
        environ = {**os.environ, **gpus.environ_of(task, self._settings), **encode_for_child(assignment)}
        return Process(str(task), command, environ, self._paths.logs(task), speaks=False)

    def _pids(self) -> dict[Task, int]:
        return {task: process.pid for task, process in self._processes.items() if process.code is None}

    def _failed(self) -> dict[Task, int]:
        return {task: process.code for task, process in self._processes.items() if process.code}

    def end(self) -> None:
        """4. A ps is asked, so that it gives its memory back and tells what it did; nobody waits for a worker."""
        deadline_s = time.monotonic() + END_S
        for task, process in self._processes.items():
            process.terminate() if task.job == "ps" else process.kill()
        for process in self._processes.values():
            process.is_gone(deadline_s - time.monotonic())
            process.kill()


def sum_up(cluster: ClusterSpec, settings: Settings, paths: RunPaths, failed: dict[Task, int], watched: Watched) -> int:
    error = "; ".join(f"{task} {closing.how(code)}" for task, code in failed.items()) or None
    told = summary.build(
        settings,
        cluster,
        read.reports(paths.root),
        ok=not failed,
        wall_s=watched.wall_s,
        restarts=0,
        lost=[str(task) for task in failed],
        error=error,
    )
    summary.write(paths.root, told)
    if not (paths.root / TOLD).exists():
        (paths.root / TOLD).write_bytes(msgspec.json.encode(watched))
    return EXIT_TRAINING if failed else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
