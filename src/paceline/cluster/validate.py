"""MAY this run start? Whether the settings and the cluster make sense together.

Called by discovery and the launcher before anything starts; pure.
Must never correct a value: it says what would be right.
"""

import math
from collections.abc import Collection

from paceline.cluster import chaos, pinning, plain, slow
from paceline.cluster.settings import LOG_STYLES, Settings
from paceline.cluster.spec import ClusterSpec
from paceline.cluster.spelling import hint
from paceline.errors import UsageError
from paceline.modes import spec
from paceline.params.placement import PLACEMENTS
from paceline.params.recast import MASTERS, WIRES
from paceline.transport import LANES, grpc

DATA = ("shard", "full")
BUFFERS = ("mean", "chief")
PLAIN = Settings(run_id="")
MIN_LEASE_S = 0.1


def check(settings: Settings, cluster: ClusterSpec) -> None:
    """Raise UsageError unless the run makes sense.

    >>> check(Settings(run_id="r"), ClusterSpec({"ps": ["a:1"], "worker": ["a:2"]}))
    """
    _check_jobs(cluster)
    if settings.plain:
        plain.check(settings)
    _one_of("mode", settings.mode, spec.NAMES)
    _one_of("placement", settings.placement, PLACEMENTS)
    _one_of("data", settings.data, DATA)
    _one_of("buffers", settings.buffers, BUFFERS)
    _one_of("wire", settings.wire, WIRES)
    _one_of("master", settings.master, MASTERS)
    _check_mode(settings, len(cluster.workers))
    _check_counts(settings, len(cluster.workers))
    _check_slow(settings.slow, cluster)
    _check_seed(settings.seed)
    pinning.check(settings, cluster)
    check_ops(settings)
    chaos.check(settings.chaos, settings.lane, cluster)
    check_save_every(settings.save_every)
    if settings.keep < 1:
        raise UsageError(f"--keep is {settings.keep}; at least 1 checkpoint stays (--save-every none writes none).")
    _positive("lease_s", settings.lease_s)
    if settings.lease_s < MIN_LEASE_S:
        raise UsageError(
            f"--lease-s is {settings.lease_s:g}; hearts beat five times a lease: use {MIN_LEASE_S} or more."
        )
    _check_stall(settings)
    if settings.max_restarts < 0:
        raise UsageError(f"--max-restarts is {settings.max_restarts}; it must be 0 (never) or more.")
    if settings.log_every < 0:
        raise UsageError(f"--log-every is {settings.log_every}; it must be 0 (a few lines a second) or more.")


def check_lane(lane: str, hosts: Collection[str]) -> None:
    """What a launcher knows of tasks that it has placed: memory is shared on one host only."""
    if lane in ("shm", "inproc") and len(hosts) > 1:
        raise UsageError(
            f"--lane {lane} is for tasks of one host, and these are on {len(hosts)}; leave it out: tasks of one host "
            "share memory by themselves."
        )


def check_ops(settings: Settings) -> None:
    """What also holds for a cluster that only runs ops: it has no training, and any jobs.

    >>> check_ops(Settings(run_id="r"))
    """
    if settings.lane != "inproc":  # of tests, and not for people
        _one_of("lane", settings.lane, ["auto", *(lane for lane in LANES if lane != "inproc")])
    if settings.lane == "grpc":
        grpc.check_installed()
    _one_of("log-style", settings.log_style, LOG_STYLES)
    _check_security(settings)
    pinning.check_use(settings)
    _positive("wait_s", settings.wait_s)


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


def _check_mode(settings: Settings, num_workers: int) -> None:
    """The mode's numbers, and that no number of another mode was given."""
    for mode, given in (
        ("bounded", {"staleness": settings.staleness is not None}),
        (
            "local",
            {
                "local-steps": settings.local_steps is not None,
                "outer": settings.outer is not None,
                "outer-lr": settings.outer_lr != PLAIN.outer_lr,
                "outer-momentum": settings.outer_momentum is not None,
            },
        ),
    ):
        for flag, is_given in given.items():
            if is_given and settings.mode != mode:
                raise UsageError(
                    f"--{flag} only makes sense with --mode {mode}, and the mode is {settings.mode}; leave one out."
                )
    spec.check(settings.mode_spec, num_workers)
    if not (math.isfinite(settings.outer_lr) and settings.outer_lr > 0):
        raise UsageError(f"--outer-lr is {settings.outer_lr}; it must be a number above 0, such as 0.7.")
    if not 0 <= settings.resolved_outer_momentum < 1:
        raise UsageError(f"--outer-momentum is {settings.outer_momentum}; it must be 0 or more, and below 1.")
    if settings.ema is not None and not 0 < settings.ema < 1:
        raise UsageError(f"--ema is {settings.ema}; the decay must lie between 0 and 1, such as 0.999.")
    if settings.overlap and settings.mode == "local":
        raise UsageError("--overlap sends gradients while backward runs, and --mode local pushes none; leave one out.")


def _check_security(settings: Settings) -> None:
    if settings.tls and settings.insecure:
        raise UsageError("--tls is for those who share a secret, and with --insecure there is none; leave one out.")
    if settings.tls and settings.lane in ("shm", "inproc"):
        raise UsageError(f"--tls encrypts tcp, and --lane {settings.lane} uses none; take --lane auto or tcp.")
    if settings.tls and settings.lane == "grpc":
        raise UsageError("--tls is made for lane tcp, and not for --lane grpc; take --lane auto or tcp.")


def _check_counts(settings: Settings, num_workers: int) -> None:
    """How many workers must be there, of those that the cluster has."""
    started = settings.started_workers
    if started is not None and not 1 <= started <= num_workers:
        raise UsageError(f"--started-workers is {started}; it must be between 1 and the {num_workers} workers.")
    if not 1 <= settings.min_workers <= num_workers:
        raise UsageError(
            f"--min-workers is {settings.min_workers}; it must be between 1 and the {num_workers} workers."
        )


def _check_seed(seed: int | None) -> None:
    if seed is not None and not 0 <= seed < 1 << 32:
        raise UsageError(f"--seed is {seed}; use a whole number from 0 to {(1 << 32) - 1}, which every library takes.")


def _check_stall(settings: Settings) -> None:
    """Progress is looked at in longer terms than heartbeats."""
    stall_s = settings.stall_s
    if stall_s is None or stall_s == 0:
        return
    if not (math.isfinite(stall_s) and stall_s >= settings.lease_s):
        raise UsageError(
            f"--stall-s is {stall_s}; it must be 0 (never) or at least --lease-s ({settings.lease_s:g}): a worker that "
            "computes is not to be given up sooner than one that is silent."
        )


def _check_slow(text: str, cluster: ClusterSpec) -> None:
    for task in slow.parse(text):
        if task not in cluster.workers:
            names = ", ".join(str(worker) for worker in cluster.workers)
            raise UsageError(f"--slow names {task}, which is no worker of this cluster; its workers are {names}.")


def check_save_every(text: str) -> None:
    """Refuse what is neither steps, nor a time, nor none.

    >>> check_save_every("10m")
    """
    number = text[:-1] if text[-1:] in ("s", "m", "h") else text
    if text != "none" and not (number.isdecimal() and int(number) > 0):
        raise UsageError(f"--save-every is {text!r}; use a number of steps (500), a time (10m, 30s, 2h) or none.")


def _positive(flag: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"--{flag.replace('_', '-')} is {seconds}; it must be a number of seconds above 0.")
