"""HOW is a soak carried out? Fault-free runs first, then the long one, watched from outside; then it is judged.

Called by lab/run. Nothing may be left running, and every number is in the result file before the table is shown.

1. short runs without faults: how far their final losses lie apart,
2. one run with quiet times and times with faults, its processes looked at once a second,
3. its ledgers are verified, what it left behind is looked for, and all of it is judged.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from paceline.cluster.chaos import parse
from paceline.cluster.settings import Settings
from paceline.cluster.spec import Task
from paceline.errors import EXIT_OK, EXIT_TRAINING
from paceline.lab.cells import flags
from paceline.lab.matrices import soak
from paceline.lab.matrices.soak import Plan, Sample, Soaked, Tick, Told
from paceline.lab.measuring.interrupts import undisturbed
from paceline.lab.measuring.leaks import Watch
from paceline.lab.measuring.meters import RunMeter
from paceline.lab.measuring.processes import Failed, Process
from paceline.lab.measuring.whole_runs import cause
from paceline.lab.progress import Progress, duration
from paceline.lab.results.result import ResultFile
from paceline.lab.scripts.curves import TOLD
from paceline.telemetry import read
from paceline.telemetry.faults import Injected, began_s
from paceline.telemetry.output import complain
from paceline.telemetry.paths import RunPaths

SCRIPT = "paceline.lab.scripts.soak_script"
LOOK_S = 1.0
LATE_S = 90.0  # by which a run may end later than it should
END_S = 15.0
VERIFY_S = 900.0
SETTINGS = Settings(  # the first checkpoint lies before what is measured: its memory stays for the next ones
    run_id="", lease_s=soak.LEASE_S, max_restarts=1_000_000, ledger=True, save_every=f"{soak.WARM_S / 2:g}s", keep=2
)  # fmt: skip


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What summary.json says of a soak."""

    ok: bool
    restarts: int = 0
    lost: list[str] = []
    chaos: list[Injected] = []


class Soak:
    """One soak."""

    def __init__(self, plan: Plan, folder: Path, results: ResultFile, progress: Progress) -> None:
        self._plan = plan
        self._folder = folder
        self._results = results
        self._progress = progress
        self._environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def run(self) -> int:
        """From the first run to the table; the exit code comes back."""
        meter = RunMeter()
        try:
            references = [self._reference(number) for number in range(self._plan.references)]  # 1
            done = self._soaked(references)
        except (Failed, OSError, msgspec.MsgspecError) as error:
            self._results.failed("soak", str(error))
            complain(f"The soak failed: {error}")
            return EXIT_TRAINING
        others = meter.others()
        self._results.others(others)
        self._results.soaked(done)
        minutes, period_s = self._plan.minutes, self._plan.period_s
        title = f"1 ps + {soak.NUM_WORKERS} workers, async; {minutes:g} minutes with a fault every {period_s:g} s"
        self._progress.table(title, soak.COLUMNS, soak.lines(done))
        self._progress.say(f"Meanwhile other programs used {others:.2f} cores; 0 is what a measurement wants.")
        if soak.is_ok(done):
            return EXIT_OK
        complain("The soak failed: the table says at what.")
        return EXIT_TRAINING

    def _reference(self, number: int) -> float:
        paths = RunPaths(self._folder / f"reference-{number}")
        title = f"fault-free run {number + 1} of {self._plan.references}"
        self._run(paths, SETTINGS, self._plan.reference_s, title)
        return self._loss(paths)

    def _soaked(self, references: list[float]) -> Soaked:
        paths = RunPaths(self._folder / "soak")
        settings = msgspec.structs.replace(SETTINGS, chaos=",".join(self._plan.faults))
        samples, left = self._run(paths, settings, self._plan.total_s, "with faults")  # 2
        ended = msgspec.json.decode(paths.summary.read_bytes(), type=Ended)
        is_verified, verified = self._verify(paths)  # 3
        quiet = [phase for phase in self._plan.phases if not phase.has_faults]
        grown = soak.grown(samples, quiet[0], quiet[-1])
        return Soaked(
            plan=self._plan,
            kept=soak.kept(self._plan.phases, ticks(paths)),
            loss=self._loss(paths),
            references=references,
            fired=fired(ended.chaos),
            missed=[each.fault for each in ended.chaos if not each.times],
            restarts=ended.restarts,
            lost=ended.lost,
            verified=verified,
            is_verified=is_verified,
            leaked=[*(f"{more} {name}" for name, more in grown.items()), *left],
        )

    def _run(self, paths: RunPaths, settings: Settings, until_s: float, title: str) -> tuple[list[Sample], list[str]]:
        """One run, from its start to its end; how it stood every second, and what it left behind."""
        paths.create()
        command = [sys.executable, "-P", "-m", "paceline", "run", "--run-dir", str(paths.root)]
        command += ["--workers", str(soak.NUM_WORKERS), *flags(settings), "-m", SCRIPT, "--until-s", f"{until_s:g}"]
        process = Process("paceline run", command, self._environ, paths.root / "logs" / "launcher.log", speaks=False)
        watch = Watch(process.pid)
        samples: list[Sample] = []
        try:
            deadline_s = time.monotonic() + until_s + LATE_S
            while not process.is_gone(LOOK_S):
                if time.monotonic() > deadline_s:
                    raise Failed(f"the run {title} did not end {LATE_S:g} s after it should have; see {paths.root}")
                at_s = time.time() - began_s(paths) if paths.config.exists() else 0.0
                sample = watch.look(at_s)
                samples += [sample] if sample is not None else []
                self._progress.update(f"soak: {title}, {duration(at_s)} of {duration(until_s)}")
        finally:
            with undisturbed():
                process.interrupt(END_S)
        if process.code:
            raise Failed(f"{title}: {cause(paths, process)}")
        return samples, watch.left_behind(paths.root)

    def _loss(self, paths: RunPaths) -> float:
        return msgspec.json.decode((paths.root / TOLD).read_bytes(), type=Told).loss

    def _verify(self, paths: RunPaths) -> tuple[bool, str]:
        self._progress.update("soak: verifying the ledgers")
        command = [sys.executable, "-P", "-m", "paceline", "verify", str(paths.root)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=VERIFY_S, env=self._environ)
        said = (done.stdout.strip() or done.stderr.strip()).splitlines() or ["nothing was said"]
        return done.returncode == EXIT_OK, said[-1]


def ticks(paths: RunPaths) -> list[Tick]:
    """What ps:0 told of its version, over all its restarts."""
    zero_s = began_s(paths)
    told = [read.tick_of(record) for record in read.records(paths.root, Task("ps", 0))]
    found = [Tick(tick.t - zero_s, tick.version) for tick in told if tick is not None]
    if not found:
        raise Failed("ps:0 told nothing")
    return found


def fired(chaos: list[Injected]) -> dict[str, int]:
    """How often each kind of fault has come, by kind and whom it hit.

    >>> fired([Injected(fault="kill=ps:0@5s", task="ps:0", times=2)])
    {'kill ps': 2}
    """
    counts: dict[str, int] = {}
    for each in chaos:
        if each.task is not None:
            [fault] = parse(each.fault)
            kind = f"{fault.kind} {each.task.partition(':')[0]}"
            counts[kind] = counts.get(kind, 0) + each.times
    return counts
