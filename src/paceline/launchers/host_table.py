"""HOW are hosts shown? A row a host, the ways between them, and what is worth knowing.

Called by `paceline run` on several hosts and `paceline doctor`. Pure: what was seen comes in, text goes out.
"""

from paceline.launchers.diagnosis import Seen, cards_of
from paceline.launchers.links import Link
from paceline.launchers.machine import MB, Machine
from paceline.launchers.preflight import Report

HEADERS = ("host", "address", "python", "paceline", "torch", "cores", "memory", "GPUs", "/dev/shm", "clock")


def row(name: str, address: str, seen: Machine, clock: str) -> list[str]:
    """A machine in the table of hosts."""
    return [
        name,
        address,
        seen.python,
        seen.paceline,
        seen.torch or "none",
        str(seen.cores),
        f"{seen.memory_mb / 1e3:.1f} GB",
        cards_of(seen),
        "none" if seen.shm_mb is None else f"{seen.shm_mb:.0f} MB",
        clock,
    ]


def rows(report: Report) -> list[list[str]]:
    """The table of hosts, below HEADERS."""
    return [row(name, seen.address, seen.machine, clock_words(seen)) for name, seen in report.seen.items()]


def clock_words(seen: Seen) -> str:
    """How far a host's clock is ahead, and how well that is known."""
    return f"{seen.clock_s * 1e3:+.0f} ms ±{seen.clock_within_s * 1e3:.0f}"


def link_words(link: Link | str) -> str:
    """
    >>> link_words(Link(latency_ms=0.21, sent_bytes_per_s=118e6, received_bytes_per_s=117e6))
    '118 and 117 MB/s, 0.21 ms'
    """
    if isinstance(link, str):
        return link
    there, back = (
        f"{rate / MB:.{0 if rate >= 1e7 else 2}f}" for rate in (link.sent_bytes_per_s, link.received_bytes_per_s)
    )
    return f"{there} and {back} MB/s, {link.latency_ms:.2f} ms"


def lines(report: Report) -> list[str]:
    """The table of hosts, the ways between them, and what is worth knowing, for people."""
    table = [list(HEADERS), *rows(report)]
    widths = [max(len(each[column]) for each in table) for column in range(len(HEADERS))]
    told = ["  ".join(cell.ljust(width) for cell, width in zip(each, widths, strict=True)).rstrip() for each in table]
    told += [f"{a} - {b}: {link_words(link)}" for (a, b), link in report.links.items()]
    return told + [f"Note: {problem.sentence}" for problem in report.problems if not problem.is_fatal]
