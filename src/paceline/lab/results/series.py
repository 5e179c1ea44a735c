"""WHAT can be drawn of a result? Bars and lines with their titles and units; only of what was measured.

Called by lab/results/report; lab/results/plots draws what comes out. Pure. Must never draw a number that no line of
the result has, nor an empty picture.
"""

import re
from collections.abc import Iterable, Sequence

import msgspec

from paceline.lab.cells import Worker, middle
from paceline.lab.matrices.document_rows import ROWS, SINGLE_S
from paceline.lab.matrices.looks import EpochTime
from paceline.lab.results import task_series
from paceline.lab.results.drawables import MOST_LINES, Bars, Group, Line, Lines, Picture, name_of
from paceline.lab.results.lines import AGAIN, Measured, Result, families, family

RECIPE = ("seeds", "accuracy")  # matrices that train as document 000 does; a file of the user's never has their names
_WORKERS = re.compile(r",? ?\b\d+ workers?\b")


def pictures(result: Result) -> list[Picture]:
    """Everything that this result has something for, in the order of the page."""
    made: list[Picture] = []
    is_document = any(origin.matrix in RECIPE for origin in result.origins)
    for title in result.tables:
        cells = result.of(title)
        made += _epochs(title, cells) if is_document else []
        made += [*_accuracy(title, cells), *_scaling(title, cells)]
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


class _Epoch(msgspec.Struct, frozen=True):
    epoch_s: float | None = None


def document_epochs() -> dict[str, float]:
    """Seconds of an epoch in document 000, by topology.

    >>> document_epochs()["1 ps + 1 worker"], document_epochs()["single process"]
    (3.8, 1.3)
    """
    found = {"single process": SINGLE_S}
    for row in ROWS:
        if isinstance(row.look, EpochTime) and not row.look.is_first:
            found.setdefault(row.run, round(row.look.at_most * SINGLE_S, 2))
    return found


def _epoch_s(cell: Measured) -> float | None:
    known = middle(worker.epoch_s for worker in cell.workers)
    if known is not None:
        return known
    try:
        return msgspec.json.decode(cell.told, type=_Epoch).epoch_s
    except msgspec.MsgspecError:
        return None


def _epochs(table: str, cells: Sequence[Measured]) -> Iterable[Bars]:
    """Only with a document's figure beside: alone, an epoch of a script of the lab is no measure of anything."""
    document = document_epochs()
    times = {name: middle(_epoch_s(cell) for cell in runs) for name, runs in families(cells).items()}
    names = tuple(name for name in times if times[name] is not None)
    if not any(name in document for name in names):
        return
    groups = (
        Group("measured", tuple(times[name] for name in names)),
        Group("document 000", tuple(document.get(name) for name in names)),
    )
    yield Bars(
        name=name_of(table, "epoch"),
        title=f"Time of an epoch: {table}",
        unit="seconds",
        categories=names,
        groups=groups,
    )


class _Point(msgspec.Struct, frozen=True):
    accuracy: float
    at_s: float | None = None
    updates: int | None = None


class _Course(msgspec.Struct, frozen=True):
    points: list[_Point] = []
    tail: list[_Point] = []


def _course(cell: Measured) -> list[_Point]:
    """The accuracies on a run's way, as its script told them, else as it logged them."""
    try:
        told = msgspec.json.decode(cell.told, type=_Course)
    except msgspec.MsgspecError:
        told = _Course()
    ticks = [_Point(tick.accuracy, tick.at_s, tick.updates) for tick in cell.ticks]
    return [*told.points, *told.tail] or ticks


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
    """Families that fit into one picture; else by the number of workers, and whether one of them is slowed."""
    names = list(families(cells))
    if len(names) <= MOST_LINES:
        return {"": names}
    found: dict[str, list[str]] = {}
    for name, runs in families(cells).items():
        count = len(runs[0].workers)
        crowd = f"{count} worker{'' if count == 1 else 's'}{', one slowed' if runs[0].slow else ''}"
        found.setdefault(crowd, []).append(name)
    return found


def _scaling(table: str, cells: Sequence[Measured]) -> Iterable[Lines]:
    """Samples a second against workers, of runs whose commands differ in nothing else; A/A would be a point twice."""
    found: dict[tuple[str, ...], list[tuple[int, float, str]]] = {}
    for runs in (runs for name, runs in families(cells).items() if not name.startswith(AGAIN)):
        speed = middle(_samples_per_s(cell.workers) for cell in runs)
        if speed and not runs[0].slow:
            same = _without(runs[0].command, ("--workers", "--seed"))
            found.setdefault(same, []).append((len(runs[0].workers), speed, runs[0].title))
    lines = []
    for points in found.values():
        ordered = sorted(points)
        counts = tuple(float(count) for count, _, _ in ordered)
        if len(set(counts)) > 1:
            label = _WORKERS.sub("", family(ordered[0][2])).strip(" ,") or "workers"
            lines.append(Line(label, counts, tuple(speed for _, speed, _ in ordered)))
    for start in range(0, len(lines), MOST_LINES):
        part = "" if len(lines) <= MOST_LINES else f", part {start // MOST_LINES + 1}"
        yield Lines(
            name=name_of(table + part, "scaling"),
            title=f"Scaling: {table}{part}",
            x_label="workers",
            y_label="samples a second",
            lines=tuple(lines[start : start + MOST_LINES]),
            ideal=_in_proportion(lines[start : start + MOST_LINES]),
            is_counted=True,
        )


def _in_proportion(lines: Sequence[Line]) -> Line:
    """What n workers would do if each did what one does, in the mean of the lines' first points."""
    each = sum(line.y[0] / line.x[0] for line in lines) / len(lines)
    most = max(line.x[-1] for line in lines)
    return Line("in proportion", (0.0, most), (0.0, most * each))


def _samples_per_s(workers: Sequence[Worker]) -> float | None:
    known = [worker.samples_per_s for worker in workers if worker.samples_per_s]
    return sum(known) if known and len(known) == len(workers) else None


def _without(command: Sequence[str], flags: Sequence[str]) -> tuple[str, ...]:
    """
    >>> _without(["run", "--workers", "2", "-m", "x"], ["--workers"])
    ('run', '-m', 'x')
    """
    return tuple(
        word for at, word in enumerate(command) if word not in flags and (at == 0 or command[at - 1] not in flags)
    )


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
