"""WHAT is measured beside what, and in which order? Scenarios, the rows of a table, and the plan of a repetition.

Used by every matrix, by lab/run and lab/measuring/repetitions. Pure: no process, no clock; chance comes in as a seed.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum

import msgspec

from paceline.cluster.settings import Settings
from paceline.lab.cells import Cell, Table

SMALL_BYTES = 1 << 20  # a load up to this size takes no longer than a step
FIRST = ", repetition 1"  # how the title of a cell ends that is repeated
KERAS = "keras"  # what is trained: document 000's recipe in Keras, without torch


class Kind(Enum):
    """How a scenario's processes are started."""

    SINGLE = "single"  # PyTorch alone; several workers are as many single processes at the same time
    CLUSTER = "cluster"  # ps and workers through the package's own entry
    PEER = "peer"  # another system: bench/peers/<what>.py, one process a worker, and one a ps
    DRIVER = "driver"  # another system that starts its own ps and workers: bench/peers/<what>.py, one process
    START = "start"  # a step is a whole start: lab/scripts/start_script does <what>
    TOWERS = "towers"  # one process with so many towers
    IN_GRAPH = "in-graph"  # workers that only join, and a client that feeds them and is timed
    CARRIER = "carrier"  # bytes there and back; <what> is memcpy, socket or ps


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that can be told to run so many steps."""

    name: str
    kind: Kind
    num_ps: int = 0
    num_workers: int = 1
    settings: Settings = Settings(run_id="", lane="auto")
    what: str = ""  # the peer, the carrier, or what is trained
    without: tuple[str, ...] = ()  # parts of safety that are taken out: lab/scripts/bare has them
    load_bytes: int | None = None  # of a carrier; None: as the amounts say
    batch: int | None = None  # samples for each worker in a step; None: as the recipe says
    straggler: int | None = None  # this worker is slow: it runs along while the others are measured
    is_stopped_between: bool = False  # by a signal, while others are measured: idle, it would use the processor


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the table: a scenario, and the one that is measured right before and right after it."""

    title: str
    scenario: str
    beside: str
    bar: float | None = None  # the ratio must not be above it (plus the spread of the A/A row)
    aim: float | None = None
    is_noise: bool = False  # the A/A row: the same against the same
    group: int = 0  # measured when the processes of the groups before it are gone


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    reps: int = 7
    steps: int = 300
    warmup_steps: int = 50  # once, after the start; what a segment warms up comes on top
    carrier_bytes: int = 40_000_000
    seed: int = 0

    def of(self, kind: Kind, load_bytes: int | None = None) -> tuple[int, int]:
        """(untimed, timed) steps of a segment; a step of a carrier is the whole load there and back, and a small load
        goes as often as a step.

        >>> Amounts(steps=300).of(Kind.SINGLE), Amounts(steps=300).of(Kind.CARRIER)
        ((30, 300), (2, 20))
        """
        if kind is Kind.CARRIER and (load_bytes or self.carrier_bytes) > SMALL_BYTES:
            return 2, max(3, self.steps // 15)
        if kind is Kind.START:
            return 0, 1
        return max(10, self.steps // 10), self.steps

    def warm_up(self, kind: Kind) -> int:
        """How many steps a scenario does first of all."""
        return {Kind.CARRIER: 3, Kind.START: 1}.get(kind, self.warmup_steps)


class Pair(msgspec.Struct, frozen=True):
    """One repetition of a row: its time, and the mean of what ran before and after."""

    row: int
    us: float
    beside_us: float

    @property
    def ratio(self) -> float:
        return self.us / self.beside_us


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What all rows gave."""

    pairs: Mapping[str, Sequence[Pair]]  # by the row's title; none for a row that failed
    others: Mapping[int, float]  # by group: cores that other programs used meanwhile


class RowVerdicts(msgspec.Struct, frozen=True, kw_only=True):
    """What rows say together: another table, made when the last of them was measured."""

    title: str
    columns: tuple[str, ...]
    lines: Callable[[Measured], list[tuple[str, ...]]]  # each as long as the columns and the remark
    note: str = ""


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """What one name measures: tables of whole runs, then one table of scenarios side by side; each may be missing."""

    name: str
    tables: tuple[Table, ...] = ()
    title: str = ""  # of the table of rows
    scenarios: tuple[Scenario, ...] = ()
    rows: tuple[Row, ...] = ()
    amounts: Amounts = Amounts()
    verdicts: tuple[RowVerdicts, ...] = ()  # of the rows
    usual_step_us: float = 1000.0  # of a scenario, on two quiet cores: the guess before anything was measured

    @property
    def titles(self) -> list[str]:
        """Everything that --only may name."""
        return [cell.title for table in self.tables for cell in table.cells] + [row.title for row in self.rows]


def groups(rows: Sequence[Row]) -> list[int]:
    """In the order in which they are measured."""
    return sorted({row.group for row in rows})


def of_group(matrix: Matrix, group: int) -> list[Scenario]:
    """What must run for the rows of a group."""
    needed = {name for row in matrix.rows if row.group == group for name in (row.scenario, row.beside)}
    return [each for each in matrix.scenarios if each.name in needed]


def only(matrix: Matrix, text: str) -> Matrix:
    """The whole runs and the rows whose title has `text` in it; with rows also the A/A row and what they need."""
    rows = tuple(row for row in matrix.rows if row.is_noise or text.lower() in row.title.lower())
    if all(row.is_noise and text.lower() not in row.title.lower() for row in rows):
        rows = ()
    needed = {name for row in rows for name in (row.scenario, row.beside)}
    scenarios = tuple(each for each in matrix.scenarios if each.name in needed)
    tables = tuple(few for few in (table.only(text) for table in matrix.tables) if few.cells)
    return msgspec.structs.replace(matrix, tables=tables, scenarios=scenarios, rows=rows)


def repeated(cells: Sequence[Cell], reps: int, name: str) -> tuple[Cell, ...]:
    """Whole runs interleaved: every cell once in each repetition, in an order of its own. Of cells that are repeated
    already the first repetition counts."""
    once = [
        msgspec.structs.replace(cell, title=cell.title.removesuffix(FIRST)) for cell in cells if not cell.repetition
    ]
    made: list[Cell] = []
    for repetition in range(reps):
        if reps > 1:  # one alone is in the order of its table
            random.Random(f"{name}-{repetition}").shuffle(once)
        titles = [f"{cell.title}, repetition {repetition + 1}" for cell in once]
        both = zip(once, titles, strict=True)
        made += [msgspec.structs.replace(cell, title=title, repetition=repetition) for cell, title in both]
    return tuple(made)


class Segment(msgspec.Struct, frozen=True):
    """One scenario runs once. `row` is the row it is measured for; None: it runs beside one."""

    scenario: str
    row: int | None = None
    group: int = 0


def plan(rows: Sequence[Row], repetition: int, seed: int, group: int = 0) -> list[Segment]:
    """The segments of one repetition of a group, rows in an order of its own.

    INVARIANT: right before and right after a row's segment runs what it is compared with. Neighbours that are
    compared with the same scenario share the segment between them.

    >>> aa = Row(title="A/A", scenario="b", beside="a")
    >>> [s.scenario for s in plan([aa, aa], 0, 0)]
    ['a', 'b', 'a', 'b', 'a']
    """
    order = [index for index, row in enumerate(rows) if row.group == group]
    random.Random(f"{seed}-{repetition}").shuffle(order)
    segments: list[Segment] = []
    for index in order:
        row = rows[index]
        if not segments or segments[-1].scenario != row.beside:
            segments.append(Segment(row.beside, None, group))
        segments += [Segment(row.scenario, index, group), Segment(row.beside, None, group)]
    return segments


def pairs(segments: Sequence[Segment], times_us: Sequence[float | None]) -> list[Pair]:
    """Every row's time with that beside it; a row of which any part failed is left out.

    >>> pairs([Segment("a"), Segment("b", 0), Segment("a")], [1.0, 3.0, 2.0])[0].ratio
    2.0
    """
    found = []
    for at, segment in enumerate(segments):
        if segment.row is None:
            continue
        before, mine, after = times_us[at - 1], times_us[at], times_us[at + 1]
        if before is not None and mine is not None and after is not None:
            found.append(Pair(segment.row, mine, (before + after) / 2))
    return found


def seconds_left(remaining: Iterable[Segment], last_s: Mapping[str, float]) -> float:
    """How long the segments that remain will take, if each takes as long as its scenario's last one.

    >>> seconds_left([Segment("a"), Segment("b"), Segment("new")], {"a": 1.0, "b": 2.0})
    3.0
    """
    return sum(last_s.get(segment.scenario, 0.0) for segment in remaining)
