"""HOW are a host's cards divided over the tasks that are started here? What each worker gets, told beforehand.

Called by launchers/local and launchers/crew. cluster/pinning decides; in a worker worker/torch_devices makes it true.
Must never start CUDA, nor import torch: whoever has asked the driver cannot fork tasks that use it.
"""

import functools
import os
from collections.abc import Mapping

from paceline.cluster.devices import Device
from paceline.cluster.pinning import CPU, VISIBLE, GpuUse, check_memory, parse, pinned, visible
from paceline.cluster.settings import Settings
from paceline.cluster.spec import ClusterSpec, Task
from paceline.errors import UsageError


@functools.cache
def present() -> int:
    """How many cards the driver knows, whatever CUDA_VISIBLE_DEVICES says; 0 without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()


def cards(environ: Mapping[str, str] | None = None) -> int:
    """How many cards a task of this host will see, unless its script says otherwise."""
    return len(visible((os.environ if environ is None else environ).get(VISIBLE), present()))


def check(settings: Settings, cluster: ClusterSpec, num_cards: int) -> None:
    """Refuse before anything starts what no worker could do: soft placement replaces it, if it may."""
    check_memory(settings, cluster, num_cards)
    use = GpuUse.of(settings)
    if use.is_soft:
        return
    if use.virtual and not num_cards:
        raise UsageError("--virtual-gpus needs a card to be on, and none is visible here; leave it out.")
    count = use.count(num_cards)
    for task in cluster.workers:
        device = pinned(settings, cluster, task, count)
        if device.kind == "GPU" and (device.index or 0) >= count:
            have = f"/gpu:0 to /gpu:{count - 1}" if count else "no GPU"
            raise UsageError(
                f"{task} is to compute on {short(device)}, and there is {have} here (--no-soft-placement)."
            )


def divided(settings: Settings, cluster: ClusterSpec, num_cards: int) -> dict[Task, Device]:
    """The device of every worker; the CPU, where one was asked for that is not there."""
    count = GpuUse.of(settings).count(num_cards)
    asked = {task: pinned(settings, cluster, task, count) for task in cluster.workers}
    return {task: device if is_there(device, count) else CPU for task, device in asked.items()}


def is_there(device: Device, count: int) -> bool:
    """Whether a device is a CPU, or one of so many GPUs."""
    return device.kind != "GPU" or (device.index or 0) < count


def told(settings: Settings, cluster: ClusterSpec, num_cards: int) -> list[str]:
    """What the user reads about it; nothing where all compute on the CPU and nobody asked for more.

    >>> cluster = ClusterSpec({"ps": ["h:1"], "worker": ["h:2", "h:3"]})
    >>> told(Settings(run_id="", virtual_gpus=2), cluster, num_cards=1)
    ['Devices: worker:0 on /gpu:0 (virtual), worker:1 on /gpu:1 (virtual); 1 card is visible']
    >>> told(Settings(run_id="", worker_device="/cpu:0,/gpu:0"), cluster, num_cards=0)
    ['Devices: worker:0 on /cpu:0, worker:1 on /cpu:0 (there is no /gpu:0); no cards are visible']
    """
    if not num_cards and not settings.worker_device and not settings.virtual_gpus:
        return []
    count = GpuUse.of(settings).count(num_cards)
    parts = []
    for task, device in divided(settings, cluster, num_cards).items():
        asked = pinned(settings, cluster, task, count)
        mark = " (virtual)" if settings.virtual_gpus and device.kind == "GPU" else ""
        mark = mark if device.kind == asked.kind else f" (there is no {short(asked)})"
        parts.append(f"{task} on {short(device)}{mark}")
    seen = f"{num_cards or 'no'} card{' is' if num_cards == 1 else 's are'} visible"
    return [f"Devices: {', '.join(parts)}; {seen}"]


def short(device: Device) -> str:
    """A device as users write it: /gpu:0."""
    return f"/{str(device.kind).lower()}:{device.index or 0}"


def environ_of(task: Task, settings: Settings) -> dict[str, str]:
    """What a task finds in its environment: no GPU for a ps, unless --ps-device says so; the user's set for the others.

    >>> environ_of(Task("ps", 0), Settings(run_id="")), environ_of(Task("worker", 0), Settings(run_id=""))
    ({'CUDA_VISIBLE_DEVICES': ''}, {})
    """
    sees = any(device.kind == "GPU" for device in parse(settings.ps_device))
    return {VISIBLE: ""} if task.job == "ps" and not sees else {}
