"""WHAT does a result file say? The shapes in which its lines are read back.

Written by lab/results/result; made by lab/results/reading for whoever tells a result, by lab/results/kept for a run
that goes on. Pure. Must never need a field that an older file does not have: a result outlives the code that wrote it.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.lab.cells import Finished
from paceline.lab.tables import Summary
from paceline.telemetry.usage import TaskUse

NAME = "results.jsonl"
AGAIN = "A/A"  # how the title of a row that measures the same against the same begins, in an older file
_SEED = re.compile(r",? ?\b(?:seed|repetition) \d+")


class Kind(msgspec.Struct, frozen=True):
    """As much of any line as says what it is."""

    kind: str


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
    plan: str = ""  # a hash of the request; an older file has neither it nor a line for its end


class Ticked(msgspec.Struct, frozen=True):
    """An accuracy that the chief's script logged on the way."""

    at_s: float
    updates: int
    accuracy: float


class Measured(Finished, frozen=True, kw_only=True):
    """A whole run: its line of a table, how to have it again, what it left."""

    table: str
    title: str
    labels: tuple[str, ...] = ()
    command: tuple[str, ...]
    line: dict[str, str]
    seed: int | None = None
    repetition: int | None = None
    seconds: float = 0.0  # that all of it took, as the lab saw it
    num_ps: int = 0
    num_workers: int = 0
    settings: dict[str, object] = msgspec.field(default_factory=dict)
    own: dict[str, str] = msgspec.field(default_factory=dict)  # the program's own axes
    run: str = ""  # the name of the folder that it left
    ticks: list[Ticked] = msgspec.field(default_factory=list)  # no line has them: from its telemetry, while it is there

    def flag(self, name: str, other: str = "") -> str:
        """The value that its command gives a flag.

        >>> Measured(table="", title="", command=("paceline", "run", "--mode", "sync"), line={}).flag("--mode", "async")
        'sync'
        """
        found = [value for word, value in zip(self.command, self.command[1:], strict=False) if word == name]
        return found[0] if found else other

    @property
    def slow(self) -> str:
        """Which tasks sleep on purpose, as --slow says it; an older file has it in the command alone."""
        return str(self.settings.get("slow") or self.flag("--slow"))

    def task(self, name: str) -> TaskUse | None:
        """What one task used; None: nobody looked."""
        return next((task for task in self.tasks if task.name == name), None)


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario ran once; `row`: the row that it was measured for. `us` is None when it failed."""

    repetition: int
    at: int
    scenario: str
    row: int | None = None
    group: int = 0
    us: list[float] | None = None
    along_us: list[float] = []
    parts: dict[str, float] = {}


class Line(Summary, frozen=True, kw_only=True):
    """A row side by side, with what was said of it; an older file does not say what was compared."""

    verdict: str = ""
    scenario: str = ""
    beside: str = ""
    is_noise: bool = False


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Something that did not come to its end, and why. `table`: of a whole run; None in an older file."""

    scenario: str
    cause: str
    table: str | None = None


class Others(msgspec.Struct, frozen=True, kw_only=True):
    """Cores that other programs used, meanwhile: of the whole runs, or of a group of the rows."""

    cores: float
    of: str = "runs"
    group: int = 0


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What the runs of a table say together, or what a soak found: lines for a table."""

    table: str
    lines: list[dict[str, str]]
    kind: str = "verdicts"


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
    def is_unfinished(self) -> bool:
        """It was interrupted, or it still runs; of an older file nobody knows."""
        return not self.has_end and any(origin.plan for origin in self.origins)

    @property
    def noise(self) -> float | None:
        """Of the A/A row: how far its ratio is from 1, or how much it scatters; None without one."""
        rows = [(row.ratio, row.spread) for row in self.rows if row.is_noise]
        rows += [pair for said in self.said for line in said.lines if (pair := _again(line)) is not None]
        return max((max(spread, abs(ratio - 1)) for ratio, spread in rows), default=None)


def _again(line: dict[str, str]) -> tuple[float, float] | None:
    """The ratio and the spread of an A/A line that whole runs say together.

    >>> _again({"configuration": "A/A: sync", "ratio": "0.702", "spread": "0.332"}), _again({"configuration": "A/A: x"})
    ((0.702, 0.332), None)
    """
    try:
        is_again = line["configuration"].startswith(AGAIN)
        return (float(line["ratio"]), float(line["spread"])) if is_again else None
    except (KeyError, ValueError):
        return None


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
