"""WHO used the processor meanwhile? Our processes, and all other programs, in cores.

Called by lab/measuring/repetitions and lab/measuring/whole_runs: with other programs on the machine a number means
little.
"""

import resource
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

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
