"""HOW FAST is the lane between two hosts? The same bytes there and back by ours, a raw socket and Gloo, in turn.

Started by lab/measuring/whole_runs: `--bytes N --connections C [--tls] [--limit-mbit M] … --told FILE`. The hosts
are network namespaces with a cable between them; on the first are the ends that serve, on the second one process a
connection (lab/scripts/link_ends). Must never leave a process behind.

1. make the hosts, limit the cable if asked to, start every system, wait until each is ready, see how long it takes,
2. each repetition: every system once, in an order of its own; the raw socket is there twice (A/A),
3. end all processes; the next life begins with 1: where memory lies decides by some percent how fast a program is,
4. all written down together.
"""

import argparse
import os
import random
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from paceline.cluster.certificate import make_certificate
from paceline.cluster.discovery import Assignment, encode_for_child
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec
from paceline.errors import ClusterError
from paceline.lab.measuring.hosts import OUTER, Host, hosts
from paceline.lab.measuring.interrupts import interruptible, undisturbed
from paceline.lab.measuring.meters import RunMeter
from paceline.lab.measuring.processes import Failed, Group, Process, output_of
from paceline.lab.measuring.starting import PYTHON
from paceline.lab.scripts.crossed import GLOO, OURS, RAW, RAW_AGAIN, Crossed
from paceline.lab.scripts.watched import net_of
from paceline.telemetry.paths import RunPaths
from paceline.transport.security import Secret

ENDS = "paceline.lab.scripts.link_ends"
PORTS = {OURS: 2222, RAW: 3301, RAW_AGAIN: 3302, GLOO: 3303}
WHATS = {RAW: "raw", RAW_AGAIN: "raw", GLOO: "gloo"}
READY_S = 120.0
SEGMENT_S = 120.0
BURST, LATENCY = "64kb", "100ms"  # of the limited link


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--limit-mbit", type=int, default=0, help="of the cable, from workers to ps; then only pushed")
    parser.add_argument("--lives", type=int, default=2)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a system in a repetition, about")
    parser.add_argument("--told", type=Path, required=True)
    args = parser.parse_args(argv)
    told = Crossed(us={system: [] for system in systems(args)})
    meter = RunMeter()
    try:
        with interruptible():
            for life in range(args.lives):
                with started(args, RunPaths(args.told.parent / f"life-{life}")) as (groups, worker_host):
                    measure(args, groups, worker_host, random.Random(life), told)
    except ClusterError as error:
        raise SystemExit(str(error)) from error
    args.told.write_bytes(msgspec.json.encode(msgspec.structs.replace(told, others=meter.others())))  # 4


def systems(args: argparse.Namespace) -> list[str]:
    """What can do it: Gloo, as torch brings it, does not encrypt; and does not say when a push has come."""
    if args.limit_mbit:
        return [OURS, RAW]
    return [OURS, RAW, RAW_AGAIN] if args.tls else [OURS, RAW, RAW_AGAIN, GLOO]


# --- 1 and 3 ------------------------------------------------------------------------------------------------------


@contextmanager
def started(args: argparse.Namespace, paths: RunPaths) -> Iterator[tuple[dict[str, Group], Host]]:
    """Everything that is measured, ready; ended when the block is left."""
    paths.create()
    processes: list[Process] = []
    with tempfile.TemporaryDirectory(prefix="paceline-links-") as folder, hosts(2) as (ps_host, worker_host):
        keys = Path(folder) if args.tls else None
        if keys is not None:
            make_certificate(keys)
        if args.limit_mbit:
            limit(worker_host, args.limit_mbit)
        try:
            groups = {}
            for system in systems(args):
                start = start_ours if system == OURS else start_theirs
                groups[system] = Group()
                for process in start(args, system, paths, keys, (ps_host, worker_host)):
                    processes.append(process)
                    if process.speaks:
                        groups[system].processes.append(process)
            for group in groups.values():
                group.await_ready(time.monotonic() + READY_S)
            yield groups, worker_host
        finally:
            with undisturbed():
                for process in processes:
                    process.kill()


def limit(host: Host, mbit: int) -> None:
    """So much a second leaves the host, and no more."""
    command = f"tc qdisc add dev {OUTER} root tbf rate {mbit}mbit burst {BURST} latency {LATENCY}"
    if output_of([*host.enter, *command.split()]) is None:
        raise Failed(f"`{command}` failed in a network namespace; is `tc` (iproute2) installed?")


def start_theirs(
    args: argparse.Namespace, system: str, paths: RunPaths, keys: Path | None, made: tuple[Host, Host]
) -> Iterator[Process]:
    """The end that serves, and one process a connection."""
    what, log = WHATS[system], paths.root / "logs"
    load = ["--bytes", str(args.bytes), "--connections", str(args.connections)]
    load += ["--address", f"{made[0].address}:{PORTS[system]}"]
    load += ["--push-only"] if args.limit_mbit else []
    load += ["--keys", str(keys)] if keys is not None else []
    command = [*made[0].enter, *PYTHON, ENDS, f"serve-{what}", *load]
    yield Process(f"{system}, serving", command, environ(), log / f"{PORTS[system]}-serves.log", speaks=False)
    for number in range(args.connections):
        command = [*made[1].enter, *PYTHON, ENDS, what, *load, "--number", str(number)]
        name = log / f"{PORTS[system]}-{number}.log"
        yield Process(f"{system} {number}", command, environ(), name, speaks=True)


def start_ours(
    args: argparse.Namespace, system: str, paths: RunPaths, keys: Path | None, made: tuple[Host, Host]
) -> Iterator[Process]:
    """A ps and its workers, through the package's own entry."""
    port = PORTS[system]
    workers = [f"{made[1].address}:{port + number}" for number in range(args.connections)]
    cluster = ClusterSpec({"ps": [f"{made[0].address}:{port}"], "worker": workers})
    settings = Settings(
        run_id="links", run_dir=str(paths.root), mode="sync", save_every="none", max_restarts=0, tls=args.tls
    )
    secret = Secret(secrets.token_bytes(32), keys)
    for task in [*cluster.ps, *cluster.workers]:
        is_ps = task.job == "ps"
        command = [*made[0 if is_ps else 1].enter, *PYTHON, "paceline.launchers.entry", "--parent", str(os.getpid())]
        if not is_ps:
            command += ["--module", ENDS, "ps", "--bytes", str(args.bytes)]
            command += ["--push-only"] if args.limit_mbit else []
        assignment = Assignment(cluster, task, 1, settings, secret, "launcher")
        said = {**environ(), **encode_for_child(assignment)}
        yield Process(str(task), command, said, paths.logs(task), speaks=not is_ps)


def environ() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


# --- 2 ------------------------------------------------------------------------------------------------------------


def measure(
    args: argparse.Namespace, groups: dict[str, Group], worker_host: Host, chance: random.Random, told: Crossed
) -> None:
    """All repetitions of one life."""
    counts = {system: count_of(group, args.seconds) for system, group in groups.items()}
    for _ in range(args.reps):
        order = list(groups)
        chance.shuffle(order)
        for system in order:
            sent = sent_bytes(worker_host)
            us = max(groups[system].run(0 if args.limit_mbit else 1, counts[system], SEGMENT_S).us)
            told.us[system].append(us)
            if args.limit_mbit:
                bits = 8 * (sent_bytes(worker_host) - sent)
                told.used.setdefault(system, []).append(bits / (us * counts[system] * args.limit_mbit))


def count_of(group: Group, seconds: float) -> int:
    """How many exchanges take about so long."""
    us = max(group.run(1, 1, SEGMENT_S).us)
    return max(1, round(seconds * 1e6 / us))


def sent_bytes(host: Host) -> int:
    return net_of(Path(f"/proc/{host.pid}/net/dev").read_text(encoding="utf-8")).outer_sent_bytes


if __name__ == "__main__":
    main()
