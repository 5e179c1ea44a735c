"""HOW does a result get into a spreadsheet? `results.csv`: flat columns, and a line for everything that was measured.

Called by lab/run when a run has ended, also when it was interrupted. Must never say anything else than `lab show`:
both are made of what lab/results/reading reads. Kinds of lines: cell (a whole run), task, card and pair (what a run's
tasks used, and what a worker and a ps gave each other), row, failed, verdicts or soak (what runs say together).
"""

import csv
import io
from collections.abc import Iterable
from pathlib import Path

import msgspec

from paceline.lab.results import reading
from paceline.lab.results.figures import figures, logged, slowed
from paceline.lab.results.lines import NAME, Measured, Result, Said
from paceline.telemetry.usage import GpuUse, Spread, TaskUse

CSV = "results.csv"
FIRST = ("kind", "matrix", "table", "title", "seed", "repetition", "ps", "workers")
FACTS = ("matrix", "date", "paceline", "commit", "is_changed", "torch", "python", "system", "cpu", "cores")
Flat = dict[str, object]


def write(folder: Path) -> Path:
    """Make results.csv of results.jsonl."""
    path = folder / CSV
    path.write_text(as_csv(reading.read(folder / NAME)), encoding="utf-8", newline="")
    return path


def as_csv(result: Result) -> str:
    """The text of results.csv."""
    facts = _facts(result)
    told = [{**each, **facts} for each in rows(result)]
    names = dict.fromkeys([*FIRST, *(name for each in told for name in each if name not in facts), *facts])
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(told)
    return text.getvalue()


def _facts(result: Result) -> Flat:
    """The columns that all lines share."""
    origin = result.origin
    listed = {"gpus": "; ".join(origin.gpus), "seeds": "; ".join(map(str, origin.seeds))}
    named = {name: getattr(origin, name) for name in FACTS}
    return {**named, **origin.versions, **listed, "repetitions": origin.settings.get("reps", "")}


def rows(result: Result) -> Iterable[Flat]:
    """The lines of the spreadsheet."""
    for cell in result.cells:
        yield _cell(cell)
    for cell in result.cells:
        yield from _used(cell)
    for row in result.rows:
        yield {"kind": "row", **msgspec.structs.asdict(row)}
    for failure in result.failures:
        yield {"kind": "failed", "table": failure.table, "title": failure.scenario, "cause": failure.cause}
    for said in result.said:
        yield from (_together(said, line) for line in said.lines)


def _cell(cell: Measured) -> Flat:
    numbers = msgspec.structs.asdict(figures(cell, {task.index for task in slowed(cell.slow)}))
    return {
        **_named("cell", cell),
        "ps": cell.num_ps,
        "workers": cell.num_workers,
        **cell.settings,
        **{f"--{name}": value for name, value in cell.own.items()},
        "seconds": cell.seconds,
        "global_step": cell.global_step,
        **numbers,
        **{f"logged {name}": value for name, value in logged(cell).items()},
    }


def _named(kind: str, cell: Measured) -> Flat:
    named = {"table": cell.table, "title": cell.title, "seed": cell.seed, "repetition": cell.repetition}
    return {"kind": kind, **named}


def _used(cell: Measured) -> Iterable[Flat]:
    """What the tasks of a run used, and what went between them."""
    for task in cell.tasks:
        yield {**_named("task", cell), **_task(task)}
        for gpu in task.gpus:
            yield {**_named("card", cell), "task": task.name, **_card(gpu)}
    for pair in cell.pairs:
        own = {name: value for name, value in msgspec.structs.asdict(pair).items() if name not in ("worker", "ps")}
        yield {**_named("pair", cell), "task": pair.worker, "other task": pair.ps, **own}


def _task(task: TaskUse) -> Flat:
    net = msgspec.structs.asdict(task.net) if task.net is not None else {}
    own = {name: value for name, value in msgspec.structs.asdict(task).items() if name not in ("name", "gpus", "net")}
    return {"task": task.name, **own, **{f"host {name}": value for name, value in net.items()}}


def _card(gpu: GpuUse) -> Flat:
    """
    >>> _card(GpuUse(index=0, power_w=Spread(30.0, 41.0)))["card power_w peak"]
    41.0
    """
    told: Flat = {}
    for name, value in msgspec.structs.asdict(gpu).items():
        if isinstance(value, Spread):
            told |= {f"card {name} mean": value.mean, f"card {name} peak": value.peak}
        elif value is not None:
            told[f"card {name}"] = value
    return told


def _together(said: Said, line: dict[str, str]) -> Flat:
    """What several runs say together: text as the table has it, in columns of its own."""
    named = {"kind": said.kind, "table": said.table, "title": next(iter(line.values()), "")}
    return {**named, **{f"together: {name}": value for name, value in line.items()}}
