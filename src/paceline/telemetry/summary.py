"""HOW did the run go? Puts the reports of all tasks together into `summary.json`.

Called by the launcher at the end, also after a failure; `build` is pure, `write` is one file.
Must never leave half a file, nor leave out a worker of the cluster because it was killed.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.telemetry.records import PsReport, WorkerReport

Reports = tuple[list[WorkerReport], list[PsReport]]


def build(
    settings: Settings,
    cluster: ClusterSpec,
    reports: Reports,
    *,
    ok: bool,
    wall_s: float,
    restarts: int,
    lost: list[str],
    error: str | None,
) -> dict[str, object]:
    """The summary, ready for JSON; workers in worker order, one row for each of the cluster."""
    told, servers = reports
    workers = [_worker(cluster, task, told, lost) for task in cluster.workers]
    ps = [_ps(task, servers, lost) for task in cluster.ps]
    if ps:  # of a worker that never reported, the ps knows better than its last tick
        workers = [_counted(w, ps[0].pushes.get(str(w.index), 0)) for w in workers]
    return {
        "run_id": settings.run_id,
        "ok": ok,
        "error": error,
        "mode": settings.mode,
        "cluster": {**cluster.as_dict(), "num_ps": len(ps), "num_workers": len(workers)},
        "global_step": ps[0].global_step if ps else 0,
        "wall_s": wall_s,
        "restarts": restarts,
        "lost": list(lost),
        "workers": [msgspec.to_builtins(row) for row in workers],
        "ps": [msgspec.to_builtins(row) for row in ps],
        "staleness": staleness(ps[0].staleness if ps else {}),
        "metrics": dict(workers[0].metrics) if workers else {},
    }


def staleness(counts: Mapping[str, int]) -> dict[str, float | None]:
    """Mean, percentiles (nearest rank) and maximum of a histogram; None when nothing was pushed.

    >>> staleness({"0": 3, "1": 1})
    {'mean': 0.25, 'p50': 0, 'p95': 1, 'max': 1}
    """
    ordered = sorted((int(value), count) for value, count in counts.items() if count > 0)
    total = sum(count for _, count in ordered)
    if total == 0:
        return {"mean": None, "p50": None, "p95": None, "max": None}
    return {
        "mean": sum(value * count for value, count in ordered) / total,
        "p50": _at(ordered, 0.50 * total),
        "p95": _at(ordered, 0.95 * total),
        "max": ordered[-1][0],
    }


def write(run_dir: Path | str, summary: Mapping[str, object]) -> Path:
    """Write `summary.json` in one move: a reader sees the old one, the new one, or none."""
    target = Path(run_dir, "summary.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".summary.json.{os.getpid()}")
    text = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    try:
        draft.write_bytes(text + b"\n")
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def _worker(cluster: ClusterSpec, task: Task, told: list[WorkerReport], lost: list[str]) -> WorkerReport:
    """This task's report under its index in the whole cluster; an empty one if there is nothing to tell."""
    index = cluster.worker_index(task)
    mine = [report for report in told if report.task == str(task) or (not report.task and report.index == index)]
    report = mine[-1] if mine else WorkerReport(index=index, is_lost=True)
    is_lost = report.is_lost or str(task) in lost
    return msgspec.structs.replace(report, index=index, task=str(task), is_lost=is_lost)


def _counted(report: WorkerReport, pushes: int) -> WorkerReport:
    if not report.is_lost or pushes <= report.steps:
        return report
    return msgspec.structs.replace(report, steps=pushes)


def _ps(task: Task, told: list[PsReport], lost: list[str]) -> PsReport:
    mine = [report for report in told if report.index == task.index]
    report = mine[-1] if mine else PsReport(index=task.index, is_lost=True)
    return msgspec.structs.replace(report, is_lost=report.is_lost or str(task) in lost)


def _at(ordered: list[tuple[int, int]], at_least: float) -> int:
    """The smallest value that so many pushes do not exceed."""
    seen = 0
    for value, count in ordered:
        seen += count
        if seen >= at_least:
            return value
    return ordered[-1][0]
