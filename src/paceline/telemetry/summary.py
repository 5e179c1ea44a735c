"""HOW did the run go? Puts the reports of all tasks together into `summary.json`.

Called by the launcher at the end, also after a failure; `build` is pure, `write` is one file.
Must never leave half a file, nor leave out a worker of the cluster because it was killed.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from paceline import files
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.telemetry.records import PsReport, WorkerReport
from paceline.telemetry.staleness import spread, together
from paceline.telemetry.usage import TaskUse

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
    restarts_by_task: Mapping[str, int] | None = None,
) -> dict[str, object]:
    """The summary, ready for JSON; workers in worker order, one row for each that was meant to come."""
    told, servers = reports
    ps = [_ps(task, servers, lost) for task in cluster.ps]
    first = ps[0] if ps else PsReport(index=0)
    came = [task for task in cluster.workers if not _stayed_away(settings, cluster, task, told, first, lost)]
    workers = [_counted(_worker(cluster, task, told, lost), first) for task in came]
    return {
        "run_id": settings.run_id,
        "ok": ok,
        "error": error,
        "mode": settings.mode,
        "mode_spec": str(settings.mode_spec),
        "modes": [msgspec.to_builtins(change) for change in first.modes],
        **({"slow": settings.slow} if settings.slow else {}),
        **({"virtual_gpus": settings.virtual_gpus} if settings.virtual_gpus else {}),
        "cluster": {**cluster.as_dict(), "num_ps": len(ps), "num_workers": len(cluster.workers)},
        "global_step": first.global_step,
        "wall_s": wall_s,
        "restarts": restarts,
        "restarts_by_task": dict(restarts_by_task or {}),
        "lost": list(lost),
        "workers": [_row(worker, first) for worker in workers],
        "ps": [_plain(row) for row in ps],
        "tasks": [msgspec.to_builtins(use) for use in _uses(ps, workers)],
        "pairs": [msgspec.to_builtins(pair) for worker in workers for pair in worker.pairs],
        "staleness": spread(together(_numbers(counts) for counts in first.staleness.values())),
        "metrics": dict(workers[0].metrics) if workers else {},
    }


def write(run_dir: Path | str, summary: Mapping[str, object]) -> Path:
    """Write `summary.json` in one move: a reader sees the old one, the new one, or none."""
    target = Path(run_dir, "summary.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".summary.json.{os.getpid()}")
    text = msgspec.json.format(files.as_json(summary), indent=2)
    try:
        draft.write_bytes(text + b"\n")
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def _worker(cluster: ClusterSpec, task: Task, told: list[WorkerReport], lost: list[str]) -> WorkerReport:
    """This task's report under its index in the whole cluster; an empty one if there is nothing to tell."""
    index = cluster.worker_index(task)
    mine = _of(task, index, told)
    report = mine[-1] if mine else WorkerReport(index=index, is_lost=True)
    is_lost = report.is_lost or str(task) in lost
    return msgspec.structs.replace(report, index=index, task=str(task), is_lost=is_lost)


def _of(task: Task, index: int, told: list[WorkerReport]) -> list[WorkerReport]:
    return [report for report in told if report.task == str(task) or (not report.task and report.index == index)]


def _stayed_away(
    settings: Settings, cluster: ClusterSpec, task: Task, told: list[WorkerReport], ps: PsReport, lost: list[str]
) -> bool:
    """Whether this is a place of an elastic cluster that nobody ever took: no word of it anywhere."""
    if settings.started_workers is None or str(task) in lost:
        return False
    index = cluster.worker_index(task)
    return not _of(task, index, told) and str(index) not in ps.pushes


def _counted(report: WorkerReport, ps: PsReport) -> WorkerReport:
    """Of a worker that never reported, ps:0 knows better than its last tick; of every worker, what its earlier lives
    had discarded."""
    worker = str(report.index)
    discarded = max(report.discarded, ps.discarded.get(worker, 0))
    if not report.is_lost:
        return msgspec.structs.replace(report, discarded=discarded)
    steps = max(report.steps, ps.pushes.get(worker, 0), ps.steps.get(worker, 0))
    return msgspec.structs.replace(report, steps=steps, discarded=discarded)


def _row(report: WorkerReport, ps: PsReport) -> dict[str, object]:
    """What a worker told, and what ps:0 counted of it."""
    worker = str(report.index)
    return {
        **_plain(report),
        "staleness": spread(_numbers(ps.staleness.get(worker, {}))),
        "waited_s": ps.waited_s.get(worker, 0.0),
        "not_finite": ps.not_finite.get(worker, 0),
    }


def _uses(ps: list[PsReport], workers: list[WorkerReport]) -> list[TaskUse]:
    """What every task used that came to tell it."""
    told = [*(row.use for row in ps), *(row.use for row in workers)]
    return [use for use in told if use is not None]


def _plain(report: WorkerReport | PsReport) -> dict[str, object]:
    """A row; what it used, and what it carried, is told for all tasks together."""
    row: dict[str, object] = msgspec.to_builtins(report)
    return {name: value for name, value in row.items() if name not in ("use", "pairs")}


def _numbers(counts: Mapping[str, int]) -> dict[int, int]:
    return {int(staleness): count for staleness, count in counts.items()}


def _ps(task: Task, told: list[PsReport], lost: list[str]) -> PsReport:
    mine = [report for report in told if report.index == task.index]
    report = mine[-1] if mine else PsReport(index=task.index, is_lost=True)
    return msgspec.structs.replace(report, is_lost=report.is_lost or str(task) in lost)
