"""HOW is a matrix measured? First its whole runs, one after the other, then its scenarios, side by side.

Called by `paceline lab run`. Must never begin before it knows that there is something to measure and where to write.

1. which matrix: a built-in one, or a file of the user's; what --only, --set and --seeds leave of it,
2. what an interrupted run of the same request has measured already; --dry-run ends here,
3. the runs, the rows; a folder with results.jsonl and results.csv.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.cluster.spelling import hint
from paceline.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_TRAINING, UsageError
from paceline.lab import MATRICES, REPEATED, SEEDED, axes, estimate, scenario
from paceline.lab.cells import NOT_BROKEN
from paceline.lab.estimate import Known
from paceline.lab.matrices import accuracy, soak, user_file, user_matrix
from paceline.lab.measuring.interrupts import interruptible
from paceline.lab.measuring.repetitions import Repetitions
from paceline.lab.measuring.soaking import Soak
from paceline.lab.measuring.whole_runs import WholeRuns, unused
from paceline.lab.progress import Progress
from paceline.lab.results import flat, kept, report
from paceline.lab.results.kept import Kept
from paceline.lab.results.result import ResultFile, provenance_of
from paceline.lab.scenario import Matrix
from paceline.launchers.closing import shown
from paceline.telemetry.output import complain

SOAK = "soak"
ACCURACY = "accuracy"
TOML = ".toml"
MINUTES, QUICK_MINUTES = 30.0, 3.0
NAMED = 3  # of the combinations that are left out for one reason


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure, how much of it, and where the results go."""

    matrix: str  # a name, or the path of a TOML file
    reps: int | None = None  # None: as the matrix says
    steps: int | None = None
    is_quick: bool = False
    is_short: bool = False  # of accuracy: a tenth of the cost
    out: str = "runs/lab"
    only: str = ""  # what has this in its title
    minutes: float | None = None  # of a soak, with faults
    sets: tuple[str, ...] = ()  # mode=sync,async
    seeds: int | None = None
    is_fresh: bool = False  # what an interrupted run has measured is measured again
    is_dry: bool = False  # what would be measured is listed


def main(request: Request) -> int:
    """Measure a matrix from start to table; the exit code comes back."""
    matrix, left_out = chosen(request)  # 1
    plan = soak.plan(soak_minutes(request)) if request.matrix == SOAK else None
    now_s = time.time()
    facts = provenance_of(matrix, now_s)
    out = Path(request.out).absolute()
    for said in told_left_out(left_out):
        print(said, flush=True)
    earlier = kept.earlier(out, matrix.name)  # 2
    cells = [cell for table in matrix.tables for cell in table.cells]
    is_anew = plan is not None or request.is_fresh
    going_on, said = (None, "") if is_anew else kept.unfinished(earlier, facts, cells)
    if said:
        print(said, flush=True)
    done = going_on[1] if going_on else Kept()
    known = known_from([each for _, each in earlier])
    if request.is_dry:
        return listed(matrix, plan, known, done)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
    folder = going_on[0].parent if going_on else unused(out / f"{matrix.name}-{stamp}")
    results = ResultFile(folder)
    if going_on:
        print(told_kept(matrix, done), flush=True)
    else:
        results.begin(facts)
    return carried_out(matrix, plan, results, done, known)


def carried_out(matrix: Matrix, plan: soak.Plan | None, results: ResultFile, done: Kept, known: Known) -> int:
    """3. All of it, to the end or to Ctrl+C; the files are whole either way."""
    folder, progress = results.path.parent, Progress()
    try:
        with interruptible():
            if plan is not None:
                code = Soak(plan, folder, results, progress).run()
            else:
                code = measure(matrix, folder, results, progress, done, known)
            results.end()
            return code
    except KeyboardInterrupt:
        again = "" if plan else " The same command goes on where this one ended."
        complain(f"Interrupted: everything was ended.{again}")
        return EXIT_INTERRUPTED
    finally:
        progress.close()
        results.close()
        flat.write(folder)
        print(f"Results: {shown(results.path)}", flush=True)
        print(report.told(folder), flush=True)


def chosen(request: Request) -> tuple[Matrix, tuple[tuple[str, str], ...]]:
    """The matrix that was asked for, and the combinations that make no sense; a UsageError before anything is made."""
    if not request.matrix.endswith(TOML):
        return checked(request), ()
    for flag, is_given in (
        ("--minutes is for a soak", request.minutes is not None),
        (f"--short is for {ACCURACY}", request.is_short),
        ("--steps is for built-in matrices", request.steps is not None),
    ):
        if is_given:
            raise UsageError(f"{flag}, not for {request.matrix}; leave it out.")
    asked = user_file.load(Path(request.matrix))
    if asked.name in (*MATRICES, SOAK):
        raise UsageError(
            f"{request.matrix} has the name {asked.name!r} of a built-in matrix; give it another: name = …"
        )
    asked = user_file.replaced(asked, axes.parse_sets(request.sets))
    if request.seeds is not None:
        asked = msgspec.structs.replace(asked, seeds=tuple(range(_at_least_one("--seeds", request.seeds))))
    if request.reps is not None and asked.beside is None:
        raise UsageError(f"--reps is for ratios, and {request.matrix} has no `beside`; take --seeds, or add it.")
    reps = None if request.reps is None else _at_least_one("--reps", request.reps)
    is_quick = request.is_quick
    found = user_matrix.made(asked, is_quick, reps, 1 if is_quick and request.seeds is None else None)
    return _only(found.matrix, request.only), found.left_out


def told_left_out(left_out: Sequence[tuple[str, str]]) -> list[str]:
    """A sentence for each reason, however many combinations it leaves out.

    >>> told_left_out([("1 worker", "too few.")])
    ['1 worker is left out: too few.']
    """
    by_reason: dict[str, list[str]] = {}
    for title, why in left_out:
        by_reason.setdefault(why, []).append(title)
    said = []
    for why, titles in by_reason.items():
        more = f"; and {len(titles) - NAMED} more" if len(titles) > NAMED else ""
        which = f" ({'; '.join(titles[:NAMED])}{more})" if len(titles) > 1 else ""
        who = f"{len(titles)} combinations are" if len(titles) > 1 else f"{titles[0]} is"
        said.append(f"{who} left out: {why}{which}")
    return said


def checked(request: Request) -> Matrix:
    """The built-in matrix that was asked for, or a UsageError before anything is made."""
    if request.minutes is not None and request.matrix != SOAK:
        raise UsageError(f"--minutes is for a soak, not for {request.matrix}; leave it out.")
    if request.is_short and request.matrix != ACCURACY:
        raise UsageError(f"--short is for {ACCURACY}, not for {request.matrix}; leave it out, or take --quick.")
    if request.matrix == SOAK:
        return Matrix(name=SOAK)
    if request.matrix not in MATRICES:
        known = hint(request.matrix, [*MATRICES, SOAK])
        raise UsageError(
            f"There is no matrix {request.matrix!r}; {known}; or give a file of your own that ends in .toml."
        )
    whole = _with_seeds(request)
    is_repeated = request.reps is not None and request.matrix in REPEATED
    if not whole.rows and (request.steps is not None or (request.reps is not None and not is_repeated)):
        raise UsageError(
            f"{whole.name} is whole runs: --reps and --steps are for what is measured side by side, --reps for "
            f"{', '.join(REPEATED)}, too."
        )
    given = {"reps": request.reps, "steps": request.steps}
    amounts = msgspec.structs.replace(
        whole.amounts, **{name: value for name, value in given.items() if value is not None}
    )
    if amounts.reps < 1 or amounts.steps < 1:
        raise UsageError("--reps and --steps must be at least 1.")
    whole = _repeated(whole, amounts.reps) if is_repeated else whole
    few = axes.restricted(msgspec.structs.replace(whole, amounts=amounts), axes.parse_sets(request.sets))
    return _only(few, request.only)


def _with_seeds(request: Request) -> Matrix:
    """The whole matrix, from as many seeds as were asked for."""
    if request.seeds is None and not request.is_short:
        return MATRICES[request.matrix](request.is_quick)
    count = None if request.seeds is None else _at_least_one("--seeds", request.seeds)
    if request.is_short:
        return accuracy.matrix(request.is_quick, count, is_short=True)
    if request.matrix in SEEDED:
        return SEEDED[request.matrix](request.is_quick, count)
    instead = "run it again instead"
    if request.matrix in REPEATED:
        instead = f"take --reps {count}"
    elif MATRICES[request.matrix](request.is_quick).rows:
        instead = f"its rows are measured side by side: take --reps {count}"
    raise UsageError(
        f"{request.matrix} is not repeated over seeds; {instead} (--seeds is for {', '.join(SEEDED)} and TOML files)."
    )


def _repeated(whole: Matrix, reps: int) -> Matrix:
    tables = (
        msgspec.structs.replace(table, cells=scenario.repeated(table.cells, reps, whole.name)) for table in whole.tables
    )
    return msgspec.structs.replace(whole, tables=tuple(tables))


def _only(whole: Matrix, text: str) -> Matrix:
    matrix = scenario.only(whole, text)
    if not matrix.titles:
        titles = "; ".join(whole.titles)
        raise UsageError(f"Nothing in {whole.name} has {text!r} in its title; there is: {titles}.")
    return matrix


def _at_least_one(flag: str, value: int) -> int:
    if value < 1:
        raise UsageError(f"{flag} is {value}; it must be at least 1.")
    return value


def soak_minutes(request: Request) -> float:
    """How long it is to have faults; refused before anything is made."""
    if request.reps is not None or request.steps is not None or request.only:
        raise UsageError("A soak is one run: --reps, --steps and --only are for what is measured side by side.")
    if request.sets or request.seeds is not None:
        raise UsageError("A soak is one run: --set and --seeds are for matrices with cells.")
    usual = QUICK_MINUTES if request.is_quick else MINUTES
    minutes = usual if request.minutes is None else request.minutes
    if not 0 < minutes <= 24 * 60:
        raise UsageError(f"--minutes is {minutes:g}; it must be above 0, and a day at most.")
    return minutes


def known_from(earlier: Sequence[Kept]) -> Known:
    """What earlier results of the matrix, the newest first, say of its times."""
    us: dict[str, float] = {}
    for each in earlier:
        us = {**each.segment_us(), **us}
    return Known([cell for each in earlier for cell in each.cells.values()], us)


def listed(matrix: Matrix, plan: soak.Plan | None, known: Known, done: Kept) -> int:
    """What would be measured, with a time each; nothing is started."""
    if plan is not None:
        found = [estimate.Estimate(SOAK, plan.references * plan.reference_s + plan.total_s, "its own plan")]
    else:
        cells = [cell for table in matrix.tables for cell in table.cells]
        skipped = [cell.title for cell in cells if done.of(cell) is not None]
        left = repetitions_left(matrix, done)
        found = estimate.of_cells(matrix, known.ran, skipped) + estimate.of_rows(matrix, known.us, left)
    progress = Progress()
    progress.table(matrix.name, estimate.COLUMNS, estimate.lines(found))
    progress.say(estimate.in_all(found))
    progress.close()
    return EXIT_OK


def repetitions_left(matrix: Matrix, done: Kept) -> list[tuple[int, int]]:
    """The repetitions that did not come to their end before: the group of rows, and the number."""
    left = []
    for group in scenario.groups(matrix.rows):
        for number in range(matrix.amounts.reps):
            segments = scenario.plan(matrix.rows, number, matrix.amounts.seed, group)
            if done.repetition(group, number, len(segments)) is None:
                left.append((group, number))
    return left


def told_kept(matrix: Matrix, done: Kept) -> str:
    """How much is skipped."""
    cells = [cell for table in matrix.tables for cell in table.cells]
    skipped = sum(done.of(cell) is not None for cell in cells)
    parts = [f"{skipped} of {len(cells)} runs"] if cells else []
    if matrix.rows:
        reps = matrix.amounts.reps * len(scenario.groups(matrix.rows))
        parts.append(f"{reps - len(repetitions_left(matrix, done))} of {reps} repetitions of the rows")
    return f"Measured already, and skipped: {' and '.join(parts)}."


def measure(
    matrix: Matrix,
    folder: Path,
    results: ResultFile,
    progress: Progress,
    done: Kept | None = None,
    known: Known | None = None,
) -> int:
    """All of it that was not done before; what failed has said so, and decides the exit code."""
    failures: dict[str, str] = {}
    ahead = estimate.ahead(matrix, known, repetitions_left(matrix, done or Kept()))
    if matrix.tables:
        runs = WholeRuns(matrix, results, progress, ahead, done)
        runs.run(folder)
        failures |= runs.failures
    if matrix.rows:
        repetitions = Repetitions(matrix, results, progress, ahead, done)
        repetitions.run(folder)
        failures |= repetitions.failures
    broken = [name for name, cause in failures.items() if not cause.startswith(NOT_BROKEN)]
    if not broken:
        return EXIT_OK
    complain(f"Failed: {'; '.join(broken)}.")
    return EXIT_TRAINING
