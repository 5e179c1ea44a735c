"""IS `paceline plan` right? Predicted against measured, for topologies that its calibration has not seen.

    python bench/plan.py [--seconds 8] [--reps 3] [--out plan.jsonl] [--only TEXT]

Calibrates both models and measures every topology once a repetition, in another order each time, a thread a task, all
on this machine; about 20 minutes. Each result is a line of --out as soon as it is there: run again with the same --out,
it goes on, unless the commit, the machine or --seconds is another. Lower quartiles over the repetitions count, of what
calibrates as of what is measured. What calibrated is marked, measured half as long, and is not in the mean error.

Those with a cable (200mbit) have a host for each task: network namespaces at a switch, `tc tbf` at every port. They
need root, and are left out elsewhere. The cores are this machine's all the same, so the cable is slow enough to be
what counts, and a push is large beside the burst that tbf lets pass.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np

from paceline.cluster.cores import usable_cores
from paceline.cluster.slow import parse
from paceline.errors import PacelineError, TrainingFailed, UsageError
from paceline.lab.cells import NONE
from paceline.lab.measuring.hosts import lacking
from paceline.lab.results.kept import differences
from paceline.lab.results.result import Provenance, provenance
from paceline.lab.scenario import Amounts
from paceline.launchers.entry import Program
from paceline.plan.calibrate import CROWD, SEED, Ran, calibrate, timed_run
from paceline.plan.costs import Costs, Seen
from paceline.plan.fitting import fitted
from paceline.plan.simulate import Prediction, Simulation
from paceline.plan.timings import Timings
from paceline.plan.topology import Topology, mode_of, parse_link
from paceline.telemetry.records import PsReport

BAR = 0.15
CABLE_MS = 0.05  # one way, between two namespaces
START_S = 120.0
SCRIPT = str(Path(__file__).with_name("plan_model.py"))
HEAD = (
    "model", "topology", "step ms predicted", "measured", "samples/s predicted", "measured", "error",
    "staleness predicted", "measured", "discarded predicted", "measured",
)  # fmt: skip


class Case(NamedTuple):
    """One topology that is measured."""

    model: str
    num_ps: int
    num_workers: int
    mode: str
    lane: str = "shm"
    slow: str = ""
    rate: str = ""  # of every host's cable, as tc writes it; each task has a host then

    @property
    def calibrates(self) -> bool:
        """Whether the calibration ran the same: one worker, and the crowd of this machine in both modes."""
        if self.num_ps > 1 or self.lane != "shm" or self.slow:
            return False
        is_crowd = self.num_workers == min(CROWD, usable_cores()) and self.mode in ("async", "sync")
        return is_crowd or (self.num_workers == 1 and self.mode == "async")

    @property
    def title(self) -> str:
        return f"{self.model}: {self.named}"

    @property
    def named(self) -> str:
        return self.topology.title + (f", a host each, {self.rate}" if self.rate else "")

    @property
    def topology(self) -> Topology:
        spec = mode_of(self.mode, self.num_workers)
        assert spec is not None
        slow = tuple((task.index, factor) for task, factor in parse(self.slow).items())
        link = parse_link(f"{self.rate.removesuffix('mbit')}Mbit/s,{CABLE_MS}ms") if self.rate else None
        return Topology(
            num_workers=self.num_workers, num_ps=self.num_ps, mode=spec, lane=self.lane, link=link,
            cores=usable_cores(), slow=slow,
        )  # fmt: skip

    @property
    def flags(self) -> list[str]:
        spec = self.topology.mode
        said = ["--ps", str(self.num_ps), "--workers", str(self.num_workers), "--lane", self.lane, "--mode", spec.name]
        if spec.replicas_to_aggregate is not None:
            said += ["--replicas-to-aggregate", str(spec.replicas_to_aggregate)]
        if spec.name == "bounded":
            said += ["--staleness", str(spec.staleness)]
        return said + (["--slow", self.slow] if self.slow else [])


CASES = (
    Case("mnist", 1, 1, "async"),
    Case("mnist", 1, 2, "async"),
    Case("mnist", 1, 3, "async"),
    Case("mnist", 1, 4, "async"),
    Case("mnist", 1, 2, "sync"),
    Case("mnist", 1, 4, "sync"),
    Case("mnist", 1, 4, "sync:3"),
    Case("mnist", 1, 3, "bounded:3", slow="worker:1=4x"),
    Case("mnist", 2, 1, "async"),
    Case("mnist", 2, 2, "async"),
    Case("mnist", 2, 2, "sync"),
    Case("mnist", 1, 2, "async", lane="tcp"),
    Case("large", 1, 1, "async"),
    Case("large", 1, 3, "async"),
    Case("large", 1, 2, "async"),
    Case("large", 1, 2, "sync"),
    Case("large", 2, 2, "async"),
    Case("large", 1, 3, "sync:2", slow="worker:1=4x"),
    Case("large", 1, 2, "async", lane="tcp"),
    *(
        Case("large", num_ps, num_workers, mode, lane="tcp", rate="200mbit")
        for num_ps, num_workers, mode in (
            (1, 1, "async"), (1, 2, "async"), (1, 3, "async"), (1, 2, "sync"), (2, 2, "async"), (2, 2, "sync"),
        )
    ),
)  # fmt: skip


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A line of --out: one run."""

    title: str
    rep: int
    step_ms: float
    samples_per_s: float
    staleness: float
    discarded: float
    kind: str = "measured"


def measured(case: Case, rep: int, ran: Ran) -> Measured:
    """All workers together, each over its own window."""
    first = ran.ps[0]
    pushes = sum(first.pushes.values())
    discarded = sum(first.discarded.values()) / pushes if pushes else 0.0
    rate = sum(each.steps / each.wall_s for each in ran.workers if each.wall_s > 0)
    counts = [(int(s), n) for of in first.staleness.values() for s, n in of.items()]
    admitted = sum(n for _, n in counts)
    return Measured(
        title=case.title,
        rep=rep,
        step_ms=1e3 * len(ran.workers) / rate,
        samples_per_s=rate * ran.workers[0].batch * (1 - discarded),
        staleness=sum(s * n for s, n in counts) / admitted if admitted else 0.0,
        discarded=discarded,
    )


class Results:
    """--out: what is there already, if it is of the same code, machine and request, and what comes."""

    def __init__(self, path: Path, facts: Provenance) -> None:
        self._path = path
        self.lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if not self.lines:
            self.add({"kind": "provenance", **msgspec.to_builtins(facts)})
        try:
            other = differences(msgspec.convert(self.lines[0], Provenance), facts)
        except msgspec.ValidationError:
            other = ["version of this benchmark"]
        if other:
            raise UsageError(f"{path} was measured with another {other[0]}; name another --out, or remove it.")

    def has(self, **wanted: object) -> bool:
        return any(all(line.get(k) == v for k, v in wanted.items()) for line in self.lines)

    def add(self, line: dict[str, object]) -> None:
        self.lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def costs(self, model: str) -> Costs:
        """Of several calibrations the parts of the one whose step is at the lower quartile, and the lower quartile of
        each calibrating run."""
        found = [line["costs"] for line in self.lines if line["kind"] == "calibration" and line["model"] == model]
        made = sorted((msgspec.convert(each, Costs) for each in found), key=lambda costs: costs.own_ms)
        parts, seen = made[(len(made) - 1) // 4], [costs.seen for costs in made if costs.seen is not None]
        return fitted(msgspec.structs.replace(parts, seen=quartiles(seen)), lambda: Random(SEED))

    def runs(self, case: Case) -> list[Measured]:
        return [msgspec.convert(line, Measured) for line in self.lines if line.get("title") == case.title]


def quartiles(seen: list[Seen]) -> Seen:
    """The lower ones, run by run."""
    return Seen(
        alone_ms={lane: lower([each.alone_ms[lane] for each in seen]) or 0.0 for lane in seen[0].alone_ms},
        num_crowd=seen[0].num_crowd,
        crowd_async_ms=lower([each.crowd_async_ms for each in seen]),
        crowd_sync_ms=lower([each.crowd_sync_ms for each in seen]),
    )


def lower(values: list[float] | list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.percentile(known, 25)) if known else None


def collect(cases: list[Case], results: Results, seconds: float, reps: int) -> None:
    """Whatever is missing; a run that fails is told, and left for the next time."""
    for rep in range(reps):
        jobs: list[str | Case] = [*dict.fromkeys(case.model for case in cases), *cases]
        Random(rep).shuffle(jobs)
        for number, job in enumerate(jobs):
            is_model = isinstance(job, str)
            wanted = {"kind": "calibration", "model": job} if is_model else {"kind": "measured", "title": job.title}
            if results.has(**wanted, rep=rep):
                continue
            what = f"calibrating {job}" if is_model else job.title
            say(f"repetition {rep + 1} of {reps}, {number + 1} of {len(jobs)}: {what}")
            try:
                results.add(
                    {**wanted, "rep": rep, **(calibrated(job, seconds) if is_model else run(job, rep, seconds))}
                )
            except PacelineError as error:
                say(f"{what} failed: {error}")


def calibrated(model: str, seconds: float) -> dict[str, object]:
    program = Program(script=SCRIPT, args=("--model", model))
    costs = calibrate(program, seconds, 1, True, True, lambda line: None)
    named = msgspec.structs.replace(costs, script=f"bench/plan_model.py --model {model}")  # not where it lies here
    return {"costs": msgspec.to_builtins(named)}


def run(case: Case, rep: int, seconds: float) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as scratch:
        program = Program(script=SCRIPT, args=("--model", case.model))
        window_s = seconds / 2 if case.calibrates else seconds
        folder = Path(scratch) / "run"
        ran = (
            over_cables(case, program, window_s, folder)
            if case.rate
            else timed_run(program, case.flags, window_s, 1, folder)
        )
    found: dict[str, object] = msgspec.to_builtins(measured(case, rep, ran))
    return found


def over_cables(case: Case, program: Program, seconds: float, folder: Path) -> Ran:
    """As plan/calibrate.timed_run, every task in a host of its own."""
    tasks = [f"ps:{i}" for i in range(case.num_ps)] + [f"worker:{i}" for i in range(case.num_workers)]
    settings = {"mode": case.mode, "save_every": "none"}
    timed = ["--run-dir", str(folder), "--seconds", f"{seconds:g}", "--warmup", "1"]
    command = [
        sys.executable, "-m", "paceline.lab.scripts.hosts_script", "--run-dir", str(folder), "--hosts", "/".join(tasks),
        "--rate", case.rate, "--every", "--settings", json.dumps(settings),
        "-m", "paceline.plan.timed_script", *timed, program.script, *program.args,
    ]  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "cluster.json").write_text('{"ps": []}')  # the stopwatch need not look at a ps elsewhere
    ended = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=seconds + START_S, check=False)
    found = [msgspec.json.decode(path.read_bytes(), type=Timings) for path in sorted(folder.glob("timings-*.json"))]
    if ended.returncode or len(found) != case.num_workers:
        raise TrainingFailed(f"it ended with {ended.returncode}, and {len(found)} workers told what they measured")
    summary = json.loads((folder / "summary.json").read_text())
    return Ran(workers=found, ps=msgspec.convert(summary["ps"], list[PsReport]))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(cases: list[Case], results: Results, seed: int) -> tuple[list[tuple[str, ...]], list[float]]:
    """A line a topology, and the errors of those that did not calibrate."""
    lines, errors = [], []
    for case in cases:
        if not results.has(kind="calibration", model=case.model):
            lines.append((case.model, case.named, *[NONE] * (len(HEAD) - 2)))
            continue
        runs = results.runs(case)
        predicted = Simulation(case.topology, results.costs(case.model), Random(seed)).run()
        error = None
        if runs:
            step_ms = float(np.percentile([run.step_ms for run in runs], 25))
            samples = float(np.percentile([run.samples_per_s for run in runs], 75))
            error = predicted.samples_per_s / samples - 1
            errors += [abs(error)] if not case.calibrates else []
        lines.append(line(case, predicted, runs, error, *((step_ms, samples) if runs else (0.0, 0.0))))
    return lines, errors


def line(
    case: Case, predicted: Prediction, runs: list[Measured], error: float | None, step_ms: float, samples: float
) -> tuple[str, ...]:
    title = case.named + (" (calibrates)" if case.calibrates else "")
    if not runs or error is None:
        blank = [NONE] * 8
        return (case.model, title, f"{predicted.step_ms:.3g}", *blank)
    return (
        case.model, title, f"{predicted.step_ms:.3g}", f"{step_ms:.3g}",
        f"{predicted.samples_per_s:,.0f}", f"{samples:,.0f}", f"{100 * error:+.0f} %",
        f"{predicted.staleness_mean:.2f}", f"{np.median([run.staleness for run in runs]):.2f}",
        f"{100 * predicted.discarded:.0f} %", f"{100 * np.median([run.discarded for run in runs]):.0f} %",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("plan.jsonl"))
    parser.add_argument("--only", default="", help="only topologies with this in their title")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    cases = [case for case in CASES if asked.only in case.title]
    if why := lacking():
        say(f"Those with a cable are left out: hosts are network namespaces here, and {why}.")
        cases = [case for case in cases if not case.rate]
    request = f"{asked.seconds:g} s a run"
    try:
        results = Results(asked.out, provenance("plan", Amounts(reps=asked.reps), time.time(), request))
    except UsageError as error:
        raise SystemExit(str(error)) from None
    collect(cases, results, asked.seconds, asked.reps)
    lines, errors = table(cases, results, asked.seed)
    print("\n".join("| " + " | ".join(cells) + " |" for cells in [HEAD, ("---",) * len(HEAD), *lines]))
    if errors:
        mean = sum(errors) / len(errors)
        verdict = "within the bar" if mean < BAR else "over the bar"
        print(
            f"\nMean error of samples/s over {len(errors)} topologies that did not calibrate: {100 * mean:.1f} % ",
            end="",
        )
        print(f"(bar {100 * BAR:.0f} %: {verdict}).")


if __name__ == "__main__":
    main()
