"""WHAT differs between two results, and is it more than noise? Row by row, cell by cell.

Called by `paceline lab compare`. Pure. Must never mix two results: what differs in code, machine or settings is said
first, and what only one of them has is named.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from paceline.lab.cells import NONE, REMARK, mark
from paceline.lab.results.lines import Line, Origin, Result, families
from paceline.lab.results.telling import Section, warnings

COLUMNS = ("what", "number", "A", "B", "difference", "", "noise", "so")
NOISE, MORE, ONCE = "within the noise", "MORE THAN NOISE", "a single run: noise not known"
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?: (?:%|: 1))?")


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What is not the same around the numbers, the numbers, and what only one of the two has."""

    unlike: list[str]
    minded: list[str]  # what must be known of each before believing anything
    sections: list[Section]
    only: list[str]
    num_equal: int  # numbers that are the same in both, which the tables leave out


def compare(a: Result, b: Result) -> Comparison:
    """A against B."""
    rows, equal_rows = _rows(a, b)
    cells, equal_cells = _tables(a, b)
    return Comparison(
        unlike=list(unlike(a, b)),
        minded=[f"{name}: {text}" for name, each in (("A", a), ("B", b)) for text in warnings(each)],
        sections=[*cells, *rows],
        only=[*_only(a, b, "A"), *_only(b, a, "B"), *_failed(a, "A"), *_failed(b, "B")],
        num_equal=equal_rows + equal_cells,
    )


# --- around the numbers -----------------------------------------------------------------------------------------------


def unlike(a: Result, b: Result) -> Iterable[str]:
    """What differs in code, machine and settings: with it a difference may have nothing to do with what was changed."""
    looks: tuple[tuple[str, Callable[[Origin], object]], ...] = (
        ("matrix", lambda each: each.matrix),
        ("version of paceline", lambda each: each.paceline),
        ("commit", lambda each: (each.commit or "not known")[:12]),
        ("changes that are in no commit", lambda each: {True: "yes", False: "no"}.get(bool(each.is_changed))),
        ("torch", lambda each: each.torch),
        ("python", lambda each: each.python),
        ("system", lambda each: each.system),
        ("processor", lambda each: each.cpu),
        ("cores", lambda each: each.cores),
        ("GPUs", lambda each: ", ".join(each.gpus) or "none"),
        ("packages", lambda each: ", ".join(f"{name} {version}" for name, version in each.versions.items())),
        ("seeds", lambda each: ", ".join(map(str, each.seeds)) or "as the matrix says"),
    )
    for name, look in looks:
        yield from _said(name, (_values(look(each) for each in result.origins) for result in (a, b)))
    names = {name for result in (a, b) for each in result.origins for name in each.settings}
    for name in sorted(names):
        values = (_values(each.settings.get(name) for each in result.origins) for result in (a, b))
        yield from _said(f"setting {name}", values)


def _values(values: Iterable[object]) -> str:
    return " | ".join(dict.fromkeys(str(value) for value in values))


def _said(name: str, values: Iterable[str]) -> Iterable[str]:
    mine, other = values
    if mine != other:
        yield f"{name}: {mine} in A, {other} in B"


def _only(mine: Result, other: Result, name: str) -> Iterable[str]:
    theirs = {*families(other.cells), *(row.title for row in other.rows)}
    failed = {each.scenario for each in other.failures}
    for title in [*families(mine.cells), *(row.title for row in mine.rows)]:
        if title not in theirs:
            yield f"only in {name}: {title}{' (failed in the other)' if title in failed else ''}"


def _failed(result: Result, name: str) -> Iterable[str]:
    return (f"in {name} {each.scenario}: {mark(each.cause)}" for each in result.failures)


# --- rows -------------------------------------------------------------------------------------------------------------


def _rows(a: Result, b: Result) -> tuple[list[Section], int]:
    """Ratios: the noise is the A/A rows' of both together, or what the row itself scatters, whichever is more."""
    theirs = {row.title: row for row in b.rows}
    pairs = [(row, theirs[row.title]) for row in a.rows if row.title in theirs]
    floor = (a.noise or 0.0) + (b.noise or 0.0)
    lines = [_row(mine, other, floor) for mine, other in pairs if mine.ratio != other.ratio]
    if not lines:
        return [], len(pairs)
    return [Section(title="Side by side: ratios", columns=COLUMNS, lines=lines)], len(pairs) - len(lines)


def _row(mine: Line, other: Line, floor: float) -> tuple[str, ...]:
    noise = max(floor, mine.spread + other.spread)
    return _line(mine.title, "ratio", (mine.ratio, other.ratio), noise)


# --- cells ------------------------------------------------------------------------------------------------------------


def _tables(a: Result, b: Result) -> tuple[list[Section], int]:
    made, num_equal = [], 0
    for title in a.tables:
        mine, theirs = families(a.of(title)), families(b.of(title))
        lines = []
        for name in (name for name in mine if name in theirs):
            told, equal = _cell(name, [cell.line for cell in mine[name]], [cell.line for cell in theirs[name]])
            lines += told
            num_equal += equal
        if lines:
            made.append(Section(title=title, columns=COLUMNS, lines=lines))
    return made, num_equal


def _cell(
    name: str, mine: Sequence[Mapping[str, str]], theirs: Sequence[Mapping[str, str]]
) -> tuple[list[tuple[str, ...]], int]:
    """Each column that is a number in both: means over the seeds, against how far the seeds are apart."""
    lines, num_equal = [], 0
    for column in (column for column in mine[0] if column not in (REMARK, "seed")):
        ours, others = (_numbers(line.get(column, "") for line in lines_) for lines_ in (mine, theirs))
        if not ours or not others:
            continue
        means = (sum(ours) / len(ours), sum(others) / len(others))
        if means[0] == means[1]:
            num_equal += 1
            continue
        is_once = len(ours) < 2 or len(others) < 2
        lines.append(_line(name, column, means, None if is_once else _apart(ours) + _apart(others)))
    return lines, num_equal


def _apart(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _numbers(texts: Iterable[str]) -> list[float]:
    found = [number(text) for text in texts]
    return [value for value in found if value is not None]


def number(text: str) -> float | None:
    """What a table's cell says, if that is one number.

    >>> number("1.25"), number("26.6 %"), number("4.88 : 1"), number("1 ps + 2 workers"), number("-")
    (1.25, 26.6, 4.88, None, None)
    """
    return float(text.split()[0]) if _NUMBER.fullmatch(text.strip()) else None


def _line(name: str, column: str, values: tuple[float, float], noise: float | None) -> tuple[str, ...]:
    mine, other = values
    off = other - mine
    share = NONE if mine == 0 or not math.isfinite(off / mine) else f"{100 * off / abs(mine):+.1f} %"
    so = ONCE if noise is None else NOISE if abs(off) <= noise else MORE
    apart = NONE if noise is None else shown(noise)
    return (name, column, shown(mine), shown(other), f"{'+' if off > 0 else ''}{shown(off)}", share, apart, so)


def shown(value: float) -> str:
    """
    >>> shown(168410.0), shown(1.08944), shown(-0.0001)
    ('168410', '1.0894', '-0.0001')
    """
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.5g}"
