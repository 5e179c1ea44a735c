"""WHICH device is a worker's own? The cards of a host, divided over its workers, or what `--worker-device` says.

Called by validate, by the launcher, which tells it beforehand, and by worker/torch_devices, which makes it true. Pure.
The set that is divided is CUDA_VISIBLE_DEVICES as the user has set it. It is never narrowed: every worker sees all of
it, so that `/gpu:i` is the same card in all workers of a host, and only their own ones differ.
"""

import re
from collections.abc import Sequence

import msgspec

from paceline.cluster.devices import Device
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import UsageError

VISIBLE = "CUDA_VISIBLE_DEVICES"
WITHOUT = ("", "-1")  # what one writes there to have no GPU
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
    return Device(kind=kind, index=place(cluster, task) % max(1, num_gpus) if kind == "GPU" else 0)


def said(text: str, cluster: ClusterSpec, task: Task) -> Device:
    """What `--worker-device` says about one worker: a device with its name, else the list's next one in turn.

    >>> cluster = ClusterSpec({"ps": ["h:1"], "worker": ["h:2", "h:3"]})
    >>> str(said("/gpu:0,/gpu:1", cluster, Task("worker", 1))), str(said("", cluster, Task("worker", 1)))
    ('/device:GPU:1', '')
    >>> str(said("/cpu:0,/job:worker/task:1/gpu:0", cluster, Task("worker", 1)))
    '/device:GPU:0'
    """
    devices = parse(text)
    for device in devices:
        if device.task_of() == task:
            return device.hardware
    for_all = [device.hardware for device in devices if device.task_of() is None and device.job in (None, task.job)]
    return for_all[place(cluster, task) % len(for_all)] if for_all else Device()


def parse(text: str) -> list[Device]:
    """The devices of a list.

    >>> [str(device) for device in parse("/gpu:0, /gpu:1")]
    ['/device:GPU:0', '/device:GPU:1']
    """
    return [Device.parse(part.strip()) for part in text.split(",")] if text.strip() else []


def place(cluster: ClusterSpec, task: Task) -> int:
    """The position of a task among the workers of its host, in worker order; others come after them."""
    beside = neighbours(cluster, task)
    return beside.index(task) if task in beside else len(beside)


def sharing(settings: Settings, cluster: ClusterSpec, task: Task, num_gpus: int, real: int) -> int:
    """How many workers of this task's host have the same card as it, itself included.

    >>> cluster = ClusterSpec({"ps": ["h:1"], "worker": ["h:2", "h:3", "h:4"]})
    >>> [sharing(Settings(run_id=""), cluster, task, num_gpus=2, real=2) for task in cluster.workers]
    [2, 1, 2]
    """
    beside = neighbours(cluster, task) or [task]
    cards = [card(pinned(settings, cluster, each, num_gpus), real) for each in beside]
    return max(1, cards.count(card(pinned(settings, cluster, task, num_gpus), real)))


def card(device: Device, real: int) -> int | None:
    """Which of the host's visible cards a /gpu:i is on, None for a CPU: virtual ones are dealt out in turn.

    >>> card(Device.parse("/gpu:3"), real=2), card(Device.parse("/cpu:0"), real=2)
    (1, None)
    """
    return (device.index or 0) % max(1, real) if device.kind == "GPU" else None


def neighbours(cluster: ClusterSpec, task: Task) -> list[Task]:
    """The workers whose address names the same host, in worker order."""
    beside = cluster.tasks_beside(task)
    return [worker for worker in cluster.workers if worker in beside]


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
    for device in parse(settings.worker_device):
        if device.job == "ps":
            raise UsageError(f"--worker-device {device}: a ps trains nothing; name a worker, or no task.")
        device.check(cluster)
        if device.kind is None:
            raise UsageError(f"--worker-device {device}: say which device there, such as {device}/gpu:0.")
    for device in parse(settings.ps_device):
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


def check_memory(settings: Settings, cluster: ClusterSpec, real: int) -> None:
    """Refuse workers that take more of one card's memory at once than it has."""
    use = GpuUse.of(settings)
    if use.allow_growth or not real:
        return
    for task in cluster.workers:
        own = pinned(settings, cluster, task, use.count(real))
        num = sharing(settings, cluster, task, use.count(real), real)
        share = use.share(num) or 0.0
        if own.kind == "GPU" and num * share > 1:
            raise UsageError(
                f"{num} workers share one card, each takes {share:g} of its memory at once (--no-allow-growth); "
                f"use --gpu-memory-fraction {int(100 / num) / 100:g} or less, or --allow-growth."
            )
