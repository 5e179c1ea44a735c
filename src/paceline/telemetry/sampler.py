"""HOW BUSY is a process that tells nothing about itself? Its processor time and memory, seen from outside.

Called by launchers/plain about once a second. Must never fail because a process is gone, nor wait for one.
"""

from collections.abc import Mapping
from contextlib import suppress

import msgspec
import psutil

from paceline.cluster.spec import Task
from paceline.telemetry.usage import MB, Look, Running, TaskUse, cores_between

SHORTEST_S = 0.2  # between two looks; in less time the system's clock ticks tell nothing


class Utilisation(msgspec.Struct, frozen=True, kw_only=True):
    """What one task used of the machine."""

    cpu_s: float = 0.0
    cores_mean: float = 0.0  # processor seconds a second, over its life
    cores_max: float = 0.0  # in the busiest time between two looks
    rss_bytes_max: int = 0


class Sampler:
    """All looks at the tasks of one run; the clock is the caller's."""

    def __init__(self) -> None:
        self._first_s: dict[Task, float] = {}
        self._last: dict[Task, Look] = {}
        self._cores_max: dict[Task, float] = {}
        self._rss_max: dict[Task, int] = {}
        self._rss: dict[Task, Running] = {}

    def begin(self, task: Task, now_s: float) -> None:
        """A task starts now."""
        self._first_s[task] = now_s
        self._last[task] = Look(at_s=now_s, cpu_s=0.0, rss_bytes=0)

    def look(self, pids: Mapping[Task, int], now_s: float) -> dict[Task, tuple[float, int]]:
        """For each task that is there: the cores it used since the last look, and its memory in bytes."""
        seen = {}
        for task, pid in pids.items():
            sample = look_at(pid, now_s)
            if sample is not None:
                seen[task] = (self.note(task, sample), sample.rss_bytes)
        return seen

    def note(self, task: Task, sample: Look) -> float:
        """Take in one look; the cores used since the one before come back.

        >>> sampler = Sampler()
        >>> sampler.begin(Task("ps", 0), 10.0)
        >>> sampler.note(Task("ps", 0), Look(at_s=12.0, cpu_s=1.0, rss_bytes=5))
        0.5
        """
        before = self._last[task]
        cores = cores_between(before, sample)
        self._last[task] = msgspec.structs.replace(sample, cpu_s=max(before.cpu_s, sample.cpu_s))
        if sample.at_s - before.at_s >= SHORTEST_S:
            self._cores_max[task] = max(self._cores_max.get(task, 0.0), cores)
        self._rss.setdefault(task, Running()).note(sample.rss_bytes)
        self._rss_max[task] = max(self._rss_max.get(task, 0), sample.rss_bytes)
        return cores

    def end(self, task: Task, cpu_s: float, now_s: float) -> None:
        """It has ended, and used so much in all, which the system knows better than the last look."""
        before = self._last[task]
        self._last[task] = Look(at_s=now_s, cpu_s=max(before.cpu_s, cpu_s), rss_bytes=before.rss_bytes)

    def utilisation(self, task: Task) -> Utilisation:
        """All of it, once the task has ended."""
        if task not in self._last:
            return Utilisation()
        last, lived_s = self._last[task], self._last[task].at_s - self._first_s[task]
        mean = last.cpu_s / lived_s if lived_s > 0 else 0.0
        return Utilisation(
            cpu_s=round(last.cpu_s, 3),
            cores_mean=round(mean, 3),
            cores_max=round(max(self._cores_max.get(task, 0.0), mean), 3),
            rss_bytes_max=self._rss_max.get(task, 0),
        )

    def use(self, task: Task) -> TaskUse:
        """The same in the shape that every run's summary has."""
        used, rss = self.utilisation(task), self._rss[task].spread() if task in self._rss else None
        return TaskUse(
            name=str(task),
            cpu_cores=used.cores_mean,
            memory_mb=None if rss is None else round(rss.mean / MB, 1),
            peak_memory_mb=None if rss is None else round(rss.peak / MB, 1),
        )


def look_at(pid: int, now_s: float) -> Look | None:
    """A process and its descendants now; None when it is gone."""
    try:
        top = psutil.Process(pid)
        family = [top, *top.children(recursive=True)]
    except psutil.Error:
        return None
    cpu_s, rss_bytes = 0.0, 0
    for process in family:
        with suppress(psutil.Error):
            times = process.cpu_times()
            cpu_s += times.user + times.system
            rss_bytes += process.memory_info().rss
    return Look(at_s=now_s, cpu_s=cpu_s, rss_bytes=rss_bytes)
