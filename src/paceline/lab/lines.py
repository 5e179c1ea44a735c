"""WHAT does a result file say? The shapes in which its lines are read back.

Made by lab/reading; used by lab/comparing, lab/facts, lab/series, lab/telling and lab/report. Pure: no file, no clock.
Must never need a field that an older file does not have: a result outlives the code that wrote it.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.lab.cells import Finished
from paceline.lab.tables import Summary
from paceline.telemetry.records import Histograms

AGAIN = "A/A"  # how the title of the row begins that measures the same against the same
_SEED = re.compile(r",? ?\b(?:seed|repetition) \d+")


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Which code, on which machine, when, how much; None where an older file says nothing."""

    matrix: str
    date: str
    paceline: str
    commit: str | None = None
    is_changed: bool | None = None
    torch: str | None = None
    python: str | None = None
    system: str | None = None
    cpu: str | None = None
    cores: int | None = None
    gpus: list[str] = []
    versions: dict[str, str] = {}  # of other packages
    seeds: list[int] = []
    load: tuple[float, ...] = ()
    settings: dict[str, object] = {}


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a result knows of a ps beyond the tables."""

    index: int = 0
    staleness: Histograms = {}


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker's step goes, in milliseconds."""

    data: float | None = None
    compute: float | None = None
    exchange: float | None = None
    wait: float | None = None


class Stepped(msgspec.Struct, frozen=True, kw_only=True):
    """What a result knows of a worker beyond the tables."""

    index: int = 0
    first_epoch_s: float | None = None
    split_ms: Split | None = None


class Spread(msgspec.Struct, frozen=True):
    mean: float
    peak: float


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a card while a task used it."""

    index: int | None = None
    name: str = ""
    busy_percent: Spread | None = None
    memory_mib: Spread | None = None
    power_w: Spread | None = None


class Net(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the interfaces of a task's host while it ran."""

    outer_sent_bytes: int = 0
    outer_received_bytes: int = 0
    loopback_bytes: int = 0


class TaskUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one task used of the machine; None where nobody could tell."""

    name: str
    cpu_cores: float | None = None
    memory_mb: float | None = None
    peak_memory_mb: float | None = None
    gpus: list[Gpu] = []
    net: Net | None = None
    telemetry_ms_per_s: float | None = None


class PairBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What went between one worker and one ps."""

    worker: str
    ps: str
    lane: str = ""
    pushed_bytes: int = 0
    pulled_bytes: int = 0


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell's line says beside its Finished; empty where it was not measured."""

    tasks: list[TaskUse] = []
    pairs: list[PairBytes] = []
    workers: list[Stepped] = []
    ps: list[Part] = []
    wall_s: float | None = None

    def task(self, name: str) -> TaskUse | None:
        return next((task for task in self.tasks if task.name == name), None)


class Ticked(msgspec.Struct, frozen=True):
    """An accuracy that the chief's script logged on the way."""

    at_s: float
    updates: int
    accuracy: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run: its line of a table, how to have it again, what it left."""

    table: str
    title: str
    command: tuple[str, ...]
    line: dict[str, str]
    done: Finished
    used: Used
    ticks: list[Ticked] = []  # from its telemetry, as long as its files are there

    def flag(self, name: str, other: str = "") -> str:
        """The value that its command gives a flag.

        >>> Measured(table="", title="", command=("paceline", "run", "--mode", "sync"), line={}, done=Finished(),
        ...      used=Used()).flag("--mode", "async")
        'sync'
        """
        found = [value for word, value in zip(self.command, self.command[1:], strict=False) if word == name]
        return found[0] if found else other


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario ran once; `row`: the row that it was measured for. `us` is None when it failed."""

    repetition: int
    at: int
    scenario: str
    row: int | None = None
    us: list[float] | None = None
    parts: dict[str, float] = {}


class Line(Summary, frozen=True, kw_only=True):
    """A row side by side, with what was said of it."""

    verdict: str = ""
    scenario: str = ""
    beside: str = ""

    @property
    def is_noise(self) -> bool:
        return self.title.startswith(AGAIN)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Something that did not come to its end, and why. `table` is "" where the file does not tell it."""

    scenario: str
    cause: str
    table: str = ""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What the runs of a table say together, or what a soak found: lines for a table."""

    table: str
    lines: list[dict[str, str]]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One result file."""

    path: Path
    origins: list[Origin]  # more than one: runs that were put together in one file
    cells: list[Measured] = []
    said: list[Said] = []
    rows: list[Line] = []
    segments: list[Segment] = []
    failures: list[Failure] = []
    others: list[float] = []  # cores that other programs used
    unknown: list[str] = []  # kinds of lines that this version does not know
    has_end: bool = False
    num_cut: int = 0  # lines that were not written to their end

    @property
    def origin(self) -> Origin:
        return self.origins[0]

    @property
    def tables(self) -> list[str]:
        """Titles of the tables of whole runs, in their order."""
        named = [cell.table for cell in self.cells] + [each.table for each in self.failures if each.table]
        return list(dict.fromkeys(named))

    def of(self, table: str) -> list[Measured]:
        return [cell for cell in self.cells if cell.table == table]

    @property
    def noise(self) -> float | None:
        """Of the A/A row: how far its ratio is from 1, or how much it scatters; None without one."""
        return max((max(row.spread, abs(row.ratio - 1)) for row in self.rows if row.is_noise), default=None)


def family(title: str) -> str:
    """The title of a cell without its seed: runs that differ in nothing else.

    >>> family("1 ps + 2 workers, sync, seed 3"), family("seed 1, async")
    ('1 ps + 2 workers, sync', 'async')
    """
    return _SEED.sub("", title).strip(" ,")


def families(cells: Sequence[Measured]) -> dict[str, list[Measured]]:
    """The cells of each family, in the order in which they came."""
    found: dict[str, list[Measured]] = {}
    for cell in cells:
        found.setdefault(family(cell.title), []).append(cell)
    return found
