"""WHAT did one task use of its machine? Looks at it, about one a second, become means and peaks.

`telemetry/meter` looks, `telemetry/summary` and the lab tell. Pure: no process, no card, no clock. Must never keep the
looks themselves: a run may last for weeks.
"""

from collections.abc import Sequence

import msgspec

MB = 1e6


class Net(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes since the host's start on its interfaces: a card that is bridged, or encapsulated, counts twice."""

    outer_sent_bytes: int = 0
    outer_received_bytes: int = 0
    loopback_bytes: int = 0

    def since(self, before: "Net") -> "Net":
        return Net(
            outer_sent_bytes=self.outer_sent_bytes - before.outer_sent_bytes,
            outer_received_bytes=self.outer_received_bytes - before.outer_received_bytes,
            loopback_bytes=self.loopback_bytes - before.loopback_bytes,
        )


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One look at one card, as nvidia-smi shows it; None: it has none (a server's card has no fan) or does not say."""

    index: int
    name: str = ""
    fan_percent: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    memory_mib: float | None = None
    memory_total_mib: float | None = None
    busy_percent: float | None = None


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """How a task stands at one moment; `cpu_s` is what it has used since its start."""

    at_s: float
    cpu_s: float
    rss_bytes: int
    net: Net | None = None
    cards: Sequence[Card] = ()


class Spread(msgspec.Struct, frozen=True):
    """Of all looks."""

    mean: float
    peak: float


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """One card, in the columns of document 000. Of the whole card: other programs that use it are in it, too."""

    index: int
    name: str = ""
    fan_percent: Spread | None = None
    temperature_c: Spread | None = None
    power_w: Spread | None = None
    power_limit_w: float | None = None
    memory_mib: Spread | None = None
    memory_total_mib: float | None = None
    busy_percent: Spread | None = None


class TaskUse(msgspec.Struct, frozen=True, kw_only=True):
    """One task, from when it began to train or to serve until its report; None where nobody could tell."""

    name: str
    cpu_cores: float | None = None  # processor seconds a second
    memory_mb: float | None = None
    peak_memory_mb: float | None = None
    gpus: list[GpuUse] = []
    net: Net | None = None  # of the task's whole host (network namespace) meanwhile
    telemetry_ms_per_s: float | None = None  # processor time that all of this takes, of cpu_cores


MEASURED = ("fan_percent", "temperature_c", "power_w", "memory_mib", "busy_percent")


class Running:
    """A mean and a peak, one value at a time."""

    def __init__(self) -> None:
        self._sum, self._count, self._peak = 0.0, 0, 0.0

    def note(self, value: float) -> None:
        self._peak = value if not self._count else max(self._peak, value)
        self._sum += value
        self._count += 1

    def spread(self) -> Spread | None:
        return Spread(round(self._sum / self._count, 2), self._peak) if self._count else None


class Usage:
    """All looks at one task."""

    def __init__(self) -> None:
        self._first: Look | None = None
        self._last: Look | None = None
        self._rss = Running()
        self._cards: dict[int, dict[str, Running]] = {}
        self._newest: dict[int, Card] = {}

    def note(self, look: Look) -> float | None:
        """Take in one look; the cores used since the one before come back.

        >>> usage = Usage()
        >>> usage.note(Look(at_s=10.0, cpu_s=3.0, rss_bytes=5)), usage.note(Look(at_s=12.0, cpu_s=4.0, rss_bytes=7))
        (None, 0.5)
        """
        before, self._last = self._last, look
        self._first = self._first or look
        self._rss.note(look.rss_bytes)
        if look.cards:  # the task's own, once it computes on one; before that all that the host has
            self._newest = {card.index: card for card in look.cards}
        for card in look.cards:
            mine = self._cards.setdefault(card.index, {name: Running() for name in MEASURED})
            for name in MEASURED:
                if (value := getattr(card, name)) is not None:
                    mine[name].note(value)
        return None if before is None else cores_between(before, look)

    def use(self, name: str, telemetry_s: float, peak_rss_bytes: int | None = None) -> TaskUse | None:
        """All of it; `peak_rss_bytes` is the system's own peak, which no look may have met. None: nobody looked."""
        first, last, rss = self._first, self._last, self._rss.spread()
        if first is None or last is None or rss is None:
            return None
        lasted_s = last.at_s - first.at_s
        return TaskUse(
            name=name,
            cpu_cores=None if lasted_s <= 0 else round(cores_between(first, last), 3),
            memory_mb=round(rss.mean / MB, 1),
            peak_memory_mb=round(max(rss.peak, peak_rss_bytes or 0) / MB, 1),
            gpus=[self._gpu(card) for _, card in sorted(self._newest.items())],
            net=None if first.net is None or last.net is None else last.net.since(first.net),
            telemetry_ms_per_s=None if lasted_s <= 0 else round(1e3 * telemetry_s / lasted_s, 3),
        )

    def _gpu(self, card: Card) -> GpuUse:
        of = self._cards[card.index]
        return GpuUse(
            index=card.index,
            name=card.name,
            fan_percent=of["fan_percent"].spread(),
            temperature_c=of["temperature_c"].spread(),
            power_w=of["power_w"].spread(),
            power_limit_w=card.power_limit_w,
            memory_mib=of["memory_mib"].spread(),
            memory_total_mib=card.memory_total_mib,
            busy_percent=of["busy_percent"].spread(),
        )


def cores_between(before: Look, after: Look) -> float:
    """Processor seconds a second; a child that ended may have taken its time along.

    >>> cores_between(Look(at_s=0.0, cpu_s=1.0, rss_bytes=0), Look(at_s=2.0, cpu_s=4.0, rss_bytes=0))
    1.5
    """
    passed_s = after.at_s - before.at_s
    return max(0.0, after.cpu_s - before.cpu_s) / passed_s if passed_s > 0 else 0.0
