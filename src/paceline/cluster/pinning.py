"""WHICH device is a worker's own? The cards of a host, divided over its workers, or what `--worker-device` says.

Called by validate, by the launcher, which tells it beforehand, and by frameworks/torch/devices, which makes it true.
Pure. The set that is divided is CUDA_VISIBLE_DEVICES as the user has set it. It is never narrowed: every worker sees
all of it, so that `/gpu:i` is the same card in all workers of a host, and only their own ones differ.
"""

import re
from collections.abc import Sequence

import msgspec

from paceline.cluster.devices import Device
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task, split_address
from paceline.errors import UsageError

VISIBLE = "CUDA_VISIBLE_DEVICES"
VIRTUAL, MISSING = " (virtual)", " (missing: the CPU)"  # behind a GPU's name, wherever it is shown
CPU = Device(kind="CPU", index=0)

_ORDINAL = re.compile(r"\s*[+]?[0-9]+")


class GpuUse(msgspec.Struct, frozen=True):
    """How a task may use GPUs.

    >>> GpuUse().allow_growth, GpuUse(virtual=2).count(real=1), GpuUse().count(real=1)
    (True, 2, 1)
    """

    virtual: int = 0  # so many /gpu:i, whatever number of cards there is
    is_soft: bool = True  # a GPU that is missing is replaced by the CPU
    allow_growth: bool = True  # memory is taken as it is needed, else all of the share at once
    memory_fraction: float | None = None  # the share of a card's memory that a task may have
    is_logged: bool = False

    @classmethod
    def of(cls, settings: Settings) -> "GpuUse":
        """What the flags say."""
        return cls(
            settings.virtual_gpus,
            settings.soft_placement,
            settings.allow_growth,
            settings.gpu_memory_fraction,
            settings.log_device_placement,
        )

    def count(self, real: int) -> int:
        """How many /gpu:i there are, of which so many are cards; without any card virtual ones cannot be, either."""
        return self.virtual or real if real else 0

    def share(self, sharing: int) -> float | None:
        """The share of a card's memory that one of `sharing` tasks may have; None: no limit.

        >>> GpuUse().share(2), GpuUse(memory_fraction=0.3).share(2), GpuUse(allow_growth=False).share(2)
        (None, 0.3, 0.45)
        """
        if self.memory_fraction is not None or self.allow_growth:
            return self.memory_fraction
        return 0.9 / max(1, sharing)  # the rest is what the driver takes for each process


class Hardware(msgspec.Struct, frozen=True):
    """The GPUs of one process: how many cards it sees, and how they may be used.

    >>> Hardware(real=1, use=GpuUse(virtual=2)).names
    ['/gpu:0 (virtual)', '/gpu:1 (virtual)']
    """

    real: int = 0
    use: GpuUse = GpuUse()

    @property
    def count(self) -> int:
        """How many /gpu:i there are."""
        return self.use.count(self.real)

    @property
    def names(self) -> list[str]:
        """All /gpu:i as tables show them."""
        return [self.name(Device(kind="GPU", index=index)) for index in range(self.count)]

    def has(self, device: Device) -> bool:
        """Whether there is such a device; a process has one CPU, and any number of names for it."""
        return device.kind != "GPU" or (device.index or 0) < self.count

    def name(self, device: Device) -> str:
        """A device as users write it and tables show it."""
        return f"/{(device.kind or 'CPU').lower()}:{device.index or 0}{self.mark(device)}"

    def mark(self, device: Device) -> str:
        """What is put behind the name of a device, in whichever form."""
        return VIRTUAL if device.kind == "GPU" and self.use.virtual else ""


def mark(device: Device, names: Sequence[str]) -> str:
    """What is put behind a device's name, where all that is known of its task is the names of the GPUs there.

    >>> [mark(Device.parse(text), ["/gpu:0 (virtual)"]) for text in ("/cpu:0", "/gpu:0", "/gpu:1")]
    ['', ' (virtual)', ' (missing: the CPU)']
    """
    if device.kind != "GPU":
        return ""
    at = device.index or 0
    return MISSING if at >= len(names) else VIRTUAL if names[at].endswith(VIRTUAL) else ""


def pinned(settings: Settings, cluster: ClusterSpec, task: Task, num_gpus: int) -> Device:
    """The hardware that this worker is to compute on: what was said, else its share of the cards, else the CPU.

    >>> cluster = ClusterSpec({"ps": ["h:1"], "worker": ["h:2", "h:3", "h:4"]})
    >>> [str(pinned(Settings(run_id=""), cluster, task, num_gpus=2)) for task in cluster.workers]
    ['/device:GPU:0', '/device:GPU:1', '/device:GPU:0']
    """
    own = said(settings.worker_device, cluster, task)
    kind = own.kind or ("GPU" if num_gpus else "CPU")
    if own.index is not None:
        return Device(kind=kind, index=own.index)
    return Device(kind=kind, index=seat(cluster, task) % max(1, num_gpus) if kind == "GPU" else 0)


def said(text: str, cluster: ClusterSpec, task: Task) -> Device:
    """What `--worker-device` says about one worker: a device with its name, else the list's next one in turn.

    >>> cluster = ClusterSpec({"ps": ["h:1"], "worker": ["h:2", "h:3"]})
    >>> str(said("/gpu:0,/gpu:1", cluster, Task("worker", 1))), str(said("", cluster, Task("worker", 1)))
    ('/device:GPU:1', '')
    >>> str(said("/cpu:0,/job:worker/task:1/gpu:0", cluster, Task("worker", 1)))
    '/device:GPU:0'
    """
    devices = parse(text, "worker")
    for device in devices:
        if device.task_of() == task:
            return device.hardware
    for_all = [device.hardware for device in devices if device.task_of() is None and device.job in (None, task.job)]
    return for_all[seat(cluster, task) % len(for_all)] if for_all else Device()


def parse(text: str, job: str) -> list[Device]:
    """The devices of a list; a task that is named without its job is one of `job`.

    >>> [str(device) for device in parse("/gpu:0, /task:1/gpu:1", "worker")]
    ['/device:GPU:0', '/job:worker/task:1/device:GPU:1']
    """
    devices = [Device.parse(part.strip()) for part in text.split(",")] if text.strip() else []
    return [device if device.task is None else Device(job=job).merge(device) for device in devices]


def seat(cluster: ClusterSpec, task: Task) -> int:
    """The position of a task among the workers of its host, in worker order; others come after them."""
    workers = neighbours(cluster, task)
    return workers.index(task) if task in workers else len(workers)


def sharing(settings: Settings, cluster: ClusterSpec, task: Task, num_gpus: int, real: int) -> int:
    """How many workers of this task's host have the same card as it, itself included.

    >>> cluster = ClusterSpec({"ps": ["h:1"], "worker": ["h:2", "h:3", "h:4"]})
    >>> [sharing(Settings(run_id=""), cluster, task, num_gpus=2, real=2) for task in cluster.workers]
    [2, 1, 2]
    """
    workers = neighbours(cluster, task) or [task]
    cards = [card(pinned(settings, cluster, each, num_gpus), real) for each in workers]
    return max(1, cards.count(card(pinned(settings, cluster, task, num_gpus), real)))


def card(device: Device, real: int) -> int | None:
    """Which of the host's visible cards a /gpu:i is on, None for a CPU: virtual ones are dealt out in turn.

    >>> card(Device.parse("/gpu:3"), real=2), card(Device.parse("/cpu:0"), real=2)
    (1, None)
    """
    return (device.index or 0) % max(1, real) if device.kind == "GPU" else None


def neighbours(cluster: ClusterSpec, task: Task) -> list[Task]:
    """The workers whose address names the same host, in worker order."""
    on_host = cluster.tasks_beside(task)
    return [worker for worker in cluster.workers if worker in on_host]


def visible(text: str | None, present: int) -> tuple[str, ...]:
    """The cards that CUDA_VISIBLE_DEVICES leaves visible of those present, as CUDA itself reads it: up to the first
    that is none, and none at all if one is named twice. None: it is not set, and all are.

    >>> visible(None, 2), visible("1,0", 2), visible("0,7,1", 2), visible("-1", 2), visible("", 2)
    (('0', '1'), ('1', '0'), ('0',), (), ())
    """
    if text is None:
        return tuple(str(number) for number in range(present))
    parts = [part.strip() for part in text.split(",")]
    if parts[0].startswith(("GPU-", "MIG-")):
        return _distinct([part for part in parts if part])
    kept: list[str] = []
    for part in parts:
        found = _ORDINAL.match(part)
        if found is None or int(found[0]) >= present:
            break
        kept.append(str(int(found[0])))
    return _distinct(kept)


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(names) if len(set(names)) == len(names) else ()


def check(settings: Settings, cluster: ClusterSpec) -> None:
    """Refuse devices that no machine could make true."""
    for device in parse(settings.worker_device, "worker"):
        if device.job == "ps":
            raise UsageError(f"--worker-device {device}: a ps trains nothing; name a worker, or no task.")
        device.check(cluster)
        if device.kind is None:
            raise UsageError(f"--worker-device {device}: say which device there, such as {device}/gpu:0.")
    for device in parse(settings.ps_device, "ps"):
        if device.job not in (None, "ps"):
            raise UsageError(f"--ps-device {device}: that is no ps; write /cpu:0 or /gpu:0.")
        device.check(cluster)


def check_use(settings: Settings) -> None:
    """Refuse numbers of cards, and shares of their memory, that no machine has."""
    if settings.virtual_gpus < 0:
        raise UsageError(f"--virtual-gpus is {settings.virtual_gpus}; it must be 0 (the cards there are) or more.")
    fraction = settings.gpu_memory_fraction
    if fraction is not None and not 0 < fraction <= 1:
        raise UsageError(f"--gpu-memory-fraction is {fraction}; it must be above 0 and at most 1, such as 0.3.")


def check_memory(settings: Settings, cluster: ClusterSpec, real: int, workers: Sequence[Task] | None = None) -> None:
    """Refuse workers that take more of one card's memory at once than it has; all of them where none are named."""
    use = GpuUse.of(settings)
    for task in (cluster.workers if workers is None else workers) if real else ():
        if pinned(settings, cluster, task, use.count(real)).kind == "GPU":
            check_share(use, sharing(settings, cluster, task, use.count(real), real))


def check_share(use: GpuUse, num: int) -> None:
    """Refuse so many tasks on one card, if they take more of its memory at once than it has."""
    share = use.share(num)
    if not use.allow_growth and share is not None and num * share > 1:
        raise UsageError(
            f"{num} tasks share one card, each takes {share:g} of its memory at once (--no-allow-growth); "
            f"use --gpu-memory-fraction {int(100 / num) / 100:g} or less, or --allow-growth."
        )


def beside(cluster: ClusterSpec, task: Task, among: Sequence[Task]) -> int:
    """How many of these tasks, itself included, have an address that names this task's host: each of them that serves
    ops may use every card of it.

    >>> cluster = ClusterSpec({"a": ["h:1", "g:1"], "b": ["h:2"]})
    >>> beside(cluster, Task("a", 0), [Task("a", 0), Task("a", 1), Task("b", 0)])
    2
    """
    host = split_address(cluster.address(task))[0]
    return sum(split_address(cluster.address(each))[0] == host for each in {task, *among})
