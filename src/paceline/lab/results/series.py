"""WHAT can be drawn of a result? Bars and lines with their titles and units; only of what was measured.

Called by lab/results/report; lab/results/plots draws what comes out. Pure. Must never draw a number that no line of
the result has, nor an empty picture.
"""

from collections.abc import Iterable, Sequence

import msgspec

from paceline.lab.results import epoch_series, scaling_series, task_series
from paceline.lab.results.drawables import MOST_LINES, Bars, Group, Line, Lines, Picture, name_of
from paceline.lab.results.lines import Measured, Result, families

RECIPE = ("seeds", "accuracy")  # matrices that train as document 000 does; a file of the user's never has their names


def pictures(result: Result) -> list[Picture]:
    """Everything that this result has something for, in the order of the page."""
    made: list[Picture] = []
    is_document = any(origin.matrix in RECIPE for origin in result.origins)
    for title in result.tables:
        cells = result.of(title)
        made += epoch_series.epochs(title, cells) if is_document else []
        made += [*_accuracy(title, cells), *scaling_series.scaling(title, cells)]
        made += scaling_series.pushes(title, cells)
        made += [*task_series.split(title, cells), *task_series.staleness(title, cells)]
        made += [*task_series.used(title, cells), *task_series.over_time(title, cells)]
    return _told_apart([*made, *_ratios(result), *task_series.parts(result)])


def _told_apart(made: Sequence[Picture]) -> list[Picture]:
    """No two with one name, which is their file's: names are cut, and have only letters of the titles."""
    seen: dict[str, int] = {}
    found = []
    for picture in made:
        count = seen[picture.name] = seen.get(picture.name, 0) + 1
        found.append(picture if count == 1 else msgspec.structs.replace(picture, name=f"{picture.name}-{count}"))
    return found


# --- whole runs -------------------------------------------------------------------------------------------------------


class _Point(msgspec.Struct, frozen=True):
    accuracy: float
    at_s: float | None = None
    updates: int | None = None


class _Course(msgspec.Struct, frozen=True):
    course: list[_Point] = []
    points: list[_Point] = []
    tail: list[_Point] = []


def _course(cell: Measured) -> list[_Point]:
    """The accuracies on a run's way, as its script told them, else as it logged them."""
    try:
        told = msgspec.json.decode(cell.told, type=_Course)
    except msgspec.MsgspecError:
        told = _Course()
    ticks = [_Point(tick.accuracy, tick.at_s, tick.updates) for tick in cell.ticks]
    return told.course or [*told.points, *told.tail] or ticks


def _accuracy(table: str, cells: Sequence[Measured]) -> Iterable[Lines]:
    """Against time and against updates; many runs are several pictures, of as many workers each."""
    courses = {name: _course(runs[0]) for name, runs in families(cells).items()}
    for crowd, names in _crowds(cells).items():
        title = f"{table}{f', {crowd}' if crowd else ''}"
        for unit, what, field in (("seconds", "time", "at_s"), ("updates", "updates", "updates")):
            short = dict(zip(names, distinct(names), strict=True))
            lines = tuple(line for name in names if (line := _learning(short[name], courses[name], field)) is not None)
            if lines:
                yield Lines(
                    name=name_of(title, f"accuracy-{what}"),
                    title=f"Accuracy against {what}: {title}",
                    x_label=unit,
                    y_label="test accuracy",
                    lines=lines,
                )


def _learning(name: str, points: Sequence[_Point], field: str) -> Line | None:
    known = sorted((getattr(point, field), point.accuracy) for point in points if getattr(point, field) is not None)
    if not known:
        return None
    return Line(name, tuple(float(x) for x, _ in known), tuple(y for _, y in known))


def distinct(names: Sequence[str]) -> list[str]:
    """Names without the words that all of them have: the title says those.

    >>> distinct(["async, 3 workers, slow", "sync, 3 workers, slow"]), distinct(["async"])
    (['async', 'sync'], ['async'])
    """
    parts = [name.split(", ") for name in names]
    same = set.intersection(*(set(each) for each in parts)) if len(names) > 1 else set()
    return [", ".join(part for part in each if part not in same) or ", ".join(each) for each in parts]


def _crowds(cells: Sequence[Measured]) -> dict[str, list[str]]:
    """Families that fit into one picture; else by the number of workers, and whether one of them is slowed. A process
    alone is in each of those: it is what all of them are compared with."""
    names = list(families(cells))
    if len(names) <= MOST_LINES:
        return {"": names}
    alone = [name for name, runs in families(cells).items() if not runs[0].workers]
    found: dict[str, list[str]] = {}
    for name, runs in families(cells).items():
        if name in alone and len(alone) < len(names):
            continue
        count = len(runs[0].workers)
        crowd = f"{count} worker{'' if count == 1 else 's'}{', one slowed' if runs[0].slow else ''}"
        found.setdefault(crowd, list(alone) if len(alone) < len(names) else []).append(name)
    return found


# --- side by side -----------------------------------------------------------------------------------------------------


def _ratios(result: Result) -> Iterable[Bars]:
    if not result.rows:
        return
    values = tuple(row.ratio for row in result.rows)
    errors = tuple((max(0.0, row.ratio - row.least), max(0.0, row.most - row.ratio)) for row in result.rows)
    yield Bars(
        name="ratios", title="Side by side: times as long as what ran beside it",
        unit="ratio (lower quartile; the line reaches from the least to the most)",
        categories=tuple(row.title for row in result.rows), groups=(Group("ratio", values, errors),), mark=1.0,
    )  # fmt: skip
