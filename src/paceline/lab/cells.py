"""WHAT is one whole run of the lab? A cell: its flags and its script; and the table that its line belongs to.

Used by the matrices, carried out by lab/measuring/whole_runs. Pure: no process, no file, no clock.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from paceline.cluster.settings import Settings
from paceline.cluster.slow import parse
from paceline.telemetry.records import Histograms, PairBytes, SplitMs, StepMs
from paceline.telemetry.usage import TaskUse

HOSTS = "paceline.lab.scripts.hosts_script"  # what starts a cell's tasks when they are on several hosts
TWO_HOSTS = (("ps:0", "worker:0"), ("worker:1",))  # of the documents: the ps is beside worker 0
NONE = "-"
REMARK = "remark"
NOT_BROKEN = ("missing: ", "skipped: ")  # how the cause of a failure begins that is nobody's fault


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One whole run, from the first process to summary.json."""

    title: str  # no other cell of the matrix has it
    labels: tuple[str, ...]  # the first columns of its line
    program: tuple[str, ...]  # the module that trains, or a script's path, and its arguments
    num_workers: int
    settings: Settings
    num_ps: int = 1  # 0: no cluster
    starts_tasks: bool = False  # the program starts ps and workers itself
    limit_s: float = 120.0  # then it is ended, and has failed
    needs_bytes: int = 0  # with less memory free it is skipped
    is_script: bool = False  # the program is a file
    seed: int | None = None  # that the program is given, where a matrix repeats its cells over seeds
    repetition: int | None = None  # of those that are interleaved
    is_beside: bool = False  # others of its repetition are compared with it, so --only leaves it where it leaves them
    own: dict[str, str] = {}  # the program's own axes: flag and value
    axes: dict[str, str] = {}  # of a built-in matrix: what --set may name beside flags of `paceline run`
    needs_gpus: int = 0  # with fewer cards visible it is skipped
    hosts: tuple[tuple[str, ...], ...] = ()  # the tasks of each host; empty: all of them here, through `paceline run`
    rate: str = ""  # of the last host's cable, as tc writes it: 10mbit; "": as fast as memory

    @property
    def is_alone(self) -> bool:
        """To the lab it is one process, which is told where to leave what it tells (`--told`)."""
        return self.starts_tasks or not self.num_ps

    @property
    def slowed(self) -> set[int]:
        """The workers that sleep on purpose."""
        return {task.index for task in parse(self.settings.slow)}

    @property
    def command(self) -> tuple[str, ...]:
        """What one would type to have it."""
        program = self.program if self.is_script else ("-m", *self.program)
        if self.is_alone:
            return ("python", *program)
        if self.hosts:
            tasks = "/".join(",".join(host) for host in self.hosts)
            asked = ("--settings", settings_text(self.settings)) if flags(self.settings) else ()
            rate = ("--rate", self.rate) if self.rate else ()
            return ("python", "-m", HOSTS, "--hosts", tasks, *rate, *asked, *program)
        ps = ("--ps", str(self.num_ps)) if self.num_ps > 1 else ()
        return (
            "paceline", "run", *ps, "--workers", str(self.num_workers), *flags(self.settings), *program,
        )  # fmt: skip


def settings_text(settings: Settings) -> str:
    """The settings that are not as ever, as JSON.

    >>> settings_text(Settings(run_id="", mode="sync"))
    '{"mode":"sync"}'
    """
    plain = Settings(run_id=settings.run_id, run_dir=settings.run_dir)
    said = {name: getattr(settings, name) for name in settings.__struct_fields__}
    return msgspec.json.encode({k: v for k, v in said.items() if v != getattr(plain, k)}).decode()


def flags(settings: Settings) -> list[str]:
    """The flags that say these settings.

    >>> flags(Settings(run_id="", mode="sync", replicas_to_aggregate=2, staleness_scale=True))
    ['--mode', 'sync', '--replicas-to-aggregate', '2', '--staleness-scale']
    >>> flags(Settings(run_id="", soft_placement=False))
    ['--no-soft-placement']
    """
    plain = Settings(run_id=settings.run_id, run_dir=settings.run_dir)
    said = []
    for name in settings.__struct_fields__:
        value = getattr(settings, name)
        if value != getattr(plain, name):
            said += [f"--{'no-' if value is False else ''}{name.replace('_', '-')}"]
            said += [] if isinstance(value, bool) else [str(value)]
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
    first_epoch_s: float | None = None
    epoch_s: float | None = None  # mean of the epochs after the first; with one epoch, that one
    first_100_steps_ms: float | None = None  # their mean
    waited_at_start_s: float = 0.0  # for the others, before its first step
    metrics: dict[str, float | None] = {}  # what its script logged last


class Ps(msgspec.Struct, frozen=True, kw_only=True):
    """What summary.json says of a ps, as far as tables tell it."""

    index: int
    updates: int = 0
    apply_ms: float | None = None
    staleness: Histograms = {}  # how often which one came, worker by worker
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
    wall_s: float | None = None  # from the first process to the last
    tasks: list[TaskUse] = []
    pairs: list[PairBytes] = []
    told: msgspec.Raw = msgspec.Raw(b"{}")
    failed: str = ""  # why there is nothing to tell

    def others_than(self, slowed: set[int]) -> list[Worker]:
        """The workers that ran as fast as they could."""
        return [worker for worker in self.workers if worker.index not in slowed]


Runs = Sequence[tuple[Cell, Finished]]


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """What the runs of a table say together: another table, made when the last of them has ended."""

    title: str
    columns: tuple[str, ...]
    lines: Callable[[Runs], list[tuple[str, ...]]]  # each as long as the columns and the remark
    has_failed: bool = False  # `lines` is also given what failed, marked so


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Whole runs, a line each. `line` gives what stands between a cell's labels and the end of its line."""

    title: str
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    line: Callable[[Cell, Finished], tuple[str, ...]]
    note: str  # how to read it
    verdicts: Verdicts | None = None
    is_listed: bool = True  # False: only what the runs say together is shown
    usual_s: float | None = None  # of a cell, on two quiet cores: the guess of a machine that has measured nothing yet

    def only(self, text: str) -> "Table":
        """The cells that have `text` in their title, and those that these are compared with."""
        named = {cell.title: cell.repetition for cell in self.cells if text.lower() in cell.title.lower()}
        repetitions = set(named.values())
        few = [c for c in self.cells if c.title in named or (c.is_beside and c.repetition in repetitions)]
        return msgspec.structs.replace(self, cells=tuple(few))

    @property
    def head(self) -> tuple[str, ...]:
        return (*self.columns, REMARK)

    def blank(self, cell: Cell, cause: str) -> tuple[str, ...]:
        """The line of a cell that did not come to its end."""
        return (*cell.labels, *[NONE] * (len(self.columns) - len(cell.labels)), mark(cause))


def mark(cause: str) -> str:
    """How a failure is told in a table: what is nobody's fault is not called one.

    >>> mark("it ended"), mark("missing: no ray")
    ('failed: it ended', 'missing: no ray')
    """
    return cause if cause.startswith(NOT_BROKEN) else f"failed: {cause}"


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


def seeds_from_1(count: int) -> range:
    """The seeds of a built-in matrix.

    >>> list(seeds_from_1(3))
    [1, 2, 3]
    """
    return range(1, count + 1)


def middle(values: Iterable[float | None]) -> float | None:
    """The mean of those that are known; None when there is nothing.

    >>> middle([1.0, None, 2.0])
    1.5
    """
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
