"""HOW long will it take? What `--dry-run` prints: every cell and row with its time, from an earlier run or as a guess.

Called by lab/run. Pure: no process, no file, no clock.
"""

import re
from collections.abc import Mapping, Sequence

import msgspec

from paceline.lab.cells import Cell, middle
from paceline.lab.progress import duration
from paceline.lab.results.lines import Measured
from paceline.lab.scenario import Matrix, plan

COLUMNS = ("what", "about", "known from")
GUESS_OF_LIMIT = 0.25  # of a run that nobody has timed: this share of what it may take at most
GUESS_SEGMENT_S = 2.0
GUESS_START_S = 4.0  # of a scenario: imports, warm-up
EARLIER, GUESS, DONE = "an earlier run", "a guess", "measured already"
LIKE_IT, OTHERS = "earlier runs like it, with another seed or argument", "the mean of other runs"
_ONE_OF_MANY = re.compile(r", (repetition|seed) \d+")


class Estimate(msgspec.Struct, frozen=True):
    """One cell or row; its seconds, and how they are known."""

    title: str
    seconds: float
    source: str


def of_cells(matrix: Matrix, ran: Sequence[Measured], done: Sequence[str] = ()) -> list[Estimate]:
    """The whole runs; `ran`: what was measured before, the newest first; `done`: titles that would be skipped."""
    cells = [cell for table in matrix.tables for cell in table.cells]
    return [Estimate(cell.title, 0.0, DONE) if cell.title in done else _of_cell(cell, ran) for cell in cells]


def _of_cell(cell: Cell, ran: Sequence[Measured]) -> Estimate:
    timed = [each for each in ran if each.seconds]
    same = [each.seconds for each in timed if each.title == cell.title and each.command == cell.command]
    if same:
        return Estimate(cell.title, same[0], EARLIER)
    for source, found in (
        (LIKE_IT, [each.seconds for each in timed if each.labels == cell.labels]),
        (OTHERS, [each.seconds for each in timed]),
    ):
        mean = middle(found)
        if mean is not None:
            return Estimate(cell.title, min(mean, cell.limit_s), source)
    return Estimate(cell.title, GUESS_OF_LIMIT * cell.limit_s, f"{GUESS}: a quarter of its limit")


def of_rows(matrix: Matrix, us: Mapping[str, float], repetitions: Sequence[tuple[int, int]]) -> list[Estimate]:
    """The rows, over the repetitions that are left, each with what runs beside it; starting is a line of its own."""
    if not matrix.rows or not repetitions:
        return [Estimate(row.title, 0.0, DONE) for row in matrix.rows]
    sizes = {each.name: sum(matrix.amounts.of(each.kind, each.load_bytes)) for each in matrix.scenarios}

    def segment_s(name: str) -> float:
        return us[name] * 1e-6 * sizes[name] if name in us else GUESS_SEGMENT_S

    total = [0.0] * len(matrix.rows)
    for group, repetition in repetitions:
        row = 0
        for segment in plan(matrix.rows, repetition, matrix.amounts.seed, group):
            row = row if segment.row is None else segment.row
            total[row] += segment_s(segment.scenario)
    made = [
        Estimate(row.title, each, EARLIER if {row.scenario, row.beside} <= set(us) else f"{GUESS}: 2 s a segment")
        for row, each in zip(matrix.rows, total, strict=True)
    ]
    count = len(matrix.scenarios)
    start = Estimate(f"starting {count} scenarios", GUESS_START_S * count, f"{GUESS}: 4 s each")
    return [start, *made]


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
