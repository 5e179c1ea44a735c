"""WHICH topologies are compared? What `--workers 1:8 --ps 1,2 --mode sync:90% --link 1Gbit/s,0.2ms` says.

Called by cli/plan and bench/plan. Pure. Every mistake is a UsageError that says what would be right.
"""

import math
import re
from collections.abc import Sequence

import msgspec

from paceline.cluster import slow
from paceline.cluster.spelling import hint
from paceline.errors import UsageError
from paceline.modes import make
from paceline.modes.spec import NAMES, ModeSpec

EVERY_COUNT = 8  # up to so many workers each number is simulated, beyond them 1, 2, 4, …
ONE_HOST_WORKERS = 16  # more are not planned for one machine, unless it is asked for
MAX_WORKERS, MAX_PS = 4096, 1024
DEFAULT_LINK = "10Gbit/s,0.1ms"
_NUMBER = re.compile(r"[0-9]{1,7}")
_SPEED = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]?)(bit|b|B|byte)(?:/s|ps)")
_DELAY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(us|µs|ms|s)")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kKMG]?i?)B?")
_UNITS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_DELAYS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


class Link(msgspec.Struct, frozen=True):
    """What joins hosts: every host has so much in each direction, shared by its transfers."""

    bytes_per_s: float
    latency_s: float

    def __str__(self) -> str:
        return f"{8 * self.bytes_per_s / 1e9:g} Gbit/s, {1e3 * self.latency_s:g} ms"


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """One cluster. `link` None: all tasks on one machine and its cores; else a host each."""

    num_workers: int
    num_ps: int
    mode: ModeSpec
    lane: str = "shm"
    link: Link | None = None
    cores: int = 2
    slow: tuple[tuple[int, float], ...] = ()  # (worker, how many times slower)

    @property
    def title(self) -> str:
        lane = f", {self.lane}" if self.link is None else ""
        slow = "".join(f", worker:{w} {f:g}x slower" for w, f in self.slow)
        return f"{self.num_ps} ps + {self.num_workers} worker{'s' * (self.num_workers > 1)}, {self.mode}{lane}{slow}"


def counts(text: str, flag: str, most: int = MAX_WORKERS) -> list[int]:
    """Numbers of tasks: 4 (up to 4, for workers), 1:8, 1,2,4.

    >>> counts("1:4", "workers"), counts("3,1", "ps"), counts("100", "workers")
    ([1, 2, 3, 4], [1, 3], [1, 2, 4, 8, 16, 32, 64, 100])
    """
    found: set[int] = set()
    for part in text.split(","):
        low, colon, high = part.strip().partition(":")
        if not _NUMBER.fullmatch(low) or (colon and not _NUMBER.fullmatch(high)):
            raise UsageError(f"--{flag} is {text!r}; use a number (8), a range (1:8) or a list (1,2,4).")
        first, last = int(low), int(high or low)
        if first < 1:
            raise UsageError(f"--{flag} is {text}; a cluster needs at least 1.")
        if last < first or last > most:
            raise UsageError(f"--{flag} is {text}; a range goes up, such as 1:8, and to {most} at most.")
        is_up_to = flag == "workers" and "," not in text and not colon
        found |= set(_sweep(1 if is_up_to else first, last))
    return sorted(found)


def _sweep(first: int, last: int) -> list[int]:
    if last - first < EVERY_COUNT:
        return list(range(first, last + 1))
    powers = [2**i for i in range(last.bit_length())]
    return [first, *(p for p in powers if first < p < last), last]


def mode_of(text: str, num_workers: int) -> ModeSpec | None:
    """The mode that a word means with so many workers; None: it makes no sense with so few.

    >>> str(mode_of("sync:75%", 8)), str(mode_of("bounded:2", 8)), mode_of("sync:3", 2)
    ('sync, 6 to aggregate', 'bounded, staleness 2', None)
    """
    name, colon, number = text.strip().partition(":")
    if name not in NAMES:
        raise UsageError(f"Unknown mode {name!r} in --mode; {hint(name, NAMES)}.")
    if not colon:
        return ModeSpec(name=name)
    is_share = number.endswith("%") and name == "sync"
    if not _NUMBER.fullmatch(number.removesuffix("%") if is_share else number) or name == "async":
        raise UsageError(
            f"--mode {text!r}: a number stands after sync (K gradients a round, or a share: sync:90%), bounded "
            "(steps ahead) or local (steps between pushes)."
        )
    value = int(number.removesuffix("%"))
    if name == "bounded":
        return ModeSpec(name=name, staleness=value)
    if name == "local":
        spec = ModeSpec(name=name, local_steps=value)
        make(spec, num_workers)
        return spec
    wanted = max(1, math.ceil(value * num_workers / 100)) if is_share else value
    spec = ModeSpec(name=name, replicas_to_aggregate=wanted)
    if wanted > num_workers:
        if is_share:
            raise UsageError(f"--mode {text!r}: a share of the workers is at most 100%.")
        return None
    make(spec, num_workers)
    return spec


def check_modes(modes: Sequence[str], most_workers: int) -> None:
    """A mode that none of the clusters can have is a mistake; where only small ones cannot, it is left out there."""
    for text in modes:
        if mode_of(text, most_workers) is None:
            least = text.partition(":")[2]
            raise UsageError(f"--mode {text} needs at least {least} workers, and --workers has {most_workers} at most.")


def parse_slow(text: str, most_workers: int) -> tuple[tuple[int, float], ...]:
    """(worker, how many times slower), which the largest cluster must have.

    >>> parse_slow("worker:1=4x", 2), parse_slow("", 2)
    (((1, 4.0),), ())
    """
    slowed = slow.parse(text)
    for task in slowed:
        if task.job != "worker" or task.index >= most_workers:
            names = "worker:0" if most_workers == 1 else f"worker:0 to worker:{most_workers - 1}"
            raise UsageError(f"--slow names {task}, which is no worker of these clusters; theirs are {names}.")
    return tuple(sorted((task.index, factor) for task, factor in slowed.items()))


def parse_link(text: str) -> Link | None:
    """None: `here`, one machine.

    >>> str(parse_link("1Gbit/s,0.2ms")), str(parse_link("100MB/s")), parse_link("here")
    ('1 Gbit/s, 0.2 ms', '0.8 Gbit/s, 0.1 ms', None)
    """
    if text.strip() == "here":
        return None
    speed, comma, delay = text.partition(",")
    found, waits = _SPEED.fullmatch(speed.strip()), _DELAY.fullmatch(delay.strip() if comma else "0.1ms")
    if found is None or waits is None or float(found[1]) <= 0:
        raise UsageError(f"--link is {text!r}; write a speed and a latency (1Gbit/s,0.2ms or 100MB/s), or here.")
    per_unit = _UNITS[found[2]] / (8 if found[3] in ("bit", "b") else 1)
    return Link(float(found[1]) * per_unit, float(waits[1]) * _DELAYS[waits[2]])


def parse_size(text: str) -> int:
    """
    >>> parse_size("40MB"), parse_size("1.5GiB")
    (40000000, 1610612736)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--bytes is {text!r}; write the parameters' size such as 40MB.")
    unit = found[2]
    factor = 1024.0 ** ("kmg".index(unit[0].lower()) + 1) if unit.endswith("i") and unit != "i" else _UNITS[unit[:1]]
    return round(float(found[1]) * factor)


def parse_price(text: str) -> tuple[float, float] | None:
    """(a worker's, a ps') price an hour: one number for both, or worker=0.5,ps=0.1.

    >>> parse_price("0.4"), parse_price("worker=3,ps=0.5"), parse_price("")
    ((0.4, 0.4), (3.0, 0.5), None)
    """
    if not text.strip():
        return None
    try:
        if "=" not in text:
            both = float(text)
            worker = ps = both
        else:
            named = dict(part.strip().split("=") for part in text.split(","))
            worker, ps = float(named.pop("worker")), float(named.pop("ps"))
            if named:
                raise ValueError
        if not (math.isfinite(worker + ps) and worker >= 0 and ps >= 0):
            raise ValueError
    except (ValueError, KeyError):
        raise UsageError(f"--price is {text!r}; write it as 0.4 or worker=3,ps=0.5 (of a host, an hour).") from None
    return worker, ps
