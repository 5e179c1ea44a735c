"""HOW are a host's cards divided over the tasks that are started here? What each worker gets, told beforehand.

Called by launchers/local and hosts/many, here and there by launchers/here. cluster/pinning decides; in a worker
frameworks/torch/devices makes it true. Must never start CUDA, nor import torch: whoever has asked the driver cannot
fork tasks that use it.
"""

import functools
import os
from collections.abc import Mapping, Sequence

from paceline.cluster.devices import Device
from paceline.cluster.pinning import CPU, VISIBLE, GpuUse, Hardware, check_memory, parse, pinned, visible
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


def models() -> list[str]:
    """What the driver calls each card; nothing without a driver."""
    import pynvml

    if not present():
        return []
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(present())]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def cards(environ: Mapping[str, str] | None = None) -> int:
    """How many cards a task of this host will see, unless its script says otherwise."""
    return len(visible((os.environ if environ is None else environ).get(VISIBLE), present()))


def check(settings: Settings, cluster: ClusterSpec, num_cards: int, workers: Sequence[Task] | None = None) -> None:
    """Refuse before anything starts what no worker could do: soft placement replaces it, if it may. `workers`: those of
    the host with these cards; all of them where nothing is said."""
    check_memory(settings, cluster, num_cards, workers)
    use = GpuUse.of(settings)
    if use.is_soft:
        return
    if use.virtual and not num_cards:
        raise UsageError("--virtual-gpus needs a card to be on, and none is visible here; leave it out.")
    there = Hardware(num_cards, use)
    for task in cluster.workers if workers is None else workers:
        device = pinned(settings, cluster, task, there.count)
        if not there.has(device):
            have = f"/gpu:0 to /gpu:{there.count - 1}" if there.count else "no GPU"
            raise UsageError(
                f"{task} is to compute on {Hardware().name(device)}, and there is {have} here (--no-soft-placement)."
            )


def divided(settings: Settings, cluster: ClusterSpec, num_cards: int) -> dict[Task, Device]:
    """The device of every worker; the CPU, where one was asked for that is not there."""
    there = Hardware(num_cards, GpuUse.of(settings))
    asked = {task: pinned(settings, cluster, task, there.count) for task in cluster.workers}
    return {task: device if there.has(device) else CPU for task, device in asked.items()}


def names(settings: Settings, cluster: ClusterSpec, num_cards: int) -> dict[Task, str]:
    """Every task's device in canonical form, virtual ones marked: a ps computes on the CPU.

    >>> cluster = ClusterSpec({"ps": ["h:1"], "worker": ["h:2"]})
    >>> list(names(Settings(run_id="", virtual_gpus=2), cluster, num_cards=1).values())
    ['/job:ps/replica:0/task:0/device:CPU:0', '/job:worker/replica:0/task:0/device:GPU:0 (virtual)']
    """
    there = Hardware(num_cards, GpuUse.of(settings))
    devices = {**dict.fromkeys(cluster.ps, CPU), **divided(settings, cluster, num_cards)}
    return {task: f"{device.filled(task)}{there.mark(device)}" for task, device in devices.items()}


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
    there = Hardware(num_cards, GpuUse.of(settings))
    parts = []
    for task, device in divided(settings, cluster, num_cards).items():
        asked = pinned(settings, cluster, task, there.count)
        lacking = "" if device.kind == asked.kind else f" (there is no {Hardware().name(asked)})"
        parts.append(f"{task} on {there.name(device)}{lacking}")
    seen = f"{num_cards or 'no'} card{' is' if num_cards == 1 else 's are'} visible"
    return [f"Devices: {', '.join(parts)}; {seen}"]


def environ_of(task: Task, settings: Settings) -> dict[str, str]:
    """What a task finds in its environment: no GPU for a ps, unless --ps-device says so; the user's set for the others.

    >>> environ_of(Task("ps", 0), Settings(run_id="")), environ_of(Task("worker", 0), Settings(run_id=""))
    ({'CUDA_VISIBLE_DEVICES': ''}, {})
    """
    sees = any(device.kind == "GPU" for device in parse(settings.ps_device, "ps"))
    return {VISIBLE: ""} if task.job == "ps" and not sees else {}
