"""WHAT does a written source say? TF_CONFIG, and a settings.py with ps_svrs and worker_svrs.

Called by discovery with the text it has read; pure. Must never execute what it reads.
"""

import ast

import msgspec

from paceline.cluster.spec import ClusterSpec
from paceline.errors import UsageError

_TOO_STRANGE = (SyntaxError, ValueError, TypeError, MemoryError, RecursionError)


class TfTask(msgspec.Struct, frozen=True):
    """TF_CONFIG's "task"."""

    type: str
    index: int | None = None


class TfConfig(msgspec.Struct, frozen=True):
    """The two keys of TF_CONFIG that matter here; TensorFlow's others are ignored."""

    cluster: dict[str, list[str] | dict[str, str]] | None = None
    task: TfTask | None = None


def tf_config(text: str) -> tuple[ClusterSpec, TfTask] | None:
    """Return the cluster and this task's place in it; None where it names neither, as TensorFlow has it.

    >>> spec, task = tf_config('{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 0}}')
    >>> task
    TfTask(type='ps', index=0)
    """
    try:
        config = msgspec.json.decode(text, type=TfConfig, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(
            'TF_CONFIG must be like {"cluster": {"ps": ["host:2222"]}, "task": {"type": "ps", "index": 0}}: '
            f"{str(error).rstrip('.')}."
        ) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UsageError(f"TF_CONFIG is not JSON: {str(error).rstrip('.')}.") from None
    if config.cluster is None and config.task is None:
        return None
    if config.cluster is None or config.task is None:
        missing = "cluster" if config.cluster is None else "task"
        raise UsageError(f'TF_CONFIG has no "{missing}"; it needs both "cluster" and "task".')
    return ClusterSpec(config.cluster), config.task


def settings_py(source: bytes) -> ClusterSpec | None:
    """Return the cluster of a settings.py; None where it has neither ps_svrs nor worker_svrs.

    >>> settings_py(b"ps_svrs = ['a:1']; worker_svrs = ['a:2']").jobs
    ['ps', 'worker']
    """
    try:
        module = ast.parse(source)
    except _TOO_STRANGE as error:
        raise UsageError(f"The settings.py beside the script is not valid Python: {error}.") from None
    found = {name: value for statement in module.body for name, value in _assigned(statement)}
    if "ps_svrs" not in found and "worker_svrs" not in found:
        return None
    for name in ("ps_svrs", "worker_svrs"):
        if name not in found:
            raise UsageError(f"The settings.py beside the script has no {name}; it needs ps_svrs and worker_svrs.")
    return ClusterSpec({job: _strings(f"{job}_svrs", found[f"{job}_svrs"]) for job in ("ps", "worker")})


def _assigned(statement: ast.stmt) -> list[tuple[str, ast.expr]]:
    if isinstance(statement, ast.Assign):
        return [(target.id, statement.value) for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
        return [(statement.target.id, statement.value)]
    return []


def _strings(name: str, value: ast.expr) -> list[str]:
    try:
        literal = ast.literal_eval(value)
    except _TOO_STRANGE:
        literal = None
    if not isinstance(literal, list | tuple) or not all(isinstance(part, str) for part in literal):
        raise UsageError(f"{name} in settings.py must be a plain list of strings, such as ['localhost:2223'].")
    return list(literal)
