"""WHAT does a program get that knows nothing of paceline? TF1's four flags and TF_CONFIG, for `paceline run --plain`.

Called by validate and by launchers/plain. Pure. Must never let a flag pass that would do nothing: such a program trains
by itself, so whatever says how paceline trains is refused.
"""

import msgspec

from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import UsageError

DEFAULT = Settings(run_id="")
MEANT = {"run_id", "run_dir", "plain", "slow", "started_workers", "max_restarts"}


def flags_of(cluster: ClusterSpec, task: Task) -> tuple[str, ...]:
    """The four flags of the documents' programs.

    >>> flags_of(ClusterSpec({"ps": ["a:1"], "worker": ["a:2", "b:2"]}), Task("worker", 1))
    ('--job_name=worker', '--task_index=1', '--ps_hosts=a:1', '--worker_hosts=a:2,b:2')
    """
    ps, workers = (",".join(cluster.job_tasks(job)) for job in ("ps", "worker"))
    return f"--job_name={task.job}", f"--task_index={task.index}", f"--ps_hosts={ps}", f"--worker_hosts={workers}"


def tf_config_of(cluster: ClusterSpec, task: Task) -> str:
    """TensorFlow 2's own form of the same.

    >>> tf_config_of(ClusterSpec({"ps": ["a:1"]}), Task("ps", 0))
    '{"cluster":{"ps":["a:1"]},"task":{"type":"ps","index":0}}'
    """
    config = {"cluster": cluster.as_dict(), "task": {"type": task.job, "index": task.index}}
    return msgspec.json.encode(config).decode()


def check(settings: Settings) -> None:
    """Raise UsageError for a flag that a plain program makes no use of.

    >>> check(Settings(run_id="r", plain=True, slow="worker:1=4.2x"))
    """
    if settings.started_workers is not None:
        raise UsageError("--workers MIN:MAX lets others join, and with --plain nobody can; give one number.")
    if settings.max_restarts not in (0, DEFAULT.max_restarts):
        raise UsageError(
            f"--max-restarts is {settings.max_restarts}, but no task of a --plain program is started again: only the "
            "program knows how it would go on. Leave it out."
        )
    for name in settings.__struct_fields__:
        if name not in MEANT and getattr(settings, name) != getattr(DEFAULT, name):
            is_off = getattr(settings, name) is False
            flag = f"--{'no-' if is_off else ''}{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} says how paceline trains, and a --plain program trains by itself; leave one of them out."
            )
