"""WHAT is one whole run of the lab? A cell: its flags and its script; and the table that its line belongs to.

Used by the matrices, carried out by lab/whole_runs. Pure: no process, no file, no clock.
"""

from collections.abc import Callable, Sequence

import msgspec

from paceline.cluster.settings import Settings
from paceline.cluster.slow import parse
from paceline.telemetry.records import PairBytes, SplitMs, StepMs
from paceline.telemetry.usage import TaskUse

NONE = "-"
REMARK = "remark"
NOT_BROKEN = ("missing: ", "skipped: ")  # how the cause of a failure begins that is nobody's fault


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One whole run, from the first process to summary.json."""

    title: str  # no other cell of the matrix has it
    labels: tuple[str, ...]  # the first columns of its line
    program: tuple[str, ...]  # the module that trains, and its arguments
    num_workers: int
    settings: Settings
    num_ps: int = 1  # 0: no cluster; the program is one process, and is told where to leave what it tells
    limit_s: float = 120.0  # then it is ended, and has failed
    needs_bytes: int = 0  # with less memory free it is skipped

    @property
    def slowed(self) -> set[int]:
        """The workers that sleep on purpose."""
        return {task.index for task in parse(self.settings.slow)}

    @property
    def command(self) -> tuple[str, ...]:
        """What one would type to have it."""
        if not self.num_ps:
            return ("python", "-m", *self.program)
        ps = ("--ps", str(self.num_ps)) if self.num_ps > 1 else ()
        return (
            "paceline", "run", *ps, "--workers", str(self.num_workers), *flags(self.settings), "-m", *self.program,
        )  # fmt: skip


def flags(settings: Settings) -> list[str]:
    """The flags that say these settings.

    >>> flags(Settings(run_id="", mode="sync", replicas_to_aggregate=2, staleness_scale=True))
    ['--mode', 'sync', '--replicas-to-aggregate', '2', '--staleness-scale']
    """
    plain = Settings(run_id=settings.run_id, run_dir=settings.run_dir)
    said = []
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if value != getattr(plain, name):
            said += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return said


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """What summary.json says of a worker, as far as tables tell it."""

    index: int
    steps: int = 0
    discarded: int = 0
    step_ms: StepMs | None = None
    split_ms: SplitMs | None = None
    samples_per_s: float | None = None
    waited_s: float = 0.0
    epoch_s: float | None = None
    metrics: dict[str, float | None] = {}  # what its script logged last


class Ps(msgspec.Struct, frozen=True, kw_only=True):
    """What summary.json says of a ps, as far as tables tell it."""

    index: int
    updates: int = 0
    apply_ms: float | None = None
    pushes: dict[str, int] = {}


class Staleness(msgspec.Struct, frozen=True, kw_only=True):
    mean: float | None = None
    p95: float | None = None


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """What a run left: summary.json, and what its script told (`told`: JSON of a shape of the script's own)."""

    workers: list[Worker] = []
    ps: list[Ps] = []
    staleness: Staleness = Staleness()
    global_step: int = 0
    tasks: list[TaskUse] = []
    pairs: list[PairBytes] = []
    told: msgspec.Raw = msgspec.Raw(b"{}")

    def others_than(self, slowed: set[int]) -> list[Worker]:
        """The workers that ran as fast as they could."""
        return [worker for worker in self.workers if worker.index not in slowed]


Runs = Sequence[tuple[Cell, Finished]]


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """What the runs of a table say together: another table, made when the last of them has ended."""

    title: str
    columns: tuple[str, ...]
    lines: Callable[[Runs], list[tuple[str, ...]]]  # each as long as the columns and the remark


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Whole runs, a line each. `line` gives what stands between a cell's labels and the end of its line."""

    title: str
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    line: Callable[[Cell, Finished], tuple[str, ...]]
    note: str  # how to read it
    verdicts: Verdicts | None = None

    def only(self, text: str) -> "Table":
        """The cells that have `text` in their title."""
        few = tuple(cell for cell in self.cells if text.lower() in cell.title.lower())
        return msgspec.structs.replace(self, cells=few)

    @property
    def head(self) -> tuple[str, ...]:
        return (*self.columns, REMARK)

    def blank(self, cell: Cell, cause: str) -> tuple[str, ...]:
        """The line of a cell that did not come to its end."""
        told = cause if cause.startswith(NOT_BROKEN) else f"failed: {cause}"
        return (*cell.labels, *[NONE] * (len(self.columns) - len(cell.labels)), told)


def number(value: float | None, digits: int) -> str:
    """
    >>> number(1.25, 1), number(None, 1)
    ('1.2', '-')
    """
    return NONE if value is None else f"{value:.{digits}f}"


def share(part: float, whole: float) -> str:
    """
    >>> share(1, 8), share(0, 0)
    ('12.5 %', '-')
    """
    return f"{100 * part / whole:.1f} %" if whole > 0 else NONE


def middle(values: Sequence[float]) -> float | None:
    """The mean; None when there is nothing.

    >>> middle([1.0, 2.0])
    1.5
    """
    return sum(values) / len(values) if values else None
