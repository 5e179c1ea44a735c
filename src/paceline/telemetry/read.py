"""WHAT was recorded? Reads the telemetry files of a run folder, also while tasks still write to them.

Called by the launcher for the summary, by reports and dashboards.
Must never fail on what a killed task left: half a line, a line of another version, no file at all.
"""

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline import files
from paceline.cluster.spec import Task
from paceline.errors import UsageError
from paceline.telemetry.records import RUNS, SERVES, PsReport, Record, Tick, WorkerReport

Shape = TypeVar("Shape", Tick, WorkerReport, PsReport)
LONGEST_LINE = 16 << 20  # of a longer one each part is no record
_fields = msgspec.json.Decoder(dict[str, object])


def records(run_dir: Path | str, task: Task | None = None) -> Iterator[Record]:
    """All records of one task, or of each task in turn, in the order in which they were written."""
    for writer, path in _files(run_dir):
        if task is None or writer == task:
            yield from _records_of(writer, path)


def reports(run_dir: Path | str) -> tuple[list[WorkerReport], list[PsReport]]:
    """What every worker and ps reported at its end; one that never did: its last tick, marked lost."""
    workers: list[WorkerReport] = []
    servers: list[PsReport] = []
    for task, history in sorted(_by_task(run_dir).items()):
        report, tick = _newest(sorted(history, key=lambda record: record.t))  # ps:0 may know of an end before its file
        if task.job == "ps":
            servers.append(_shaped(report, PsReport) or _lost_ps(task, tick))
        elif task.job in ("chief", "worker"):
            told = _shaped(report, WorkerReport) or _lost_worker(task, tick)
            workers.append(msgspec.structs.replace(told, task=str(task)))
    return workers, servers


def tick_of(record: Record) -> Tick | None:
    """A tick record in its shape; None for any other record.

    >>> tick_of(Record(t=1.0, kind="tick", task="worker:0", fields={"step": 7})).step
    7
    """
    if record.kind != "tick":
        return None
    return _shaped({**record.fields, "t": record.t, "task": record.task}, Tick)


def _by_task(run_dir: Path | str) -> dict[Task, list[Record]]:
    """Every task's records, also those that ps:0 keeps for tasks of other hosts; most ticks are left out."""
    found: dict[Task, list[Record]] = {}
    for writer, path in _files(run_dir):
        found.setdefault(writer, [])
        for record in _records_of(writer, path):
            try:
                kept = found.setdefault(Task.parse(record.task), [])
            except UsageError:
                continue
            if record.kind == "tick" and kept and kept[-1].kind == "tick":
                kept[-1] = record
            elif record.kind in ("start", "tick", "report", "done"):
                kept.append(record)
    return found


def _newest(history: Iterable[Record]) -> tuple[object, Tick | None]:
    """The report of the last incarnation, if it made one or had none to make, and the last tick of any."""
    report: object = None
    earlier: object = None
    tick: Tick | None = None
    for record in history:
        if record.kind == "start":
            earlier, report = report, None
        elif record.kind == "done":
            report = earlier
        elif record.kind == "report":
            report = record.fields.get("report")
        else:
            tick = tick_of(record) or tick
    return report, tick


def _shaped(value: object, shape: type[Shape]) -> Shape | None:
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError:
        return None


def _lost_worker(task: Task, tick: Tick | None) -> WorkerReport:
    last = tick or Tick()
    ops = last.phase if last.phase in (SERVES, RUNS) else ""
    return WorkerReport(index=task.index, steps=last.step, metrics=last.metrics, is_lost=True, ops=ops)


def _lost_ps(task: Task, tick: Tick | None) -> PsReport:
    last = tick or Tick()
    return PsReport(index=task.index, updates=last.version, global_step=last.global_step, is_lost=True)


def _files(run_dir: Path | str) -> list[tuple[Task, Path]]:
    """Every task that has a telemetry file, sorted; other files are not ours to judge."""
    found = []
    for path in Path(run_dir, "telemetry").glob("*.jsonl"):
        job, _, index = path.stem.rpartition("-")
        if job and index.isdecimal():
            found.append((Task(job, int(index)), path))
    return sorted(found)


def _records_of(task: Task, path: Path) -> Iterator[Record]:
    try:
        lines = files.reading(path.parent.parent, path)
    except files.Unusable as error:
        warnings.warn(f"In {path.parent.parent} telemetry is left out: {error.strerror}.", stacklevel=2)
        return
    with lines:
        while line := lines.readline(LONGEST_LINE):
            record = _record(task, line)
            if record is not None:
                yield record


def _record(task: Task, line: bytes) -> Record | None:
    try:
        fields = _fields.decode(line)
        head = {"t": fields.pop("t"), "kind": fields.pop("kind"), "task": fields.pop("task", str(task))}
        return msgspec.convert({**head, "fields": fields}, Record)
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        return None
