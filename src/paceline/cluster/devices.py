"""WHERE shall it run? TensorFlow's device strings: read, merged, filled in, printed in canonical form.

Called by the device scopes, the graph, the launcher's pinning and the log of placements; pure, imports no framework.
Must never ask what hardware there is: frameworks/torch/devices does.
"""

import re

import msgspec

from paceline.cluster.spec import ClusterSpec, Task
from paceline.cluster.spelling import with_article
from paceline.errors import UsageError

KINDS = ("CPU", "GPU")

_EXAMPLES = "/cpu:0, /gpu:1, /device:GPU:2 or /job:worker/task:1/gpu:0"
_NUMBER = re.compile(r"[0-9]{1,6}")
_JOB_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
ANY = "*"  # TensorFlow's word for "whichever": as if the number were not given


class Device(msgspec.Struct, frozen=True):
    """A task, a piece of hardware in it, or both; what is None was not said.

    >>> Device.parse("/job:worker/task:1/gpu:0")
    Device(job='worker', replica=None, task=1, kind='GPU', index=0)
    >>> str(Device.parse("/job:worker/task:1").merge(Device.parse("/gpu:0")))
    '/job:worker/task:1/device:GPU:0'
    """

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    kind: str | None = None
    index: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Device":
        """Read any of TensorFlow's spellings; "" says nothing.

        >>> [str(Device.parse(text)) for text in ("/cpu:0", "/gpu:1", "/device:GPU:2", "/JOB:ps/task:0", "")]
        ['/device:CPU:0', '/device:GPU:1', '/device:GPU:2', '/job:ps/task:0', '']
        """
        if not isinstance(text, str):
            raise UsageError(f"A device is a string such as {_EXAMPLES}, not {with_article(type(text).__name__)}.")
        if not text:
            return cls()
        if not text.startswith("/"):
            raise UsageError(f"Device {text!r} does not begin with a slash; write it like {_EXAMPLES}.")
        said: dict[str, str | int | None] = {}
        for part in text[1:].split("/"):
            for field, value in _fields(part, text).items():
                if field in said:
                    raise UsageError(f"Device {text!r} names its {_WORDS[field]} twice; name it once.")
                said[field] = value
        return msgspec.convert(said, cls)

    def merge(self, inner: "Device") -> "Device":
        """Return this scope refined by one inside it: field by field the inner one wins, as in TensorFlow.

        >>> str(Device.parse("/job:ps/task:0/cpu:0").merge(Device.parse("/task:1")))
        '/job:ps/task:1/device:CPU:0'
        """
        mine, its = msgspec.structs.asdict(self), msgspec.structs.asdict(inner)
        return Device(**{field: mine[field] if value is None else value for field, value in its.items()})

    def filled(self, task: Task) -> "Device":
        """Return the full name: where nothing is said, the calling task and its CPU; of another job, task 0.

        >>> str(Device.parse("/gpu:1").filled(Task("worker", 2)))
        '/job:worker/replica:0/task:2/device:GPU:1'
        >>> str(Device.parse("/job:ps").filled(Task("worker", 2)))
        '/job:ps/replica:0/task:0/device:CPU:0'
        """
        here = task.index if self.job in (None, task.job) else 0
        whole = Device(job=task.job, replica=0, task=here, kind="CPU", index=0)
        return whole.merge(self)

    def task_of(self) -> Task | None:
        """Return the task that is named, if both its job and its number are.

        >>> Device.parse("/job:worker/task:1/cpu:0").task_of(), Device.parse("/gpu:0").task_of()
        (Task(job='worker', index=1), None)
        """
        return None if self.job is None or self.task is None else Task(self.job, self.task)

    def check(self, cluster: ClusterSpec) -> "Device":
        """Return this device, or refuse a job or a task that the cluster does not have.

        >>> Device.parse("/job:ps").check(ClusterSpec({"ps": ["a:1"], "worker": ["a:2"]})).job
        'ps'
        """
        if self.job is not None:
            cluster.task_address(self.job, self.task or 0)
        return self

    @property
    def hardware(self) -> "Device":
        """Only the kind and its number, as one task counts them."""
        return Device(kind=self.kind, index=self.index)

    def __str__(self) -> str:
        said = [
            f"/{word}:{value}"
            for word, value in (("job", self.job), ("replica", self.replica), ("task", self.task))
            if value is not None
        ]
        if self.kind is not None:
            said.append(f"/device:{self.kind}:{ANY if self.index is None else self.index}")
        return "".join(said)


_WORDS = {"job": "job", "replica": "replica", "task": "task", "kind": "kind of device", "index": "number of device"}


def _fields(part: str, text: str) -> dict[str, str | int | None]:
    """What one piece between slashes says."""
    word, *values = part.split(":")
    match word.lower(), values:
        case "job", [name] if _JOB_NAME.fullmatch(name):
            return {"job": name}
        case "task", [number]:
            return {"task": _number(number, "task", text)}
        case "replica", ["0"]:
            return {"replica": 0}
        case "replica", _:
            raise UsageError(
                f"Device {text!r} asks for a replica; a task here has one, so write /replica:0 or nothing."
            )
        case "device", [kind, *index] if kind and len(index) <= 1:
            return _hardware(kind, index, text)
        case (("cpu" | "gpu" | "tpu"), index) if len(index) <= 1:
            return _hardware(word, index, text)
    raise UsageError(f"Device {text!r} has the part {part!r}, which nobody can read; write it like {_EXAMPLES}.")


def _hardware(kind: str, index: list[str], text: str) -> dict[str, str | int | None]:
    if kind.upper() not in KINDS:
        raise UsageError(f"Device {text!r} is a {kind.upper()}; tasks here have {' and '.join(KINDS)}, such as /gpu:0.")
    said: dict[str, str | int | None] = {"kind": kind.upper()}
    if index and index[0] != ANY:
        said["index"] = _number(index[0], kind.lower(), text)
    return said


def _number(text: str, word: str, device: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise UsageError(f"Device {device!r} has the {word} number {text!r}; they count 0, 1, 2, ….")
    return int(text)
