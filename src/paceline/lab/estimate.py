"""HOW long will it take? Every cell and row with its time, from an earlier run or as a guess: what `--dry-run` prints.

Called by lab/run; lab/measuring/whole_runs and lab/measuring/repetitions say by it how much is left. Pure: no process,
no file, no clock.
"""

import re
from collections.abc import Mapping, Sequence

import msgspec

from paceline.lab.cells import Cell, middle
from paceline.lab.progress import duration
from paceline.lab.results.lines import Measured
from paceline.lab.scenario import Kind, Matrix, Scenario, plan

COLUMNS = ("what", "about", "known from")
GUESS_OF_LIMIT = 0.25  # of a run that nobody has timed: this share of what it may take at most
GUESS_BYTE_US = 0.0005  # of a carrier's load, there and back
GUESS_RUN_S = 3.5  # of a whole start, or as many imports
GUESS_START_S = 4.0  # of a scenario: imports, warm-up
EARLIER, GUESS, DONE = "an earlier run", "a guess", "measured already"
USUAL = f"{GUESS}: as on two quiet cores"
LIKE_IT, OTHERS = "earlier runs like it, with another seed or argument", "the mean of other runs"
_ONE_OF_MANY = re.compile(r", (repetition|seed) \d+")


class Estimate(msgspec.Struct, frozen=True):
    """One cell or row; its seconds, and how they are known."""

    title: str
    seconds: float
    source: str


class Known(msgspec.Struct, frozen=True):
    """What earlier runs took: whole ones, the newest first; a step of each scenario, in microseconds."""

    ran: Sequence[Measured] = ()
    us: Mapping[str, float] = {}


class Ahead(msgspec.Struct, frozen=True, kw_only=True):
    """What a matrix will take before anything of it is measured: each cell, all rows, a segment of each scenario."""

    cells_s: Mapping[str, float]
    rows_s: float
    segments_s: Mapping[str, float]


def ahead(matrix: Matrix, known: Known | None = None, repetitions: Sequence[tuple[int, int]] = ()) -> Ahead:
    """`repetitions`: those of the rows that are left."""
    known = known or Known()
    return Ahead(
        cells_s={each.title: each.seconds for each in of_cells(matrix, known.ran)},
        rows_s=sum(each.seconds for each in of_rows(matrix, known.us, repetitions)),
        segments_s=segments_s(matrix, known.us),
    )


def left_s(later: Sequence[float], ended: Sequence[tuple[float, float]]) -> float:
    """How long it takes what was expected to take so long, if it goes on as what has ended: (expected, taken) each.

    >>> left_s([10.0, 30.0], []), left_s([10.0, 30.0], [(10.0, 20.0)])
    (40.0, 80.0)
    """
    expected, taken = (sum(each) for each in zip(*ended, strict=True)) if ended else (0.0, 0.0)
    return sum(later) * (taken / expected if expected > 0 else 1.0)


def of_cells(matrix: Matrix, ran: Sequence[Measured], done: Sequence[str] = ()) -> list[Estimate]:
    """The whole runs; `ran`: what was measured before, the newest first; `done`: titles that would be skipped."""
    return [
        Estimate(cell.title, 0.0, DONE) if cell.title in done else _of_cell(cell, table.usual_s, ran)
        for table in matrix.tables
        for cell in table.cells
    ]


def _of_cell(cell: Cell, usual_s: float | None, ran: Sequence[Measured]) -> Estimate:
    timed = [each for each in ran if each.seconds]
    same = [each.seconds for each in timed if each.title == cell.title and each.command == cell.command]
    if same:
        return Estimate(cell.title, same[0], EARLIER)
    mine = but_seed(cell.command)
    alike = [each.seconds for each in timed if but_seed(each.command) == mine]
    if usual_s is not None and not alike:  # a run of another length says less than what is usual
        return Estimate(cell.title, min(usual_s, cell.limit_s), USUAL)
    for source, found in (
        (LIKE_IT, alike or [each.seconds for each in timed if each.labels == cell.labels]),
        (OTHERS, [each.seconds for each in timed]),
    ):
        mean = middle(found)
        if mean is not None:
            return Estimate(cell.title, min(mean, cell.limit_s), source)
    return Estimate(cell.title, GUESS_OF_LIMIT * cell.limit_s, f"{GUESS}: a quarter of its limit")


def but_seed(command: Sequence[str]) -> list[str]:
    """
    >>> but_seed(["python", "-m", "train", "--seed", "3", "--lr", "1"])
    ['python', '-m', 'train', '--lr', '1']
    """
    at = [number for number, word in enumerate(command) if word == "--seed"]
    return [word for number, word in enumerate(command) if number not in at and number - 1 not in at]


def of_rows(matrix: Matrix, us: Mapping[str, float], repetitions: Sequence[tuple[int, int]]) -> list[Estimate]:
    """The rows, over the repetitions that are left, each with what runs beside it; starting is a line of its own."""
    if not matrix.rows or not repetitions:
        return [Estimate(row.title, 0.0, DONE) for row in matrix.rows]
    lasts_s = segments_s(matrix, us)
    total = [0.0] * len(matrix.rows)
    for group, repetition in repetitions:
        row = 0
        for segment in plan(matrix.rows, repetition, matrix.amounts.seed, group):
            row = row if segment.row is None else segment.row
            total[row] += lasts_s[segment.scenario]
    made = [
        Estimate(row.title, each, EARLIER if {row.scenario, row.beside} <= set(us) else USUAL)
        for row, each in zip(matrix.rows, total, strict=True)
    ]
    count = len(matrix.scenarios)
    start = Estimate(f"starting {count} scenarios", GUESS_START_S * count, f"{GUESS}: 4 s each")
    return [start, *made]


def segments_s(matrix: Matrix, us: Mapping[str, float]) -> dict[str, float]:
    """How long each scenario runs at a time; `us`: of a step, where it is known."""
    return {
        each.name: us.get(each.name, _step_us(each, matrix)) * 1e-6 * sum(matrix.amounts.of(each.kind, each.load_bytes))
        for each in matrix.scenarios
    }


def _step_us(each: Scenario, matrix: Matrix) -> float:
    """A guess; of a start the whole of it."""
    if each.kind is Kind.START:
        return GUESS_RUN_S * 1e6
    if each.kind is Kind.CARRIER:
        return GUESS_BYTE_US * (each.load_bytes or matrix.amounts.carrier_bytes)
    return matrix.usual_step_us


def lines(estimates: Sequence[Estimate]) -> list[tuple[str, str, str]]:
    """
    >>> lines([Estimate("async", 61.0, EARLIER), Estimate("sync", 0.0, DONE)])
    [('async', '1 min 1 s', 'an earlier run'), ('sync', '-', 'measured already')]
    >>> lines([Estimate("sync, repetition 1", 30.0, GUESS), Estimate("sync, repetition 2", 30.0, GUESS)])
    [('sync (2 runs)', '1 min 0 s', 'a guess')]
    """
    alike: dict[tuple[str, str], list[Estimate]] = {}  # runs that differ only in seed or repetition, known alike
    for each in estimates:
        alike.setdefault((_ONE_OF_MANY.sub("", each.title), each.source), []).append(each)
    made = []
    for (title, source), found in alike.items():
        what = found[0].title if len(found) == 1 else f"{title} ({len(found)} runs)"
        made.append((what, "-" if source == DONE else duration(sum(each.seconds for each in found)), source))
    return made


def in_all(estimates: Sequence[Estimate]) -> str:
    """
    >>> in_all([Estimate("async", 61.0, EARLIER), Estimate("sync", 9.0, GUESS)])
    'About 1 min 10 s in all, 9 s of it guessed. Dry run: nothing was started.'
    """
    total = sum(each.seconds for each in estimates)
    guessed = sum(each.seconds for each in estimates if each.source.startswith(GUESS))
    part = f", {duration(guessed)} of it guessed" if guessed else ""
    return f"About {duration(total)} in all{part}. Dry run: nothing was started."
