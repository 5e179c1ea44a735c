"""IS there enough memory? A machine that could not even hold the processes of so many tasks is told before the start.

Called by hosts/many for every host, and by ray/on_ray where Ray is this machine alone. Must never refuse what may fit:
counted is what a task takes at least, and one with a large model takes more.
"""

from pathlib import Path

MB = 1e6
LIMIT = Path("/sys/fs/cgroup/memory.max")
TASK_MB = 100  # that a forked worker takes for itself
ACTOR_MB = 100  # that Ray's own process takes, beside the task's


def limited(size_bytes: float) -> float:
    """So much of the machine's memory, in MB, as a container may have of it."""
    try:
        said = LIMIT.read_text(encoding="utf-8").strip()
    except OSError:
        said = ""
    return min(size_bytes, int(said) if said.isdecimal() else size_bytes) / MB


def total_mb() -> float:
    """What the tasks of this machine may have together."""
    import psutil

    return limited(psutil.virtual_memory().total)


def lacking(machine: str, count: int, memory_mb: float, each_mb: float = TASK_MB) -> str:
    """Why a machine cannot hold so many tasks; "" where it may, or does not say what it has.

    >>> lacking("a", 1000, 8000.0)
    'a would get 1000 tasks of at least 100 MB each, and has 8000 MB of memory'
    >>> lacking("a", 80, 8000.0), lacking("a", 1000, 0.0)
    ('', '')
    """
    if not 0 < memory_mb < count * each_mb:
        return ""
    return f"{machine} would get {count} tasks of at least {each_mb:g} MB each, and has {memory_mb:.0f} MB of memory"
