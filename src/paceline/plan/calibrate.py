"""HOW is a script calibrated? It is run for real, a few seconds each: 1 ps + 1 worker, then all cores busy.

Called by cli/plan and bench/plan. Every run is a `paceline run` of its own in a scratch folder; nothing may be left
running. Runs: shm with 1 worker; tcp with 1 worker, where tcp is asked for; a crowd, as many workers as cores (4 at
most), in async, and in sync where rounds are asked for. The first two are taken apart (plan/timings); of all of them
the mean step is what plan/fitting holds the costs to.
"""

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import msgspec
import numpy as np

from paceline.cluster.cores import usable_cores
from paceline.cluster.discovery import LOOK_VARIABLE
from paceline.errors import TrainingFailed, UsageError
from paceline.lab.measuring.interrupts import undisturbed
from paceline.lab.measuring.processes import Process
from paceline.launchers import closing
from paceline.launchers.entry import Program, check_program
from paceline.launchers.supervisor import NOTHING_TRAINED
from paceline.plan.costs import Costs, Seen
from paceline.plan.fitting import fitted
from paceline.plan.timings import Measured, Timings, costs_of, mean_step_ms
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.records import PsReport

END_S = 10.0
START_S = 120.0  # for a run to come up and end, beside its seconds
CROWD = 4  # workers at most that are run at once, to see how cores disturb each other
WARMUP_SHARE, WARMUP_S = 0.25, 1.0
PASSES = 9
SEED = 0  # of the simulations that costs are fitted with


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """What a timed run left."""

    workers: list[Timings]
    ps: list[PsReport]


class _Summary(msgspec.Struct, frozen=True):
    ps: list[PsReport] = []
    error: str | None = None


def timed_run(program: Program, flags: Sequence[str], seconds: float, threads: int, folder: Path) -> Ran:
    """One real run of the script under the stopwatch; TrainingFailed with its traceback when it fails."""
    paths = RunPaths(folder)
    own = ["--run-dir", str(folder), "--seconds", f"{seconds:g}"]
    own += ["--warmup", f"{min(WARMUP_S, WARMUP_SHARE * seconds):g}"]
    own += ["--module"] if program.is_module else []
    command = [
        sys.executable, "-P", "-m", "paceline", "run", *flags, "--save-every", "none", "--max-restarts", "0",
        "--run-dir", str(folder), "-m", "paceline.plan.timed_script", *own, program.script, *program.args,
    ]  # fmt: skip
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    environ[LOOK_VARIABLE] = "0"  # what the ps of one worker uses shall be what its pushes take
    paths.root.mkdir(parents=True, exist_ok=True)
    log = paths.root / "launcher.log"
    process = Process("paceline run", command, environ, log, speaks=False)
    try:
        is_gone = process.is_gone(seconds + START_S)
    finally:
        with undisturbed():
            process.interrupt(END_S)
    if process.code or not is_gone:
        raise failure(program, paths, log, is_gone)
    workers = [msgspec.json.decode(p.read_bytes(), type=Timings) for p in sorted(folder.glob("timings-*.json"))]
    if not workers:
        raise UsageError(f"{program.script} never made a step with a model that ctx.prepare(...) returned.")
    return Ran(workers=workers, ps=msgspec.json.decode(paths.summary.read_bytes(), type=_Summary).ps)


def failure(program: Program, paths: RunPaths, log: Path, is_gone: bool) -> TrainingFailed | UsageError:
    """Why a run failed: it trained nothing; else the traceback of a worker's log, or what the launcher said."""
    if _summary(paths).error == NOTHING_TRAINED:
        return UsageError(f"{program.script}: {NOTHING_TRAINED}, and there are no steps to calibrate.")
    logs = sorted((paths.root / "logs").glob("*.log")) if (paths.root / "logs").is_dir() else []
    for each in [path for path in logs if path.name.startswith("worker")] + [log]:
        reason = closing.reason(each) if each.exists() else []
        if reason:
            return TrainingFailed("The script failed:\n" + "\n".join(reason))
    if is_gone:
        return TrainingFailed("The script failed without a word.")
    return TrainingFailed("The script did not make its steps in time.")


def _summary(paths: RunPaths) -> _Summary:
    """What the launcher left; nothing, where it did not come so far."""
    try:
        return msgspec.json.decode(paths.summary.read_bytes(), type=_Summary)
    except (OSError, msgspec.MsgspecError):
        return _Summary()


def calibrate(
    program: Program, seconds: float, threads: int, needs_tcp: bool, needs_rounds: bool, say: Callable[[str], None]
) -> Costs:
    """All runs, and what they say together."""
    check_program(program)
    cores = usable_cores()
    scratch = Path(tempfile.mkdtemp(prefix="paceline-plan-"))
    try:
        say(f"Calibrating: 1 ps + 1 worker, {seconds:g} s, {threads} thread{'s' * (threads > 1)} a task.")
        shm = _measured(program, "shm", seconds, threads, scratch / "shm")
        tcp = None
        if needs_tcp:
            say(f"Calibrating: the same over tcp, {seconds:g} s.")
            tcp = _measured(program, "tcp", seconds, threads, scratch / "tcp")
        costs = costs_of(shm, tcp, cores)
        assert costs.seen is not None
        crowd_ms: dict[str, float] = {}
        num_crowd = min(CROWD, max(1, cores // threads))
        for mode in ["async", *["sync"] * needs_rounds] if num_crowd > 1 else []:
            say(f"Calibrating: {num_crowd} workers at once, {mode}, {seconds / 2:g} s, for what they do to each other.")
            flags = ["--workers", str(num_crowd), "--lane", "shm", "--mode", mode]
            crowd_ms[mode] = mean_step_ms(timed_run(program, flags, seconds / 2, threads, scratch / mode).workers)
        seen = Seen(
            alone_ms=costs.seen.alone_ms,
            num_crowd=num_crowd,
            crowd_async_ms=crowd_ms.get("async"),
            crowd_sync_ms=crowd_ms.get("sync"),
        )
        add_ms, copy_ms = memory_ms(costs.size_bytes)
        script = " ".join(["-m"] * program.is_module + [program.script, *program.args])
        whole = msgspec.structs.replace(
            costs, add_ms=add_ms, copy_ms=copy_ms, threads=threads, script=script, seen=seen
        )
        return fitted(whole, lambda: Random(SEED))
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(scratch)


def _measured(program: Program, lane: str, seconds: float, threads: int, folder: Path) -> Measured:
    ran = timed_run(program, ["--workers", "1", "--lane", lane], seconds, threads, folder)
    return Measured(timings=ran.workers[0], apply_ms=ran.ps[0].apply_ms or 0.0 if ran.ps else 0.0)


def memory_ms(size_bytes: int) -> tuple[float, float]:
    """(one gradient added to another, one copied) of this size on this machine; the best of a few."""
    count = max(1, size_bytes // 4)
    one, other = np.ones(count, dtype=np.float32), np.ones(count, dtype=np.float32)
    adds, copies = [], []
    for _ in range(PASSES):
        began = time.perf_counter()
        np.add(one, other, out=one)
        middle = time.perf_counter()
        np.copyto(one, other)
        adds.append(middle - began)
        copies.append(time.perf_counter() - middle)
    return 1e3 * sorted(adds)[PASSES // 4], 1e3 * sorted(copies)[PASSES // 4]
