"""ARE there enough descriptors? A ps holds a few for every worker; found out before the start, not in the middle.

Called by launchers/local, hosts/many and launchers/serving. Raises the soft limit as far as the system allows.
"""

from paceline.cluster.cores import usable_cores
from paceline.errors import UsageError

BASE = 40  # of a ps without workers: its log, its listeners, its memory, what Python itself has open
EACH_WORKER = 6  # its two connections, its slot and its sum, and room for one that comes back


def needed(num_workers: int, cores: int) -> int:
    """By a ps; it has an undo area a core."""
    return BASE + cores + EACH_WORKER * num_workers


def check(num_workers: int) -> None:
    """Raise UsageError when a ps could not serve so many workers."""
    try:
        import resource
    except ImportError:
        return  # no such limit here
    need = needed(num_workers, usable_cores())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise UsageError(
            f"A ps with {num_workers} worker(s) needs about {need} descriptors, and this system allows {hard}; "
            f"raise it (ulimit -n {need}) or start fewer workers."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
