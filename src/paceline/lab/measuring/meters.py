"""WHO used the processor meanwhile? Our processes, and all other programs, in cores; and telemetry's part of ours.

Called by lab/measuring/repetitions and lab/measuring/whole_runs: with other programs on the machine a number means
little.
"""

import resource
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from paceline.lab.cells import Runs
from paceline.lab.measuring.processes import Group


class CpuMeter:
    """How much of the processor these processes, and all others, have used since it was made."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._began_s = time.monotonic()
        self._ours_s = _ours_s(groups)
        self._all_s = _all_s()

    def cores(self) -> tuple[float, float]:
        """(ours, of all other programs), in cores: 0.5 is half of one."""
        passed_s = time.monotonic() - self._began_s
        ours_s = _ours_s(self._groups) - self._ours_s
        others_s = _all_s() - self._all_s - ours_s
        return ours_s / passed_s, max(0.0, others_s / passed_s)


class RunMeter:
    """The same for processes that have come and gone: only what has ended, and was waited for, counts as ours."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._ours_s = _ended_s()
        self._all_s = _all_s()

    def others(self) -> float:
        """Cores that all other programs have used."""
        passed_s = time.monotonic() - self._began_s
        return max(0.0, (_all_s() - self._all_s - (_ended_s() - self._ours_s)) / passed_s)


def _ended_s() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def _ours_s(groups: Sequence[Group]) -> float:
    """With what they have started, and with what has ended of that: a peer may bring many processes of its own."""
    total = time.process_time()
    for process in (p for group in groups for p in group.processes):
        with suppress(psutil.Error):
            for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                times = each.cpu_times()
                total += times.user + times.system
                total += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return total


def _all_s() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def telemetry_cost(ended: Runs) -> str:
    """What telemetry took in the task where it took most; "" where no task told.

    >>> from paceline.cluster.settings import Settings
    >>> from paceline.lab.cells import Cell, Finished
    >>> from paceline.telemetry.usage import TaskUse
    >>> used = TaskUse(name="worker:0", telemetry_ms_per_s=1.62)
    >>> cell = Cell(title="2 workers", labels=(), program=("x",), num_workers=2, settings=Settings(run_id=""))
    >>> telemetry_cost([(cell, Finished(tasks=[used]))])
    'Telemetry took at most 1.62 ms of processor time a second of a task (worker:0 of 2 workers).'
    """
    told = [
        (task.telemetry_ms_per_s, task.name, cell.title)
        for cell, done in ended
        for task in done.tasks
        if task.telemetry_ms_per_s is not None
    ]
    if not told:
        return ""
    most_ms, name, title = max(told)
    return f"Telemetry took at most {most_ms:.2f} ms of processor time a second of a task ({name} of {title})."
