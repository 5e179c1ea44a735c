"""WHERE do the numbers come from? The provenance of a result, and the file that keeps every repetition.

Called by lab/run, lab/measuring/repetitions and lab/measuring/whole_runs. A line is on disk as soon as it was
measured, so an interrupted run keeps what it has; lab/results/kept reads it back, lab/results/flat makes results.csv
of it.
"""

import fcntl
import hashlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.cluster.cores import usable_cores
from paceline.cluster.settings import Settings
from paceline.errors import UsageError
from paceline.lab.axes import seeds_of
from paceline.lab.cells import Cell, Finished, Table
from paceline.lab.matrices.soak import COLUMNS, Soaked, lines
from paceline.lab.measuring.processes import Times, output_of
from paceline.lab.measuring.starting import peers_versions
from paceline.lab.results.lines import NAME
from paceline.lab.scenario import Amounts, Matrix, Row, Segment
from paceline.lab.tables import Summary
from paceline.launchers import gpus
from paceline.version import VERSION

VERSIONS = ("tensorflow", "tensorflow-cpu", "keras", "numpy")  # beside torch and python
PEERS, PEERS_HAVE = "peers", ("numpy", "ray", "tensorflow-cpu", "torch")  # a matrix whose systems have their own venv
TOLD = ("mode", "lane", "placement", "slow", "chaos")  # settings that are said in any case


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Which code, on which machine, when, how much."""

    matrix: str
    date: str
    paceline: str
    commit: str | None
    is_changed: bool | None  # files differ from that commit
    changes: str | None = None  # a hash of how they differ
    plan: str = ""  # a hash of everything that was asked for
    torch: str | None
    versions: dict[str, str] = {}  # of other packages, as far as they are installed
    python: str
    system: str
    cpu: str
    cores: int
    gpus: list[str] = []
    load: tuple[float, float, float]
    seeds: list[int] = []
    settings: Amounts


def provenance(matrix: str, amounts: Amounts, now_s: float, plan: str = "", seeds: Sequence[int] = ()) -> Provenance:
    """What must be known to judge a number later."""
    here = Path(__file__).parent
    commit = output_of(["git", "-C", str(here), "rev-parse", "HEAD"])
    changed = output_of(["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"]) if commit else None
    differs = output_of(["git", "-C", str(here), "diff", "HEAD"]) if changed else None
    return Provenance(
        matrix=matrix,
        changes=_hash(differs.encode()) if differs else None,
        plan=plan,
        versions={
            **{name: version for name in VERSIONS if (version := _version(name)) is not None},
            **(peers_versions(PEERS_HAVE) if matrix == PEERS else {}),
        },
        gpus=gpus.models(),
        seeds=list(seeds),
        date=time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now_s)),
        paceline=VERSION,
        commit=commit,
        is_changed=None if changed is None else bool(changed),
        torch=_version("torch"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        cpu=_cpu(),
        cores=usable_cores(),
        load=os.getloadavg(),
        settings=amounts,
    )


def provenance_of(matrix: Matrix, now_s: float) -> Provenance:
    """The same, of a whole matrix: its rows are repeated as its amounts say, whole runs alone as often as they run."""
    cells = [cell for table in matrix.tables for cell in table.cells]
    reps = matrix.amounts.reps if matrix.rows else len({cell.repetition for cell in cells}) or 1
    amounts = msgspec.structs.replace(matrix.amounts, reps=reps)
    return provenance(matrix.name, amounts, now_s, plan_of(matrix), seeds_of(cells))


def plan_of(matrix: Matrix) -> str:
    """A hash of what is to be measured: two runs with the same one may be put together. Scripts count with their text.

    >>> plan_of(Matrix(name="a")) == plan_of(Matrix(name="a")) != plan_of(Matrix(name="b"))
    True
    """
    cells = [cell for table in matrix.tables for cell in table.cells]
    scripts = {cell.program[0] for cell in cells if cell.is_script}
    texts = {script: _hash(Path(script).read_bytes()) for script in sorted(scripts)}
    told = [matrix.name, matrix.amounts, matrix.scenarios, matrix.rows, texts]
    return _hash(msgspec.json.encode([*told, [(cell.title, cell.command, cell.limit_s) for cell in cells]]))


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class ResultFile:
    """`results.jsonl` of a lab run's folder: a provenance line, one per whole run, per segment, per failure, per row;
    `end` when all of it was measured. Nobody else may write to it meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"No results can be written to {folder}: {error.strerror}.") from error
        if self._file.tell() and not self.path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")  # whoever wrote the last line was killed in the middle of it

    def _line(self, kind: str, value: object) -> None:
        fields = msgspec.to_builtins(value)
        self._file.write(msgspec.json.encode({"kind": kind, **fields}) + b"\n")

    def begin(self, facts: Provenance) -> None:
        self._line("provenance", facts)

    def end(self) -> None:
        """Everything was measured, or has failed: there is nothing to go on with."""
        self._line("end", {})

    def cell(
        self, table: Table, cell: Cell, done: Finished, line: tuple[str, ...], seconds: float = 0.0, run: str = ""
    ) -> None:
        """A whole run: how to have it again, what it left and in which folder, its line, how long all of it took."""
        told: dict[str, object] = {
            "table": table.title,
            "title": cell.title,
            "labels": cell.labels,
            "command": cell.command,
        }
        told |= {"seed": cell.seed, "repetition": cell.repetition, "seconds": seconds, "own": cell.own}
        told |= {"num_ps": cell.num_ps, "num_workers": cell.num_workers, "settings": settings_of(cell), "run": run}
        shown = dict(zip(table.head, line, strict=True))
        left = msgspec.json.decode(msgspec.json.encode(done))
        self._line("cell", {**told, "line": shown, **left})

    def verdicts(self, title: str, head: tuple[str, ...], lines: list[tuple[str, ...]]) -> None:
        """What the runs of a table say together."""
        self._line("verdicts", {"table": title, "lines": [dict(zip(head, line, strict=True)) for line in lines]})

    def segment(self, repetition: int, at: int, segment: Segment, times: Times | None) -> None:
        """None when it failed."""
        fields = {"us": None} if times is None else msgspec.to_builtins(times)
        self._line("segment", {"repetition": repetition, "at": at, **msgspec.to_builtins(segment), **fields})

    def idle(self, cores: float, num_processes: int) -> None:
        self._line("idle", {"cores": cores, "processes": num_processes})

    def others(self, cores: float, of: str = "runs", group: int = 0) -> None:
        """What other programs used meanwhile; `of`: the whole runs, or a group of the rows side by side."""
        self._line("others", {"cores": cores, "of": of, "group": group})

    def failed(self, scenario: str, cause: str, traceback: Sequence[str] = (), table: str = "") -> None:
        """A scenario, or with its table a whole run."""
        self._line("failed", {"scenario": scenario, "cause": cause, "table": table, "traceback": list(traceback)})

    def row(self, row: Row, summary: Summary, verdict: str) -> None:
        compared = {"scenario": row.scenario, "beside": row.beside, "is_noise": row.is_noise}
        self._line("row", {**msgspec.to_builtins(summary), **compared, "verdict": verdict})

    def soaked(self, done: Soaked) -> None:
        """A soak: its plan, its numbers, its lines of the table."""
        shown = [dict(zip(COLUMNS, line, strict=True)) for line in lines(done)]
        self._line("soak", {**msgspec.to_builtins(done), "lines": shown})

    def close(self) -> None:
        self._file.close()


def settings_of(cell: Cell) -> dict[str, object]:
    """The settings of a cell: those that topologies differ in, and all that are not the usual ones."""
    plain = msgspec.structs.asdict(Settings(run_id=""))
    given = msgspec.structs.asdict(cell.settings)
    return {name: value for name, value in given.items() if name in TOLD or value != plain[name]}
