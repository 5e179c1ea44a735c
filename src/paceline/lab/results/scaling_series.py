"""WHAT do more workers bring? Samples a second, how much of what n times one would do, and pushes of null workers.

Called by lab/results/series. Pure. Must never draw a number that no line of the result has, nor an empty picture.
"""

import re
from collections.abc import Iterable, Sequence

from paceline.lab.cells import Worker, middle
from paceline.lab.results.drawables import MOST_LINES, Line, Lines, name_of
from paceline.lab.results.lines import AGAIN, Measured, families, family
from paceline.lab.results.pushing import growths

_WORKERS = re.compile(r",?(?: \+)? ?\b\d+ workers?\b")
Command = tuple[str, ...]
Point = tuple[int, float, str]  # workers, samples a second, the run's title


def scaling(table: str, cells: Sequence[Measured]) -> Iterable[Lines]:
    """Samples a second against workers, and the share of n times what one does: of runs whose commands differ in
    nothing else."""
    lines = [line for points in _comparable(cells) if (line := _line(points)) is not None]
    for start in range(0, len(lines), MOST_LINES):
        part = "" if len(lines) <= MOST_LINES else f", part {start // MOST_LINES + 1}"
        shown = lines[start : start + MOST_LINES]
        yield Lines(
            name=name_of(table + part, "scaling"),
            title=f"Scaling: {table}{part}",
            x_label="workers",
            y_label="samples a second",
            lines=tuple(shown),
            ideal=_in_proportion(shown),
            is_counted=True,
        )
        shares = tuple(efficiency(line) for line in shown if line.x[0] == 1)
        if shares:
            most = max(line.x[-1] for line in shares)
            yield Lines(
                name=name_of(table + part, "efficiency"),
                title=f"Scaling efficiency: {table}{part}",
                x_label="workers",
                y_label="of n times one worker",
                lines=shares,
                ideal=Line("all of it", (0.0, most), (1.0, 1.0)),
                is_counted=True,
            )


def efficiency(line: Line) -> Line:
    """The share of n times what one worker does.

    >>> efficiency(Line("async", (1.0, 2.0, 4.0), (100.0, 150.0, 200.0))).y
    (1.0, 0.75, 0.5)
    """
    return Line(line.label, line.x, tuple(y / (x * line.y[0]) for x, y in zip(line.x, line.y, strict=True)))


def _comparable(cells: Sequence[Measured]) -> list[list[Point]]:
    """Points of one line each; A/A would be a point twice. One worker waits for nobody, so that it belongs to every
    mode that has no such run of its own."""
    found: dict[Command, list[Point]] = {}
    for runs in (runs for name, runs in families(cells).items() if not name.startswith(AGAIN)):
        speed = middle(_samples_per_s(cell.workers) for cell in runs)
        if speed and not runs[0].slow:
            same = _without(runs[0].command, ("--workers", "--seed"))
            found.setdefault(same, []).append((len(runs[0].workers), speed, runs[0].title))
    alone = {_without(command, ("--mode",)): points for command, points in found.items() if _has_one(points)}
    joined = []
    for command, points in found.items():
        others = alone.get(_without(command, ("--mode",)), []) if not _has_one(points) else []
        joined.append([*points, *(point for point in others if point[0] == 1)])
    return joined


def _has_one(points: Sequence[Point]) -> bool:
    return any(count == 1 for count, _, _ in points)


def _line(points: Sequence[Point]) -> Line | None:
    ordered = sorted(points)
    counts = tuple(float(count) for count, _, _ in ordered)
    if len(set(counts)) < 2:
        return None
    label = _WORKERS.sub("", family(ordered[-1][2])).strip(" ,") or "workers"
    return Line(label, counts, tuple(speed for _, speed, _ in ordered))


def _in_proportion(lines: Sequence[Line]) -> Line:
    """What n workers would do if each did what one does, in the mean of the lines' first points."""
    each = sum(line.y[0] / line.x[0] for line in lines) / len(lines)
    most = max(line.x[-1] for line in lines)
    return Line("in proportion", (0.0, most), (0.0, most * each))


def _samples_per_s(workers: Sequence[Worker]) -> float | None:
    known = [worker.samples_per_s for worker in workers if worker.samples_per_s]
    return sum(known) if known and len(known) == len(workers) else None


def _without(command: Sequence[str], flags: Sequence[str]) -> Command:
    """
    >>> _without(["run", "--workers", "2", "-m", "x"], ["--workers"])
    ('run', '-m', 'x')
    """
    return tuple(
        word for at, word in enumerate(command) if word not in flags and (at == 0 or command[at - 1] not in flags)
    )


# --- steps that compute nothing ---------------------------------------------------------------------------------------


def pushes(table: str, cells: Sequence[Measured]) -> Iterable[Lines]:
    """Of null workers: pushes a second against workers, a picture a load, a line a lane and number of ps."""
    found = growths(cells)
    for load in dict.fromkeys(each.load for each in found):
        mine = [each for each in found if each.load == load]
        lines = tuple(
            Line(f"{each.lane}, {each.num_ps} ps", tuple(map(float, each.per_s)), tuple(each.per_s.values()))
            for each in mine
        )
        yield Lines(
            name=name_of(f"{table} {load}", "pushes"),
            title=f"Pushes a second, {load}: {table}",
            x_label="workers",
            y_label="pushes a second, of all workers",
            lines=lines,
            is_doubled=True,
        )
