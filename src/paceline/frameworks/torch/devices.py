"""Find a device of this process by TensorFlow's name, in torch's words: `/gpu:1` is `cuda:1`, or the CPU without one.

Called by worker/session for the worker's own device, by towers, placed modules and ops for theirs. Nothing here starts
CUDA by itself: what must hold on a card (which one is current, how much of its memory) is told to torch for later.
Must never run in the nursery or the launcher: a process that has asked the driver cannot fork tasks that use it.
"""

from collections.abc import Callable, Sequence

import msgspec
import torch

from paceline.cluster.devices import Device
from paceline.cluster.discovery import Assignment
from paceline.cluster.pinning import CPU, GpuUse, Hardware, card, check_share, pinned, sharing
from paceline.cluster.spec import Task
from paceline.errors import UsageError

CHUNK_BYTES = 2 << 20  # what torch takes memory from the driver in
ROOM = 0.98  # of the share that is taken at once; torch keeps small tensors elsewhere


_said: set[str] = set()
_configured: list[GpuUse] = []
_serving: list[int] = []  # how many tasks of this host serve ops, if this one does


def configure(use: GpuUse) -> None:
    """Set how this process may use GPUs from now on."""
    _configured[:] = [use]


def here() -> Hardware:
    """Return the GPUs of this process now. torch counts them without starting CUDA, and reads CUDA_VISIBLE_DEVICES anew
    until CUDA has started, so that what a script writes into os.environ counts."""
    return Hardware(torch.cuda.device_count(), _configured[0] if _configured else GpuUse())


def torch_device(
    device: Device | str, hardware: Hardware | None = None, say: Callable[[str], None] | None = None
) -> torch.device:
    """Return torch's name of a device of this process; its job and task are not looked at.

    >>> torch_device("/cpu:0")
    device(type='cpu')
    >>> torch_device("/gpu:1", Hardware(real=1, use=GpuUse(virtual=2)))
    device(type='cuda', index=0)
    """
    asked = Device.parse(device) if isinstance(device, str) else device
    there = here() if hardware is None else hardware
    if asked.kind == "GPU" and there.has(asked):
        return torch.device("cuda", card(asked, there.real) or 0)
    if asked.kind == "GPU":
        _replace_by_cpu(missing(asked, there), there, say)
    return torch.device("cpu")


def _replace_by_cpu(why: str, hardware: Hardware, say: Callable[[str], None] | None) -> None:
    if not hardware.use.is_soft:
        raise UsageError(f"{why}; name one that is there, or let it be replaced (--soft-placement).")
    say_once(f"{why}: the CPU is used instead (--no-soft-placement refuses)", say)


def missing(device: Device, hardware: Hardware) -> str:
    """Say what is not there, and what is.

    >>> missing(Device.parse("/gpu:2"), Hardware(real=1))
    'There is no /gpu:2 here (there is: /gpu:0)'
    """
    have = f"there is: {', '.join(hardware.names)}" if hardware.count else "there is no GPU that torch can use"
    return f"There is no {Hardware().name(device)} here ({have})"


def say_once(text: str, say: Callable[[str], None] | None = None) -> None:
    """Print a sentence once in a process."""
    if text not in _said:
        _said.add(text)
        (say or _print)(text)


def _print(text: str) -> None:
    print(text, flush=True)


class Pin(msgspec.Struct, frozen=True):
    """The device that is a worker's own: TensorFlow's name of it, torch's, and how tables show it."""

    device: Device
    torch_device: torch.device
    name: str

    def name_of(self, used: torch.device) -> str:
        """Return what tables show for the device that the script's parameters are on, which may be another one."""
        if used == self.torch_device or (used.type == "cuda" == self.torch_device.type and used.index is None):
            return self.name
        kind = "GPU" if used.type == "cuda" else "CPU"
        return here().name(Device(kind=kind, index=used.index or 0)) if used.type in ("cpu", "cuda") else str(used)


def pin(
    assignment: Assignment | None, say: Callable[[str], None], asked: str | None = None, real: int | None = None
) -> Pin:
    """Find the worker's own device, and let torch know what holds on it once CUDA starts.

    `asked` is CUDA_VISIBLE_DEVICES as this process has it: cards that are named there are asked for.
    """
    if assignment is not None:
        configure(GpuUse.of(assignment.settings))
    there = here() if real is None else Hardware(real, here().use)
    if assignment is None or not assignment.cluster.workers:
        wanted, tasks = (Device(kind="GPU", index=0) if there.count else CPU), 1
    else:
        settings, cluster, task = assignment.settings, assignment.cluster, assignment.task
        wanted = pinned(settings, cluster, task, there.count)
        tasks = sharing(settings, cluster, task, there.count, there.real)
    names_cards = asked is not None and asked.strip() not in ("", "-1")
    if names_cards and not there.count and not (assignment and assignment.settings.worker_device):
        _replace_by_cpu(f"CUDA_VISIBLE_DEVICES={asked} names no GPU that torch can use here", there, say)
    found = torch_device(wanted, there, say)
    own = wanted if found.type == "cuda" else CPU
    if found.type == "cuda":
        at_first_use([found], there.use, tasks, say, current=found)
    return Pin(own, found, there.name(own))


def serve_all(use: GpuUse, say: Callable[[str], None], tasks: int | None = None) -> None:
    """Set how a process that runs ops on all its cards uses them. `tasks` of this host do so, each with its share;
    None: as many as were told last, or this one alone."""
    _serving[:] = [tasks] if tasks is not None else _serving
    num = _serving[0] if _serving else 1
    configure(use)
    if here().real:
        check_share(use, num)
    at_first_use([torch.device("cuda", index) for index in range(here().real)], use, num, say)


def at_first_use(
    devices: Sequence[torch.device],
    use: GpuUse,
    sharing: int,
    say: Callable[[str], None],
    current: torch.device | None = None,
) -> None:
    """Limit the memory of these cards when CUDA starts, or now if it has; plain "cuda" means `current` then."""

    def begin() -> None:
        share = use.share(sharing)
        for device in devices if share is not None else ():
            torch.cuda.set_per_process_memory_fraction(share, device)
            if not use.allow_growth:
                take(device, share or 0.0, say)
        if current is not None:
            torch.cuda.set_device(current)

    if devices:  # the one place of torch that keeps a call until CUDA starts; manual_seed is kept in the same way
        torch.cuda._lazy_call(begin)  # type: ignore[no-untyped-call]


def take(device: torch.device, share: float, say: Callable[[str], None]) -> None:
    """Take this share of the card's memory at once; torch keeps it, and hands it out."""
    total = torch.cuda.get_device_properties(device).total_memory
    size = int(total * share * ROOM) // CHUNK_BYTES * CHUNK_BYTES
    try:
        torch.empty(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        say_once(
            f"{size / 2**30:.1f} GiB of {device} were to be taken at once (--no-allow-growth), and are not free: "
            "memory grows as it is needed instead",
            say,
        )


def mapping_lines(task: Task, hardware: Hardware | None = None) -> list[str]:
    """Return the lines `Device mapping:` of --log-device-placement. Asking for names starts CUDA, if there is a card.

    >>> mapping_lines(Task("localhost", 0), Hardware(real=0))
    ['Device mapping: no known devices.']
    """
    there = here() if hardware is None else hardware
    if not there.count:
        return ["Device mapping: no known devices."]
    told = ["Device mapping:"]
    for index in range(there.count):
        device = Device(kind="GPU", index=index)
        number = card(device, there.real) or 0
        told.append(f"{device.filled(task)} -> device: {number}, {card_text(number)}{there.mark(device)}")
    return told


def card_text(number: int) -> str:
    """Return a card's name and where it is plugged in, as TensorFlow's log has it."""
    about = torch.cuda.get_device_properties(number)
    where = [getattr(about, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in where:
        return f"name: {about.name}"
    domain, bus, slot = where
    return f"name: {about.name}, pci bus id: {domain:04x}:{bus:02x}:{slot:02x}.0"
