"""HOW MANY cores may this process use? Those that it was pinned to, in a container with a quota no more than that.

Asked by whoever divides them or writes them down: launchers, server/numbers, plan, lab/results/result. Must never count
what others have.
"""

import os
from contextlib import suppress
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "200000 100000": two cores; "max 100000": all


def usable_cores() -> int:
    """At least one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = "", ""
    with suppress(OSError):
        quota, _, period = QUOTA.read_text(encoding="utf-8").strip().partition(" ")
    if quota.isdecimal() and period.isdecimal():
        return max(1, min(count, -(-int(quota) // int(period))))
    return count
