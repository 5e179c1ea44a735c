"""HOW is a matrix measured? First its whole runs, one after the other, then its scenarios, side by side.

Called by `paceline lab run`. Must never begin before it knows that there is something to measure and where to write.
"""

import time
from pathlib import Path

import msgspec

from paceline.cluster.spelling import hint
from paceline.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TRAINING, UsageError
from paceline.lab import MATRICES, accuracy, report, scenario, soak
from paceline.lab.cells import NOT_BROKEN
from paceline.lab.interrupts import interruptible
from paceline.lab.progress import Progress
from paceline.lab.repetitions import Repetitions
from paceline.lab.result import ResultFile, provenance
from paceline.lab.scenario import Matrix
from paceline.lab.soaking import Soak
from paceline.lab.whole_runs import WholeRuns
from paceline.launchers.closing import shown

SOAK = "soak"
ACCURACY = "accuracy"
MINUTES, QUICK_MINUTES = 30.0, 3.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure, how much of it, and where the results go."""

    matrix: str
    reps: int | None = None  # None: as the matrix says
    steps: int | None = None
    is_quick: bool = False
    is_short: bool = False  # of accuracy: a tenth of the cost
    out: str = "runs/lab"
    only: str = ""  # what has this in its title
    minutes: float | None = None  # of a soak, with faults


def main(request: Request) -> int:
    """Measure a matrix from start to table; the exit code comes back."""
    matrix = checked(request)
    plan = soak.plan(soak_minutes(request)) if request.matrix == SOAK else None
    now_s = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
    out = Path(request.out).absolute()
    results = ResultFile(out, stamp)
    results.begin(provenance(matrix.name, matrix.amounts, now_s))
    progress = Progress()
    try:
        with interruptible():
            if plan is not None:
                return Soak(plan, out / stamp, results, progress).run()
            return measure(matrix, out / stamp, results, progress)
    except KeyboardInterrupt:
        progress.say("Interrupted: everything was ended.")
        return EXIT_INTERRUPTED
    finally:
        progress.close()
        results.close()
        print(f"Results: {shown(results.path)}", flush=True)
        print(report.told(out / stamp), flush=True)


def checked(request: Request) -> Matrix:
    """The matrix that was asked for, or a UsageError before anything is made."""
    if request.minutes is not None and request.matrix != SOAK:
        raise UsageError(f"--minutes is for a soak, not for {request.matrix}; leave it out.")
    if request.is_short and request.matrix != ACCURACY:
        raise UsageError(f"--short is for {ACCURACY}, not for {request.matrix}; leave it out, or take --quick.")
    if request.matrix == SOAK:
        return Matrix(name=SOAK)
    if request.matrix not in MATRICES:
        raise UsageError(f"There is no matrix {request.matrix!r}; {hint(request.matrix, [*MATRICES, SOAK])}.")
    whole = MATRICES[request.matrix](request.is_quick)
    if request.is_short:
        whole = accuracy.matrix(request.is_quick, is_short=True)
    if not whole.rows and (request.reps is not None or request.steps is not None):
        raise UsageError(f"{whole.name} is whole runs: --reps and --steps are for what is measured side by side.")
    given = {"reps": request.reps, "steps": request.steps}
    amounts = msgspec.structs.replace(
        whole.amounts, **{name: value for name, value in given.items() if value is not None}
    )
    if amounts.reps < 1 or amounts.steps < 1:
        raise UsageError("--reps and --steps must be at least 1.")
    matrix = scenario.only(msgspec.structs.replace(whole, amounts=amounts), request.only)
    if not matrix.titles:
        titles = "; ".join(whole.titles)
        raise UsageError(f"Nothing in {whole.name} has {request.only!r} in its title; there is: {titles}.")
    return matrix


def soak_minutes(request: Request) -> float:
    """How long it is to have faults; refused before anything is made."""
    if request.reps is not None or request.steps is not None or request.only:
        raise UsageError("A soak is one run: --reps, --steps and --only are for what is measured side by side.")
    minutes = request.minutes or (QUICK_MINUTES if request.is_quick else MINUTES)
    if not 0 < minutes <= 24 * 60:
        raise UsageError(f"--minutes is {minutes:g}; it must be above 0, and a day at most.")
    return minutes


def measure(matrix: Matrix, folder: Path, results: ResultFile, progress: Progress) -> int:
    """All of it; what failed has said so, and decides the exit code."""
    failures: dict[str, str] = {}
    if matrix.tables:
        runs = WholeRuns(matrix, results, progress)
        runs.run(folder)
        failures |= runs.failures
    if matrix.rows:
        repetitions = Repetitions(matrix, results, progress)
        repetitions.run(folder)
        failures |= repetitions.failures
    is_broken = any(not cause.startswith(NOT_BROKEN) for cause in failures.values())
    return EXIT_TRAINING if is_broken else EXIT_OK
