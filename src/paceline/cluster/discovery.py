"""WHICH task am I? The first of: launcher, cluster argument, flags, settings.py, TF_CONFIG, a scheduler.

Called by paceline.init, `paceline serve` and `paceline env`; alone in reading os.environ and sys.argv for cluster
facts. Must never change the environment, and must refuse with UsageError before anything is made.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path

import msgspec

from paceline.cluster import flags as argv_flags
from paceline.cluster import schedulers, sources
from paceline.cluster.pinning import VISIBLE
from paceline.cluster.schedulers import Look
from paceline.cluster.secret import own_path, secret_by_hand, secret_from_hex
from paceline.cluster.settings import Settings
from paceline.cluster.spec import Addresses, ClusterSpec, Task
from paceline.cluster.spelling import hint
from paceline.cluster.validate import check, check_ops
from paceline.errors import UsageError
from paceline.transport.security import Secret, keys_dir_of

__all__ = [
    "CLIENT",
    "LOOK_VARIABLE",
    "Assignment",
    "Look",
    "discover",
    "discover_as",
    "encode_for_child",
    "look_everywhere",
    "may_look",
    "secret_by_hand",
    "visible_cards",
]

TASK_VARIABLE = "PACELINE_TASK"
SECRET_VARIABLE = "PACELINE_SECRET"
KEYS_VARIABLE = "PACELINE_KEYS"  # with --tls: the folder of the certificate
LOOK_VARIABLE = "PACELINE_LOOK"

CLIENT = Task("client", 0)  # who calls without being a task of the cluster
_KNOWN_JOBS = ("ps", "worker", "chief", "evaluator")
_Place = tuple[ClusterSpec, Task, str]


class Assignment(msgspec.Struct, frozen=True):
    """All that a task knows when it starts; printing it leaves the secret out."""

    cluster: ClusterSpec
    task: Task
    incarnation: int
    settings: Settings
    secret: bytes
    source: str
    at: str | None = None  # of a ps that is started elsewhere: where, instead of its address in the cluster

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"Assignment({shown})"

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name != "secret"]


class _Handed(msgspec.Struct, frozen=True):
    """What PACELINE_TASK holds, as JSON."""

    cluster: dict[str, list[str]]
    task: Task
    incarnation: int
    settings: Settings
    source: str = "launcher"  # else how `paceline serve` found it, for the script in its own process
    at: str | None = None


def discover(
    cluster: ClusterSpec | Mapping[str, Addresses] | None = None,
    flags: bool = False,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    script_dir: str | Path | None = None,
    is_training: bool = True,
) -> Assignment | None:
    """Find this process's task; None means that there is no cluster, so: a plain single process. A cluster that only
    runs ops (`is_training` False) needs no ps.

    >>> discover(argv=["--epochs=3"], environ={}, script_dir="/nowhere") is None
    True
    """
    environ = os.environ if environ is None else environ
    if TASK_VARIABLE in environ:
        return _from_launcher(environ)
    script_dir = os.path.dirname(sys.argv[0]) if script_dir is None else script_dir
    given = argv_flags.read(sys.argv[1:] if argv is None else argv)
    place = (
        _from_argument(cluster, given)
        or _from_flags(flags, given)
        or _from_settings_py(Path(script_dir), given)
        or _from_tf_config(environ)
        or _from_scheduler(environ, given)
    )
    if place is None:
        _refuse_lone_job_name(flags, given)
        return None
    spec, task, source = place
    return _by_hand(spec, task, source, given, environ, is_training)


def look_everywhere(
    argv: Sequence[str], environ: Mapping[str, str] | None = None, script_dir: str | Path = "."
) -> list[Look]:
    """Ask every source that discover() would, in its order, also those behind the one that counts: the first with a
    task. No secret is read or made.

    >>> [look.source for look in look_everywhere([], {}, "/nowhere")][:4]
    ['launcher', 'flags', 'settings.py', 'TF_CONFIG']
    """
    environ = os.environ if environ is None else environ
    given = argv_flags.read(argv)
    asked: dict[str, Callable[[], Look]] = {
        "launcher": lambda: _look_at_launcher(environ),
        "flags": lambda: _look_of("flags", _from_flags(True, given), "--ps_hosts and --worker_hosts are not given"),
        "settings.py": lambda: _look_of(
            "settings.py",
            _from_settings_py(Path(script_dir), given),
            "--job_name is not given" if "job_name" not in given else "none with ps_svrs lies beside the script",
        ),
        "TF_CONFIG": lambda: _look_of("TF_CONFIG", _from_tf_config(environ), "not set, or without a cluster"),
    }
    for source in schedulers.SCHEDULERS:
        asked[source] = lambda source=source: schedulers.ask(source, environ)  # type: ignore[misc]
    looks = []
    for source, ask in asked.items():
        try:
            looks.append(ask())
        except UsageError as error:
            looks.append(Look(source, str(error), is_refused=True))
    if not any(look.task is not None or look.is_refused for look in looks):
        try:
            _refuse_lone_job_name(False, given)
        except UsageError as error:
            looks = [Look("flags", str(error), is_refused=True) if look.source == "flags" else look for look in looks]
    return looks


def may_look(environ: Mapping[str, str] | None = None) -> bool:
    """Whether a ps with one worker may keep its core busy, looking for the next push (PACELINE_LOOK=0: no)."""
    return (os.environ if environ is None else environ).get(LOOK_VARIABLE, "1") != "0"


def visible_cards(environ: Mapping[str, str] | None = None) -> str | None:
    """Return CUDA_VISIBLE_DEVICES as this process has it now, set outside or by the script; None: it is not set."""
    return (os.environ if environ is None else environ).get(VISIBLE)


def discover_as(
    cluster: ClusterSpec | Mapping[str, Addresses],
    job: str | None = None,
    index: int | None = None,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Assignment:
    """What a process knows that says itself who it is in which cluster (paceline.Server); without a job it is a client
    outside the cluster. Any jobs will do: a cluster that only runs ops needs no ps.
    """
    environ = os.environ if environ is None else environ
    spec = ClusterSpec(cluster)
    if job is None and index is not None:
        raise UsageError(f"Task index {index} is of which job? Give job_name too, one of: {', '.join(spec.jobs)}.")
    task = CLIENT if job is None else _task(spec, job, index)
    if TASK_VARIABLE in environ:
        launched = _from_launcher(environ)  # its secret is known to all that were started with it
        return Assignment(spec, task, launched.incarnation, launched.settings, launched.secret, launched.source)
    given = argv_flags.read(sys.argv[1:] if argv is None else argv)
    return _by_hand(spec, task, "cluster argument", given, environ, is_training=False)


def encode_for_child(assignment: Assignment) -> dict[str, str]:
    """Return the environment variables from which a child's discover() makes the same assignment."""
    handed = _Handed(
        assignment.cluster.as_dict(),
        assignment.task,
        assignment.incarnation,
        assignment.settings,
        assignment.source,
        assignment.at,
    )
    keys_dir = keys_dir_of(assignment.secret)
    return {
        TASK_VARIABLE: json.dumps(msgspec.to_builtins(handed), separators=(",", ":")),  # names may be no UTF-8
        SECRET_VARIABLE: assignment.secret.hex(),
        **({} if keys_dir is None else {KEYS_VARIABLE: str(keys_dir)}),
    }


def known_secret(secret_file: str | None, is_tls: bool, is_insecure: bool) -> Secret:
    """Read the secret that tasks started by hand with such flags share; make none."""
    own = own_path(os.environ) if secret_file is None and not is_insecure else None
    if own is not None and not os.path.exists(own):
        raise UsageError(f"There is no secret at {own}, which such tasks share; give theirs with --secret-file.")
    return secret_by_hand(secret_file, os.environ, is_tls, is_insecure)


def _from_launcher(environ: Mapping[str, str]) -> Assignment:
    try:
        handed = msgspec.convert(json.loads(environ[TASK_VARIABLE]), _Handed)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise UsageError(
            f"{TASK_VARIABLE} is not what the launcher writes; unset it, or start with `paceline run`."
        ) from None
    secret = secret_from_hex(environ.get(SECRET_VARIABLE, ""))
    if secret is None:
        raise UsageError(f"{TASK_VARIABLE} is set without a valid {SECRET_VARIABLE}; the launcher sets both.")
    spec = ClusterSpec(handed.cluster)
    task = _task(spec, handed.task.job, handed.task.index)
    check(handed.settings, spec)
    keys_dir = Path(environ.get(KEYS_VARIABLE, "")).absolute() if handed.settings.tls else None
    proven = Secret(secret, keys_dir)
    return Assignment(spec, task, handed.incarnation, handed.settings, proven, handed.source, handed.at)


def _by_hand(
    spec: ClusterSpec, task: Task, source: str, given: Mapping[str, str], environ: Mapping[str, str], is_training: bool
) -> Assignment:
    """All that the flags say beside the place, checked before a secret is made."""
    settings = argv_flags.settings(given, _run_id_by_hand(spec))
    if is_training:
        check(settings, spec)
    else:
        check_ops(settings)
    if settings.lane == "inproc":
        raise UsageError("Lane inproc is for tests within one process; use auto, shm or tcp.")
    secret = secret_by_hand(argv_flags.text(given, "secret_file"), environ, settings.tls, settings.insecure)
    return Assignment(spec, task, 0, settings, secret, source)


def _from_argument(cluster: ClusterSpec | Mapping[str, Addresses] | None, given: Mapping[str, str]) -> _Place | None:
    if cluster is None:
        return None
    spec = ClusterSpec(cluster)
    return spec, _task_from_flags(spec, given), "cluster argument"


def _from_flags(is_asked: bool, given: Mapping[str, str]) -> _Place | None:
    wanted = ("ps_hosts", "worker_hosts")
    present = [name for name in wanted if name in given]
    if not present or not (is_asked or "job_name" in given):
        return None
    for name in wanted:
        if name not in given and not (name == "worker_hosts" and "chief_hosts" in given):
            raise UsageError(f"--{present[0]} is given without --{name}; both lists of host:port are needed.")
    names = [name for name in (*wanted, "chief_hosts") if name in given]
    spec = ClusterSpec({name.removesuffix("_hosts"): argv_flags.hosts(given, name) for name in names})
    return spec, _task_from_flags(spec, given), "flags"


def _from_settings_py(folder: Path, given: Mapping[str, str]) -> _Place | None:
    path = folder / "settings.py"
    if "job_name" not in given or not os.path.isfile(path):
        return None
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UsageError(f"The settings.py beside the script cannot be read: {error.strerror}.") from None
    spec = sources.settings_py(source)
    return None if spec is None else (spec, _task_from_flags(spec, given), "settings.py")


def _from_tf_config(environ: Mapping[str, str]) -> _Place | None:
    config = environ.get("TF_CONFIG", "").strip()
    found = sources.tf_config(config) if config else None
    if found is None:
        return None
    spec, task = found
    return spec, _task(spec, task.type, task.index), "TF_CONFIG"


def _from_scheduler(environ: Mapping[str, str], given: Mapping[str, str]) -> _Place | None:
    look = schedulers.look(environ)[-1]
    if look.cluster is None or look.task is None:
        return None
    if (job := given.get("job_name")) in _KNOWN_JOBS and job != look.task.job:
        raise UsageError(
            f"--job_name is {job}, but by {look.source} this is {look.task} ({look.why}); leave it out, or give "
            "--ps_hosts and --worker_hosts, too."
        )
    return look.cluster, _task(look.cluster, look.task.job, look.task.index), f"{look.source}: {look.why}"


def _look_at_launcher(environ: Mapping[str, str]) -> Look:
    if TASK_VARIABLE not in environ:
        return Look("launcher", f"{TASK_VARIABLE} is not set")
    assignment = _from_launcher(environ)
    return Look("launcher", f"{TASK_VARIABLE} is set", assignment.cluster, assignment.task)


def _look_of(source: str, place: _Place | None, if_not: str) -> Look:
    return Look(source, if_not) if place is None else Look(source, "names the cluster and this task", *place[:2])


def _refuse_lone_job_name(is_asked: bool, given: Mapping[str, str]) -> None:
    """A --job_name may be the script's own; one of our jobs, or one with an index, is meant for us."""
    job = given.get("job_name")
    if job is not None and (is_asked or job in _KNOWN_JOBS or "task_index" in given):
        raise UsageError(
            f"--job_name {job!r} names a task but no cluster was found; give --ps_hosts and --worker_hosts, "
            "or put a settings.py with the lists ps_svrs and worker_svrs beside the script."
        )


def _task_from_flags(spec: ClusterSpec, given: Mapping[str, str]) -> Task:
    job = argv_flags.text(given, "job_name")
    if job is None:
        raise UsageError("Which task is this? Add --job_name=ps or --job_name=worker, and --task_index=0.")
    return _task(spec, job, argv_flags.whole(given, "task_index"))


def _task(spec: ClusterSpec, job: str, index: int | None) -> Task:
    """Find the task; only an evaluator may be outside the cluster, where it has no address."""
    if index is not None and (isinstance(index, bool) or not isinstance(index, Integral)):
        raise UsageError(f"task_index is {index!r}; it must be a whole number, such as 0.")
    if not isinstance(job, str):
        raise UsageError(f"job_name is {job!r}; it must be a string, one of: {', '.join(spec.jobs)}.")
    if job == "evaluator" and job not in spec.jobs and spec.ps:
        if index:
            raise UsageError(f"There is no task evaluator:{index}; outside the cluster there is only evaluator:0.")
        return Task(job, 0)
    if job not in spec.jobs:
        valid = [*spec.jobs, "evaluator"] if spec.ps else spec.jobs
        raise UsageError(f"The cluster has no job {job!r}; {hint(job, valid)}.")
    if index is None and spec.num_tasks(job) > 1:
        raise UsageError(f"Job {job!r} has {spec.num_tasks(job)} tasks; say which one with --task_index=0 or higher.")
    task = Task(job, int(index or 0))
    spec.address(task)
    return task


def _run_id_by_hand(spec: ClusterSpec) -> str:
    """Every task of a cluster comes to the same name without talking to the others."""
    canonical = msgspec.json.encode(spec.as_dict(), order="sorted")
    return "by-hand-" + hashlib.sha256(canonical).hexdigest()[:8]
