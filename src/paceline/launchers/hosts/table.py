"""HOW are hosts shown? What each is and has, and the ways between them.

Called by `paceline doctor`. Pure: what was seen comes in, text goes out.
"""

import math

from paceline.launchers.hosts.diagnosis import Seen
from paceline.launchers.hosts.links import Link
from paceline.launchers.hosts.machine import Gpu, Machine
from paceline.launchers.hosts.preflight import Report
from paceline.launchers.memory import MB


def facts(machine: Machine) -> dict[str, str]:
    """Everything about one machine, by name."""
    extras = ", ".join(f"{extra} ({version})" for extra, version in machine.extras.items())
    return {
        "name": machine.name,
        "system": machine.system,
        "python": f"{machine.python} ({machine.executable})",
        "paceline": machine.paceline,
        "torch": machine.torch or "not installed",
        "extras": extras or "none",
        "cores": str(machine.cores),
        "memory": f"{machine.memory_mb / 1e3:.1f} GB, {machine.free_memory_mb / 1e3:.1f} GB free",
        "GPUs": card_words(machine),
        "/dev/shm": "none" if machine.shm_mb is None else f"{machine.shm_mb:.0f} MB",
        "descriptors": "no limit" if machine.descriptors is None else f"up to {machine.descriptors} a process",
    }


def host_facts(seen: Seen) -> dict[str, str]:
    """Everything about one host, by name."""
    return {
        "ssh": seen.host.target,
        "address": seen.address,
        "tasks": f"{seen.host.slots} slot{'' if seen.host.slots == 1 else 's'} for {' and '.join(seen.host.roles)}",
        **facts(seen.machine),
        "free ports": f"{len(seen.ports)} of {seen.num_ports} asked for",
        "clock": clock_words(seen),
    }


def matrix(report: Report) -> tuple[list[str], list[list[str]]]:
    """The ways between all hosts, from the row's to the column's: headers and rows."""
    names = list(report.seen)

    def cell(a: str, b: str) -> str:
        if (there := report.links.get((a, b))) is not None:
            return there if isinstance(there, str) else way_words(there.sent_bytes_per_s, there.latency_ms)
        if (back := report.links.get((b, a))) is not None:
            return back if isinstance(back, str) else way_words(back.received_bytes_per_s, back.latency_ms)
        return "-" if a == b else "not measured"

    return ["from \\ to", *names], [[a, *(cell(a, b) for b in names)] for a in names]


def way_words(bytes_per_s: float, latency_ms: float) -> str:
    """One direction.

    >>> way_words(118e6, 0.214), way_words(1.25e6, 20.0)
    ('118 MB/s, 0.21 ms', '1.25 MB/s, 20.00 ms')
    """
    return f"{rate_words(bytes_per_s)} MB/s, {latency_ms:.2f} ms"


def rate_words(bytes_per_s: float) -> str:
    """Megabytes a second, with digits where there are few.

    >>> rate_words(118e6), rate_words(1.25e6)
    ('118', '1.25')
    """
    return f"{bytes_per_s / MB:.{0 if bytes_per_s >= 1e7 else 2}f}"


def card_words(seen: Machine) -> str:
    """The cards of a machine with their memory, and the driver."""
    cards = ", ".join(map(_card_words, seen.gpus))
    return f"{cards}; driver {seen.driver}" if cards else "none"


def _card_words(gpu: Gpu) -> str:
    """
    >>> _card_words(Gpu(name="NVIDIA H200", memory_mb=150e3, free_mb=149.1e3)), _card_words(Gpu(name="NVIDIA GB10"))
    ('NVIDIA H200 (149.1 of 150.0 GB free)', 'NVIDIA GB10')
    """
    if gpu.memory_mb is None or gpu.free_mb is None:
        return gpu.name
    return f"{gpu.name} ({gpu.free_mb / 1e3:.1f} of {gpu.memory_mb / 1e3:.1f} GB free)"


def clock_words(seen: Seen) -> str:
    """How far a host's clock is ahead, and how well that is known."""
    ahead_ms = round(seen.clock_s * 1e3)
    return f"{ahead_ms:+d} ms ±{math.ceil(seen.clock_within_s * 1e3)}"


def link_words(link: Link | str) -> str:
    """
    >>> link_words(Link(latency_ms=0.21, sent_bytes_per_s=118e6, received_bytes_per_s=117e6))
    '118 and 117 MB/s, 0.21 ms'
    """
    if isinstance(link, str):
        return link
    there, back = rate_words(link.sent_bytes_per_s), rate_words(link.received_bytes_per_s)
    return f"{there} and {back} MB/s, {link.latency_ms:.2f} ms"
