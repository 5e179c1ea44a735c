"""WHERE does the time of a task go, and what does it use? Pictures of steps, staleness, processor, cards and bytes.

Called by lab/results/series. Pure. Must never draw a number that no line of the result has, nor an empty picture.
"""

from collections.abc import Iterable, Sequence

import msgspec

from paceline.lab.results.drawables import MOST_LINES, Bars, Group, Line, Lines, name_of
from paceline.lab.results.facts import BOTH, COMPUTE, DATA, EXCHANGE, WAIT, parts_of, trained_s
from paceline.lab.results.lines import Measured, Result, families
from paceline.lab.scripts.watched import Watched

MB = 1e6
RARE = 0.005  # of all pushes
MOST_BARS = 12  # the last one holds the rest


def _tasks(cells: Sequence[Measured]) -> Iterable[tuple[str, Measured]]:
    """The first run of each family."""
    return ((name, runs[0]) for name, runs in families(cells).items())


def split(table: str, cells: Sequence[Measured]) -> Iterable[Bars]:
    """Where a step goes, task by task: data, compute, push and pull, waiting; of a ps the applying of one update."""
    names: list[str] = []
    lasted: dict[str, list[float | None]] = {label: [] for label in (DATA, COMPUTE, BOTH, EXCHANGE, WAIT, "apply")}
    for name, cell in _tasks(cells):
        if not any(worker.split_ms for worker in cell.workers):
            continue
        for worker in cell.workers:
            if told := worker.split_ms:
                names.append(f"{name}: worker:{worker.index}")
                compute = (None, told.compute) if told.data is None else (told.compute, None)
                values = (told.data, *compute, told.exchange, told.wait, None)
                for label, value in zip(lasted, values, strict=True):
                    lasted[label].append(value)
        for ps in cell.ps:
            if ps.apply_ms is not None:
                names.append(f"{name}: ps:{ps.index}")
                for label in lasted:
                    lasted[label].append(ps.apply_ms if label == "apply" else None)
    groups = tuple(Group(label, tuple(values)) for label, values in lasted.items() if any(v for v in values))
    if groups:
        yield Bars(
            name=name_of(table, "step"), title=f"Where a step goes: {table}", unit="milliseconds a step",
            categories=tuple(names), groups=groups, is_stacked=True,
        )  # fmt: skip


def staleness(table: str, cells: Sequence[Measured]) -> Iterable[Bars]:
    """How often which staleness came, as ps:0 counted; of every run in which there was any."""
    counts: dict[str, dict[int, int]] = {}
    for name, cell in _tasks(cells):
        total: dict[int, int] = {}
        for histogram in (cell.ps[0].staleness if cell.ps else {}).values():
            for staleness, count in histogram.items():
                total[int(staleness)] = total.get(int(staleness), 0) + count
        if any(total):
            counts[name] = total
    if not counts:
        return
    most = min(max(_last_bar(total) for total in counts.values()), MOST_BARS)
    has_more = any(max(total) > most for total in counts.values())
    labels = tuple(f"{n}+" if n == most and has_more else str(n) for n in range(most + 1))
    groups = tuple(Group(name, _shares(total, most)) for name, total in list(counts.items())[:MOST_LINES])
    yield Bars(
        name=name_of(table, "staleness"), title=f"Staleness: {table}", unit="% of pushes", categories=labels,
        groups=groups, is_upright=True, x_label="staleness: updates between pull and push",
    )  # fmt: skip


def _last_bar(total: dict[int, int]) -> int:
    """Beyond it there is next to nothing.

    >>> _last_bar({0: 900, 1: 90, 2: 9, 40: 1})
    2
    """
    whole = sum(total.values())
    return next(n for n in range(max(total) + 1) if sum(c for at, c in total.items() if at > n) <= RARE * whole)


def _shares(total: dict[int, int], most: int) -> tuple[float, ...]:
    """In percent; what is beyond the last bar is in it.

    >>> _shares({0: 1, 1: 2, 9: 1}, 2)
    (25.0, 50.0, 25.0)
    """
    whole = sum(total.values())
    return tuple(
        100 * sum(count for at, count in total.items() if at == n or (n == most and at > n)) / whole
        for n in range(most + 1)
    )


def used(table: str, cells: Sequence[Measured]) -> Iterable[Bars]:
    """Processor, memory, cards and bytes of every task."""
    kinds: dict[str, tuple[str, dict[str, float]]] = {
        "cpu": ("cores", {}),
        "memory": ("MB, peak", {}),
        "gpu": ("% of the card busy, mean", {}),
        "network": ("MB a second between the pair", {}),
    }
    for name, cell in _tasks(cells):
        for task in cell.tasks:
            label = f"{name}: {task.name}"
            if task.cpu_cores is not None:
                kinds["cpu"][1][label] = task.cpu_cores
            if task.peak_memory_mb is not None:
                kinds["memory"][1][label] = task.peak_memory_mb
            for gpu in task.gpus:
                if gpu.busy_percent is not None:
                    kinds["gpu"][1][f"{label}, gpu:{gpu.index}"] = gpu.busy_percent.mean
        seconds = trained_s(cell)
        for pair in cell.pairs:
            if seconds:
                moved = (pair.pushed_bytes + pair.pulled_bytes) / MB / seconds
                kinds["network"][1][f"{name}: {pair.worker} and {pair.ps} ({pair.lane})"] = moved
    titles = {"cpu": "Processor", "memory": "Memory", "gpu": "GPU", "network": "Network"}
    for kind, (unit, values) in kinds.items():
        if values:
            yield Bars(
                name=name_of(table, kind), title=f"{titles[kind]}: {table}", unit=unit,
                categories=tuple(values), groups=(Group(unit, tuple(values.values())),),
            )  # fmt: skip


def over_time(table: str, cells: Sequence[Measured]) -> Iterable[Lines]:
    """Of runs that were watched: the cores of every task, a picture a run; what went through the interfaces."""
    bytes_of = []
    for name, cell in _tasks(cells):
        watched = _watched(cell)
        tasks = dict.fromkeys(task for look in watched.looks for task in look.cores)
        cores = [
            (task, [(look.at_s, look.cores[task]) for look in watched.looks if task in look.cores]) for task in tasks
        ]
        if cores:
            lines = tuple(Line(task, tuple(x for x, _ in seen), tuple(y for _, y in seen)) for task, seen in cores)
            yield Lines(
                name=name_of(name, "cores"), title=f"Processor over time: {name}", x_label="seconds",
                y_label="cores", lines=lines,
            )  # fmt: skip
        if any((rates := watched.mb_per_s())[1]):
            bytes_of.append(Line(name, *rates))
    for start in range(0, len(bytes_of), MOST_LINES):
        yield Lines(
            name=name_of(table, "interfaces"), title=f"All interfaces over time: {table}", x_label="seconds",
            y_label="MB a second", lines=tuple(bytes_of[start : start + MOST_LINES]),
        )  # fmt: skip


def _watched(cell: Measured) -> Watched:
    try:
        return msgspec.json.decode(cell.told, type=Watched)
    except msgspec.MsgspecError:
        return Watched()  # a shape of the script's own


def parts(result: Result) -> Iterable[Bars]:
    found = {
        name: parts[1]
        for name in dict.fromkeys(
            [*(row.scenario for row in result.rows), *(each.scenario for each in result.segments)]
        )
        if (parts := parts_of(result.segments, name)) is not None
    }
    labels = list(dict.fromkeys(label for parts in found.values() for label in parts))
    groups = tuple(Group(label, tuple(parts.get(label) for parts in found.values())) for label in labels)
    if groups:
        yield Bars(
            name="parts", title="Where a client's step goes", unit="µs a step", categories=tuple(found), groups=groups,
            is_stacked=True,
        )  # fmt: skip
