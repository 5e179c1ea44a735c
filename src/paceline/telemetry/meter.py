"""HOW BUSY is this very process? Its processor time, memory, cards and its host's interfaces, looked at from inside.

Called about once a second by worker/reporting and launchers/ticks, in a thread that trains nothing. Must never raise,
nor look at any process but this one and those that it has started: looking costs what training wants.
"""

import os
import sys
import time
from pathlib import Path

import psutil

from paceline.telemetry.cards import Cards
from paceline.telemetry.usage import Look, Net, TaskUse, Usage

LOOPBACK = ("lo", "lo0")
CHILDREN = "/proc/{pid}/task/{pid}/children"


class Meter:
    """One task's. Cards are asked only where the task `is_on_card`."""

    def __init__(self, task: str, is_on_card: bool = False) -> None:
        self._task = task
        self._usage = Usage()
        self._cards = Cards() if is_on_card else None
        self._process = psutil.Process()
        self.cores: float | None = None  # between the last two looks
        self.rss_bytes = 0

    def look(self) -> None:
        """Now."""
        try:
            cpu_s, rss_bytes = self._used()
            cards = self._cards.look() if self._cards is not None else ()
            look = Look(at_s=time.monotonic(), cpu_s=cpu_s, rss_bytes=rss_bytes, net=host_net(), cards=cards)
        except (OSError, psutil.Error):
            return  # a system that does not say
        self.cores, self.rss_bytes = self._usage.note(look), rss_bytes

    def told(self) -> dict[str, object]:
        """What the last look saw, for a record."""
        cores = None if self.cores is None else round(self.cores, 3)
        return {"cores": cores, "rss_bytes": self.rss_bytes}

    def use(self, telemetry_s: float) -> TaskUse | None:
        """From the first look to a last one, now; `telemetry_s` is the processor time of telemetry's own threads."""
        self.look()
        return self._usage.use(self._task, telemetry_s, peak_rss_bytes())

    def _used(self) -> tuple[float, int]:
        """Processor seconds since the start, and memory: of this process, and of those that its main thread started
        (a DataLoader's); what those that have ended used is in the system's own sum."""
        times = os.times()
        cpu_s, rss_bytes = times.user + times.system + times.children_user + times.children_system, 0
        rss_bytes += self._process.memory_info().rss
        for pid in _children():
            try:
                child = psutil.Process(pid)
                used = child.cpu_times()
                cpu_s, rss_bytes = cpu_s + used.user + used.system, rss_bytes + child.memory_info().rss
            except psutil.Error:
                continue  # it has just ended
        return cpu_s, rss_bytes


def _children() -> list[int]:
    """Of the main thread, from the one file that lists them: a search through all processes would cost too much."""
    try:
        return [int(pid) for pid in Path(CHILDREN.format(pid=os.getpid())).read_text(encoding="utf-8").split()]
    except OSError:
        return []


def host_net() -> Net | None:
    """The interfaces of this host, or of this network namespace; None where the system does not say."""
    try:
        cards = psutil.net_io_counters(pernic=True)
    except (OSError, RuntimeError):
        return None
    outer = [counts for name, counts in cards.items() if name not in LOOPBACK]
    return Net(
        outer_sent_bytes=sum(counts.bytes_sent for counts in outer),
        outer_received_bytes=sum(counts.bytes_recv for counts in outer),
        loopback_bytes=sum(counts.bytes_sent for name, counts in cards.items() if name in LOOPBACK),
    )


def peak_rss_bytes() -> int | None:
    """The most that this process has had in memory at once, as Linux kept it."""
    if sys.platform != "linux":
        return None
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else None
