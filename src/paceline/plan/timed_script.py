"""HOW long does each part of a step take? Runs the user's script in a worker task for some seconds, with a stopwatch.

Started by plan/calibrate through `paceline run -m`, and by bench/plan. It ends the script when the time is over and
enough steps are made, and leaves what it measured in the run folder. Must never change what the script computes. A
step, from push to push:

    push | settle (wait, and read the answer) | compute (the next batch, forward, backward) | push …
"""

import argparse
import contextlib
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil

from paceline.launchers.entry import Program, execute, guarded
from paceline.plan.timings import LEAST_STEPS, Timings, mean_ms, parts_of, usual
from paceline.telemetry.paths import RunPaths
from paceline.worker.step.training_step import TrainingStep

MOST_STEPS = 200_000


class Stopwatch:
    """Marks on the thread that trains: wall and processor time of each part of each step."""

    def __init__(self, seconds: float, warmup_s: float) -> None:
        self._seconds, self._warmup_s = seconds, warmup_s
        self._mark = now()
        self._now: dict[str, list[float]] = {}
        self._pushes = 0
        self._began_s: float | None = None
        self.from_s: float | None = None
        self.until_s = 0.0
        self.steps = 0
        self.ps_cpu_s: float | None = None
        self._usual: list[dict[str, list[float]]] = []
        self.batch = 0.0
        self.size_bytes = 0
        self.ps: list[psutil.Process] = []

    def mark(self, part: str) -> None:
        mark = now()
        spent = self._now.setdefault(part, [0.0] * len(mark))
        for at in range(len(mark)):
            spent[at] += mark[at] - self._mark[at]
        self._mark = mark

    @contextlib.contextmanager
    def pushing(self, training_step: TrainingStep) -> Iterator[None]:
        self.mark("compute")
        yield
        self.mark("push")
        self._step_ended(training_step)

    @contextlib.contextmanager
    def settling(self) -> Iterator[None]:
        self.mark("push")
        yield
        self.mark("settle")

    def _step_ended(self, training_step: TrainingStep) -> None:
        now_s = self._mark[0]
        if self.from_s is not None:
            self.steps, self.until_s = self.steps + 1, now_s
            if len(self._usual) < MOST_STEPS:
                self._usual.append(self._now)
        self._now = {}
        self._pushes += 1
        if self._began_s is None:
            self._began_s = now_s
        if self.from_s is None and now_s - self._began_s >= self._warmup_s and self._pushes > 3:
            self._begin(training_step, now_s)
        elif self.from_s is not None and now_s - self.from_s >= self._seconds and self.steps >= LEAST_STEPS:
            raise SystemExit(0)

    def _begin(self, training_step: TrainingStep, now_s: float) -> None:
        self.batch, self.size_bytes = (
            training_step.weight or float(training_step.clock.batch_size),
            training_step.plan.total_bytes,
        )
        self.ps_cpu_s = -cpu_of(self.ps) if self.ps else None
        self._mark = now()
        self.from_s = self._mark[0]

    def timings(self) -> Timings:
        """When the script has ended; what it did after its last step is none of a step. A ps has nothing to do then."""
        steps = usual(self._usual)
        return Timings(
            steps=self.steps,
            all_steps=self._pushes,
            wall_s=self.until_s - self.from_s if self.from_s is not None and self.steps else 0.0,
            step_ms=mean_ms(steps),
            process_ms=mean_ms(steps, 3),
            ps_cpu_s=self.ps_cpu_s + cpu_of(self.ps) if self.ps_cpu_s is not None else None,
            parts=parts_of(steps),
            batch=self.batch,
            size_bytes=self.size_bytes,
        )


def now() -> tuple[float, float, float, float]:
    """The clock, this thread's processor time, how often it has gone to sleep by itself, and processor time of all."""
    slept = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    return time.perf_counter(), time.thread_time(), float(slept), time.process_time()


def cpu_of(processes: Sequence[psutil.Process]) -> float:
    """Processor seconds of all of them so far."""
    total_s = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s


def ps_processes(run_dir: Path) -> list[psutil.Process]:
    """The ps of this run, found by the ports they listen on; none where the system does not tell."""
    spec: dict[str, Any] = msgspec.json.decode(RunPaths(run_dir).cluster.read_bytes())
    ports = {int(address.rpartition(":")[2]) for address in spec.get("ps", [])}
    try:
        listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid]
        found = {c.pid for c in listening if getattr(c.laddr, "port", 0) in ports}
        return [psutil.Process(pid) for pid in found]
    except (psutil.Error, OSError):
        return []


def attach(watch: Stopwatch, run_dir: Path) -> None:
    """Around the two places every step goes through."""
    push, settle = TrainingStep._push, TrainingStep.settle

    def timed_push(self: TrainingStep, gradients: Any) -> None:
        if not watch.ps:
            watch.ps = ps_processes(run_dir)
        with watch.pushing(self):
            push(self, gradients)

    def timed_settle(self: TrainingStep) -> None:
        if not self.client.is_pending:
            return
        with watch.settling():
            settle(self)

    TrainingStep._push, TrainingStep.settle = timed_push, timed_settle  # type: ignore[method-assign]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--warmup", type=float, default=1.0)
    parser.add_argument("--module", action="store_true")
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    asked = parser.parse_args(argv)
    watch = Stopwatch(asked.seconds, asked.warmup)
    attach(watch, asked.run_dir)
    program = Program(script=asked.script, args=tuple(asked.rest), is_module=asked.module)
    try:
        sys.exit(guarded(partial(execute, program)))  # which tells an error without the frames that started the script
    finally:
        told = msgspec.json.encode(watch.timings())
        (asked.run_dir / f"timings-{os.getpid()}.json").write_bytes(told)


if __name__ == "__main__":
    main(sys.argv[1:])
