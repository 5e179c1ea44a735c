"""WHAT do the numbers say? Quartiles, verdicts and the table, from measured pairs.

Called by lab/measuring/repetitions, lab/measuring/whole_runs and lab/progress. Pure: no clock, no file, nothing
printed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from rich.cells import cell_len
from rich.table import Table

from paceline.lab.cells import NONE, mark
from paceline.lab.scenario import Pair, Row

COLUMNS = ("configuration", "step µs", "beside µs", "ratio", "median", "spread", "bar", "aim", "verdict")
MAX_NOISE = 0.10  # a larger spread between one process and the same again: no verdict would mean anything
LEAST_WIDTH = 20  # letters of a column of words: narrower, a name becomes a tower of syllables
MAX_OTHERS = 0.10  # cores that other programs may use; a single process does not feel them, two workers do


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share of them lies, interpolated between neighbours.

    >>> quantile([4.0, 1.0, 3.0, 2.0, 5.0], 0.25)
    2.0
    >>> quantile([1.0, 2.0], 0.25)
    1.25
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def quartile(values: Iterable[float | None]) -> float | None:
    """The lower one of those that are known; None when there is nothing.

    >>> quartile([3.0, None, 1.0, 2.0, 5.0, 4.0])
    2.0
    """
    known = [value for value in values if value is not None]
    return quantile(known, 0.25) if known else None


def of_runs(counts: Iterable[int]) -> str:
    """How many runs each figure of a table is of.

    >>> of_runs([1, 1]), of_runs([7, 7]), of_runs([6, 7])
    ('one run each', 'lower quartiles of 7 runs each', 'lower quartiles of 6 to 7 runs each')
    """
    least, most = min(known := list(counts)), max(known)
    if most == 1:
        return "one run each"
    return f"lower quartiles of {most if least == most else f'{least} to {most}'} runs each"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One row, over all repetitions; times are lower quartiles too."""

    title: str
    reps: int
    us: float
    beside_us: float
    ratio: float  # the lower quartile of the ratios
    median: float
    spread: float  # between the quartiles
    least: float
    most: float
    quotient: float  # of the two lower quartiles of time: a check, because a noisy denominator flatters `ratio`


def summarise(row: Row, measured: Sequence[Pair]) -> Summary | None:
    """What the repetitions of one row amount to; None when there are none."""
    if not measured:
        return None
    ratios = [pair.ratio for pair in measured]
    us = quantile([pair.us for pair in measured], 0.25)
    beside_us = quantile([pair.beside_us for pair in measured], 0.25)
    low = quantile(ratios, 0.25)
    return Summary(
        title=row.title,
        reps=len(ratios),
        us=us,
        beside_us=beside_us,
        ratio=low,
        median=quantile(ratios, 0.5),
        spread=quantile(ratios, 0.75) - low,
        least=min(ratios),
        most=max(ratios),
        quotient=us / beside_us,
    )


def verdict(row: Row, summary: Summary, noise: float, others: float = 0.0) -> str:
    """Whether a row is where it should be; `noise` is the spread of the A/A row, `others` the cores not ours.

    >>> row = Row(title="x", scenario="x", beside="single", bar=1.3, aim=1.1)
    >>> told = summarise(row, [Pair(0, 1.25, 1.0)])
    >>> verdict(row, told, noise=0.02)
    'within the bar'
    """
    if row.bar is None:
        return NONE
    if noise > MAX_NOISE:
        return f"too noisy to say (A/A spread {noise:.2f})"
    if others > MAX_OTHERS:
        return f"too noisy to say (others used {others:.2f} cores)"
    if row.aim is not None and summary.ratio <= row.aim:
        return "aim reached"
    if summary.ratio <= row.bar:
        return "within the bar"
    if summary.ratio <= row.bar + noise:
        return "within bar + A/A spread"
    return "OVER THE BAR"


def noise_of(rows: Sequence[Row], summaries: Sequence[Summary | None]) -> float:
    """The spread of the A/A row; 0 when there is none."""
    return max((s.spread for r, s in zip(rows, summaries, strict=True) if r.is_noise and s is not None), default=0.0)


def cells(
    rows: Sequence[Row], summaries: Sequence[Summary | None], failures: Mapping[str, str], others: float = 0.0
) -> list[tuple[str, ...]]:
    """The table's text, row by row; `failures` has the cause of every scenario that did not run to the end."""
    noise = noise_of(rows, summaries)
    made = []
    for row, summary in zip(rows, summaries, strict=True):
        told = "not measured" if summary is None else verdict(row, summary, noise, others)
        made.append(_cells(row, summary, failures, told))
    return made


def _cells(row: Row, summary: Summary | None, failures: Mapping[str, str], told: str) -> tuple[str, ...]:
    cause = failures.get(row.scenario) or failures.get(row.beside)
    bars = (_ratio(row.bar), _ratio(row.aim))
    if summary is None:
        return (row.title, *[NONE] * 5, *bars, mark(cause) if cause else told)
    numbers = (f"{summary.us:.0f}", f"{summary.beside_us:.0f}", f"{summary.ratio:.3f}", f"{summary.median:.3f}")
    if cause:
        told = f"{told} ({summary.reps} repetitions, then {mark(cause)})"
    return (row.title, *numbers, f"{summary.spread:.3f}", *bars, told)


Divided = Sequence[tuple[float, Mapping[str, float]]]  # the time of a step, and its parts


def divided(
    measured: Sequence[tuple[str, Divided]], idle: str = "wait"
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Where a step's time goes, its columns and lines: of each scenario the segment at the lower quartile of its times.

    >>> divided([("a", [(9.0, {"send": 5.0, "wait": 4.0}), (8.0, {"send": 6.0, "wait": 2.0})])])
    (('configuration', 'step', 'send', 'wait', 'feeder'), [('a', '8', '6', '2', '75 %')])
    """
    names = list(dict.fromkeys(name for _, segments in measured for _, parts in segments for name in parts))
    lines = []
    for title, segments in measured:
        us, parts = sorted(segments, key=lambda each: each[0])[(len(segments) - 1) // 4]
        numbers = [f"{parts.get(name, 0.0):.0f}" for name in names]
        lines.append((title, f"{us:.0f}", *numbers, f"{100 * (1 - parts.get('wait', 0.0) / us):.0f} %"))
    return ("configuration", "step", *names, "feeder"), lines


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def plain(columns: Sequence[str], table: Sequence[Sequence[str]]) -> str:
    """A table for a pipe: columns side by side, two spaces between them; numbers to the right, text to the left.

    >>> print(plain(["mode", "step ms", "remark"], [["sync", "1.25", ""], ["local", "0.5", "fast"]]))
    mode   step ms  remark
    sync      1.25
    local      0.5  fast
    """
    lines = [columns, *table]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    texts = [is_text(columns, table, column) for column in range(len(columns))]
    shown = []
    for line in lines:
        parts = [
            text.ljust(width) if to_left else text.rjust(width)
            for text, width, to_left in zip(line, widths, texts, strict=True)
        ]
        shown.append("  ".join(parts).rstrip())
    return "\n".join(shown)


def is_text(columns: Sequence[str], table: Sequence[Sequence[str]], column: int) -> bool:
    """The first column and the last are; between them those of words, not of numbers.

    >>> [is_text("abcd", [("1", "1.5 ms", "read it", "2"), ("1", "-", "2 words", "2")], column) for column in range(4)]
    [True, False, True, True]
    """
    if column in (0, len(columns) - 1):
        return True
    cells = [line[column] for line in table if line[column] not in ("", NONE)]
    return any(sum(letter.isalpha() for letter in cell) > len(cell) / 2 for cell in cells)


def drawn(columns: Sequence[str], table: Sequence[Sequence[str]]) -> Table:
    """The same for a terminal."""
    made = Table()
    for number, column in enumerate(columns):
        to_left = is_text(columns, table, number)
        made.add_column(column, justify="left" if to_left else "right", no_wrap=column not in (columns[0], columns[-1]))
    for line in table:
        style = "red" if line[-1].startswith(("OVER", "failed")) else None
        made.add_row(*line, style=style)
    return made


def is_drawable(columns: Sequence[str], table: Sequence[Sequence[str]], width: int) -> bool:
    """Whether a frame of that width cuts no word: the first and the last column may wrap, but only between words.

    >>> lines = [("1 ps + 2 workers, async, hidden 16", "12.5", "")]
    >>> is_drawable(["configuration", "step ms", "remark"], lines, 44), is_drawable(["what", "ms", ""], lines, 20)
    (True, False)
    """
    cells = [[line[at] for line in (columns, *table)] for at in range(len(columns))]
    whole = [max(map(cell_len, texts)) for texts in cells]
    ends = {0, len(columns) - 1}
    longest = max(cell_len(word) for at in ends for text in cells[at] for word in text.split() or [""])
    needed = [min(each, max(LEAST_WIDTH, longest)) if at in ends else each for at, each in enumerate(whole)]
    return sum(needed) + 3 * len(columns) + 1 <= width
