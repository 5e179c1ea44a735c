"""WHERE do the numbers come from? The provenance of a result, and the file that keeps every repetition.

Called by lab/run, lab/repetitions and lab/whole_runs. A line is on disk as soon as it was measured, so an
interrupted run keeps what it has.
"""

import importlib.metadata
import os
import platform
import sys
import time
from pathlib import Path

import msgspec

from paceline.errors import UsageError
from paceline.lab.cells import Cell, Finished, Table
from paceline.lab.processes import Times, output_of
from paceline.lab.scenario import Amounts, Segment
from paceline.lab.soak import COLUMNS, Soaked, lines
from paceline.lab.tables import Summary
from paceline.version import VERSION


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Which code, on which machine, when, how much."""

    matrix: str
    date: str
    paceline: str
    commit: str | None
    is_changed: bool | None  # files differ from that commit
    torch: str | None
    python: str
    system: str
    cpu: str
    cores: int
    load: tuple[float, float, float]
    settings: Amounts


def provenance(matrix: str, amounts: Amounts, now_s: float) -> Provenance:
    """What must be known to judge a number later."""
    here = Path(__file__).parent
    commit = output_of(["git", "-C", str(here), "rev-parse", "HEAD"])
    changed = output_of(["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"]) if commit else None
    return Provenance(
        matrix=matrix,
        date=time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now_s)),
        paceline=VERSION,
        commit=commit,
        is_changed=None if changed is None else bool(changed),
        torch=_version("torch"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        load=os.getloadavg(),
        settings=amounts,
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


class ResultFile:
    """`results-<date>.jsonl`: a provenance line, one per whole run, per segment, per failure, per row."""

    def __init__(self, folder: Path, stamp: str) -> None:
        self.path = folder / f"results-{stamp}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise UsageError(f"No results can be written to {folder}: {error.strerror}.") from error

    def _line(self, kind: str, value: object) -> None:
        fields = msgspec.to_builtins(value)
        self._file.write(msgspec.json.encode({"kind": kind, **fields}) + b"\n")

    def begin(self, facts: Provenance) -> None:
        self._line("provenance", facts)

    def cell(self, table: Table, cell: Cell, done: Finished, line: tuple[str, ...]) -> None:
        """A whole run: how to have it again, what it left, and its line of the table."""
        told = {"table": table.title, "title": cell.title, "command": cell.command}
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

    def others(self, cores: float) -> None:
        """What other programs used meanwhile."""
        self._line("others", {"cores": cores})

    def failed(self, scenario: str, cause: str) -> None:
        self._line("failed", {"scenario": scenario, "cause": cause})

    def row(self, summary: Summary, verdict: str) -> None:
        self._line("row", {**msgspec.to_builtins(summary), "verdict": verdict})

    def soaked(self, done: Soaked) -> None:
        """A soak: its plan, its numbers, its lines of the table."""
        shown = [dict(zip(COLUMNS, line, strict=True)) for line in lines(done)]
        self._line("soak", {**msgspec.to_builtins(done), "lines": shown})

    def close(self) -> None:
        self._file.close()
