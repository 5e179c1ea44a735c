"""WHAT does a push cost when nothing is computed? A ps, or several, and null workers, all forked from one nursery.

Started by lab/measuring/whole_runs: `--bytes N --workers W --ps P --lane shm|tcp --seconds S --told FILE`. Null
workers speak to the ps as workers do (worker/requests/client: frames, MACs, checksums, acks), async, SGD, and import no
torch of their own. Must never leave a process behind.

1. start the nursery; it forks ps and workers, which run this module with `--null FOLDER`,
2. every worker joins, pushes for a while untimed, and waits until all have (a barrier of the cluster),
3. it pushes until the time is up, then writes how often and how long,
4. all written down together.
"""

import argparse
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.cluster.discovery import Assignment, encode_for_child
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.lab.measuring.interrupts import interruptible, undisturbed
from paceline.lab.scripts.carriers import filled
from paceline.lab.scripts.pushes import Pushed, Pushes
from paceline.launchers import closing
from paceline.launchers.nursery import Forked, Nursery
from paceline.launchers.ports import Reserved
from paceline.launchers.task import start_session
from paceline.params.layout import Layout, TensorSpec
from paceline.params.placement import place
from paceline.telemetry.paths import RunPaths
from paceline.transport.security import Secret
from paceline.wire.messages import Barrier, Close, OptimizerSpec
from paceline.worker.requests.client import Client

MODULE = "paceline.lab.scripts.scale_script"
NEEDS = ("paceline.launchers.task", MODULE)  # of a null worker, before the fork
UNTIMED = 3
TOGETHER = 8  # pushes between two looks at the clock, of small loads
LIMIT_S = 300.0
END_S = 3.0
LOOK_S = 0.02


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--lane", default="auto")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--told", type=Path)
    parser.add_argument("--null", type=Path, help="be a null worker; where it writes what it did")
    args = parser.parse_args(argv)
    if args.null is not None:
        null_worker(args)
        return
    with interruptible():
        args.told.write_bytes(msgspec.json.encode(measured(args)))


def measured(args: argparse.Namespace) -> Pushes:
    """1 and 4. From the nursery to the numbers."""
    paths = RunPaths(args.told.parent)
    paths.create()
    with Reserved() as ports, tempfile.TemporaryDirectory(prefix="paceline-scale-") as told:
        cluster = ClusterSpec({"ps": ports.addresses(args.ps), "worker": ports.addresses(args.workers)})
        ports.before_start()
        nursery = Nursery(os.environ)
        began_s = time.monotonic()
        born: dict[Task, Forked] = {}
        failed: Task | None = None
        try:
            for task in [*cluster.ps, *cluster.workers]:
                born[task] = give_birth(nursery, cluster, task, args, Path(told), paths)
                if len(born) == 1:
                    began_s = time.monotonic()  # it has waited for the imports
            failed = all_ended(born, LIMIT_S)
        finally:
            with undisturbed():
                end(born)
                nursery.close()
        if failed is not None:
            raise SystemExit(f"{failed} failed: {' '.join(closing.reason(paths.logs(failed))[-1:])}")
        pushed = [msgspec.json.decode(path.read_bytes(), type=Pushed) for path in sorted(Path(told).glob("*.json"))]
    return Pushes(workers=pushed, started_s=max(each.ready_at_s for each in pushed) - began_s)


def give_birth(
    nursery: Nursery, cluster: ClusterSpec, task: Task, args: argparse.Namespace, told: Path, paths: RunPaths
) -> Forked:
    settings = Settings(run_id="scale", lane=args.lane, save_every="none", max_restarts=0, lease_s=60.0)
    assignment = Assignment(cluster, task, 1, settings, SECRET, "launcher")
    argv = ["--parent", str(os.getpid())]
    if task.job != "ps":
        argv += ["--module", MODULE, "--bytes", str(args.bytes), "--seconds", str(args.seconds), "--null", str(told)]
    environ = {**os.environ, **encode_for_child(assignment)}
    return nursery.birth(f"paceline {task}", argv, environ, paths.logs(task), {}, None if task.job == "ps" else NEEDS)


SECRET = Secret(secrets.token_bytes(32), None)


def all_ended(born: dict[Task, Forked], limit_s: float) -> Task | None:
    """Wait until all have ended; who failed first, or has not ended in time."""
    deadline_s = time.monotonic() + limit_s
    left = dict(born)
    while left and time.monotonic() < deadline_s:
        for task, forked in list(left.items()):
            ended = os.waitid(os.P_PID, forked.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if ended is not None and ended.si_status:
                return task
            if ended is not None:
                del left[task]
        time.sleep(LOOK_S)
    return next(iter(left), None)


def end(born: dict[Task, Forked]) -> None:
    """Nobody is left: asked first, so that a ps gives its memory back."""
    for number, within_s in ((signal.SIGTERM, END_S), (signal.SIGKILL, END_S)):
        for forked in born.values():
            with suppress(ProcessLookupError):
                os.kill(forked.pid, number)
        deadline_s = time.monotonic() + within_s
        while born and time.monotonic() < deadline_s:
            for task, forked in list(born.items()):
                if os.waitid(os.P_PID, forked.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                    forked.reap()
                    del born[task]
            time.sleep(LOOK_S if born else 0.0)


# --- a null worker ----------------------------------------------------------------------------------------------------


def null_worker(args: argparse.Namespace) -> None:
    """2 and 3."""
    session = start_session()
    assert session.assignment is not None
    layout = Layout((TensorSpec("load", (args.bytes // 4,), (1,), "float32", 0),))
    plan = place(layout, len(session.assignment.cluster.ps), "bytes")
    parameters, gradient = filled(plan.total_bytes), memoryview(bytearray(plan.total_bytes))  # zeros change nothing
    client = Client(session.identity(), layout, plan, parameters, session.say)
    client.join(OptimizerSpec("SGD", [{"lr": 0.001}]), lambda: b"", lambda: None)
    parts = [gradient[plan.base(index) : plan.base(index) + size] for index, size in enumerate(plan.shard_bytes)]
    for _ in range(UNTIMED):
        push(client, parts)
    client.ask(Barrier(0))
    ready_at_s = time.monotonic()
    took_s = pushes(client, parts, args.seconds)
    passed_s = time.monotonic() - ready_at_s
    client.ask(Barrier(0))
    told = Pushed(took_us=[1e6 * each for each in took_s[-1000:]], count=len(took_s), passed_s=passed_s,
                  ready_at_s=ready_at_s)  # fmt: skip
    (args.null / f"{session.worker_index:03}.json").write_bytes(msgspec.json.encode(told))
    for link in client.links:
        link.close_run(Close())
    client.close()


def pushes(client: Client, parts: Sequence[memoryview], seconds: float) -> list[float]:
    """One after the other until the time is up; how long each took."""
    deadline_s = time.monotonic() + seconds
    took_s: list[float] = []
    last_s = time.perf_counter()
    while not took_s or time.monotonic() < deadline_s:
        for _ in range(TOGETHER if parts[0].nbytes < 1 << 20 else 1):
            push(client, parts)
            now_s = time.perf_counter()
            took_s.append(now_s - last_s)
            last_s = now_s
    return took_s


def push(client: Client, parts: Sequence[memoryview]) -> None:
    """A gradient there, an update, the parameters back: a whole step without its computing."""
    payloads: list[tuple[memoryview, ...]] = []
    for link, part in zip(client.links, parts, strict=True):
        if link.slot is not None:
            link.slot[:] = part
        payloads.append(() if link.slot is not None else (part,))
    client.push(payloads)
    client.take()


if __name__ == "__main__":
    main()
