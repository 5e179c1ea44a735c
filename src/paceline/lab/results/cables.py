"""HOW FULL was a cable between hosts? The bytes that crossed it, of what its limited rate lets through.

Called by lab/results/facts. Pure. Must never take a rate for known that a run was not given.
"""

import re
from collections.abc import Sequence

import msgspec

from paceline.lab.results.lines import Measured
from paceline.lab.scripts.crossed import OURS, Crossed
from paceline.telemetry.records import PairBytes

_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_TIMES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


class Cable(msgspec.Struct, frozen=True, kw_only=True):
    """One whose rate is known."""

    rate: str  # as it was asked for: 10 Mbit/s
    share: float  # of the time in which it carried something, if it carried as fast as it can
    behind: tuple[str, ...] = ()  # the tasks whose way to the others it is; empty: nobody said


def cable(cell: Measured, trained_s: float | None) -> Cable | None:
    """The cable of the last host (`--rate`), or the one that pushes were measured on (`--limit-mbit`)."""
    rate = cell.flag("--rate")
    bits_per_s = bits_of(rate)
    if bits_per_s and trained_s:
        behind = tuple(cell.flag("--hosts").split("/")[-1].split(","))
        crossing = [pair for pair in cell.pairs if (pair.worker in behind) != (pair.ps in behind)]
        share = busy_s(crossing, bits_per_s) / trained_s
        return Cable(rate=shown(rate), share=min(1.0, share), behind=behind) if crossing else None
    limit = cell.flag("--limit-mbit")
    used = _used(cell) if limit else None
    return None if used is None else Cable(rate=f"{limit} Mbit/s", share=min(1.0, used))


def bits_of(rate: str) -> float | None:
    """As tc writes it.

    >>> bits_of("10mbit"), bits_of("1.5gbit"), bits_of("")
    (10000000.0, 1500000000.0, None)
    """
    found = _RATE.fullmatch(rate)
    return float(found[1]) * _TIMES[found[2]] if found else None


def shown(rate: str) -> str:
    """
    >>> shown("10mbit"), shown("800kbit")
    ('10 Mbit/s', '800 kbit/s')
    """
    found = _RATE.fullmatch(rate)
    return f"{found[1]} {found[2].upper() if found[2] != 'k' else 'k'}bit/s" if found else rate


def busy_s(crossing: Sequence[PairBytes], bits_per_s: float) -> float:
    """How long the bytes need: a pair pushes and then pulls, so that its ways follow each other; those of several pairs
    share each way.

    >>> pair = PairBytes(worker="worker:2", ps="ps:0", lane="tcp", pushed_bytes=1_000_000, pulled_bytes=1_000_000)
    >>> busy_s([pair], 8e6), busy_s([pair, pair, pair], 8e6)
    (2.0, 3.0)
    """
    pairs = [pair.pushed_bytes + pair.pulled_bytes for pair in crossing]
    ways = [sum(pair.pushed_bytes for pair in crossing), sum(pair.pulled_bytes for pair in crossing)]
    return 8 * max([*pairs, *ways], default=0) / bits_per_s


def _used(cell: Measured) -> float | None:
    try:
        return msgspec.json.decode(cell.told, type=Crossed).used_share(OURS)
    except msgspec.MsgspecError:
        return None
