"""MAY this run start? Whether the settings and the cluster make sense together.

Called by discovery and the launcher before anything starts; pure.
Must never correct a value: it says what would be right.
"""

import math
from collections.abc import Collection

from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec
from paceline.cluster.spelling import hint
from paceline.errors import UsageError
from paceline.modes import MODES
from paceline.params.placement import PLACEMENTS
from paceline.transport import LANES

DATA = ("shard", "full")


def check(settings: Settings, cluster: ClusterSpec) -> None:
    """Raise UsageError unless the run makes sense.

    >>> check(Settings(run_id="r"), ClusterSpec({"ps": ["a:1"], "worker": ["a:2"]}))
    """
    _check_jobs(cluster)
    _one_of("mode", settings.mode, MODES)
    _one_of("placement", settings.placement, PLACEMENTS)
    _one_of("lane", settings.lane, ["auto", *LANES])
    _one_of("data", settings.data, DATA)
    _check_replicas(settings, len(cluster.workers))
    check_save_every(settings.save_every)
    _positive("lease_s", settings.lease_s)
    _positive("wait_s", settings.wait_s)
    if settings.log_every < 0:
        raise UsageError(f"--log_every is {settings.log_every}; it must be 0 (a few lines a second) or more.")


def _check_jobs(cluster: ClusterSpec) -> None:
    jobs = ", ".join(cluster.jobs)
    if not cluster.ps:
        raise UsageError(
            f"The cluster has no job ps (its jobs: {jobs}), which holds the parameters; "
            'add one, such as "ps": ["host:2222"].'
        )
    if not cluster.workers:
        raise UsageError(f"The cluster has no job worker or chief (its jobs: {jobs}); nobody would train.")


def _one_of(flag: str, value: str, valid: Collection[str]) -> None:
    if value not in valid:
        raise UsageError(f"Unknown {flag} {value!r}; {hint(value, valid)}.")


def _check_replicas(settings: Settings, num_workers: int) -> None:
    count = settings.replicas_to_aggregate
    if count is None:
        return
    if settings.mode != "sync":
        raise UsageError(f"--replicas_to_aggregate only makes sense with --mode sync, and the mode is {settings.mode}.")
    if not 1 <= count <= num_workers:
        raise UsageError(f"--replicas_to_aggregate is {count}; it must be between 1 and the {num_workers} workers.")


def check_save_every(text: str) -> None:
    """Refuse what is neither steps, nor a time, nor none.

    >>> check_save_every("10m")
    """
    number = text[:-1] if text[-1:] in ("s", "m", "h") else text
    if text != "none" and not (number.isdecimal() and int(number) > 0):
        raise UsageError(f"--save_every is {text!r}; use a number of steps (500), a time (10m, 30s, 2h) or none.")


def _positive(flag: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"--{flag} is {seconds}; it must be a number of seconds above 0.")
