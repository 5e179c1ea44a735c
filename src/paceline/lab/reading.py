"""WHERE is a result, and what is in it? A folder, a file or a matrix name becomes a Result.

Called by the verbs `lab show`, `lab compare` and `lab report`, and by lab/report. Must never change a file, nor take
for a result what is none: it says in a sentence what is wrong with it.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.cluster.spec import Task
from paceline.cluster.spelling import hint
from paceline.errors import UsageError
from paceline.lab import scenario
from paceline.lab.cells import Finished
from paceline.lab.lines import Failure, Line, Measured, Origin, Result, Said, Segment, Ticked, Used
from paceline.lab.starting import slug
from paceline.telemetry.read import records, tick_of

OUT = "runs/lab"
FILE = "results.jsonl"
SOAK = "soak"
CHIEF = Task("worker", 0)
_OLD = re.compile(r"results-(.+)\.jsonl")
Shape = TypeVar("Shape")


class _Kind(msgspec.Struct, frozen=True):
    kind: str


class _Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What a cell's line has beside what the run left."""

    table: str
    title: str
    command: tuple[str, ...]
    line: dict[str, str]


class _Soak(msgspec.Struct, frozen=True, kw_only=True):
    lines: list[dict[str, str]]


class _Cores(msgspec.Struct, frozen=True):
    cores: float


# --- where ------------------------------------------------------------------------------------------------------------


def find(run: str, out: Path | str = OUT) -> Path:
    """The result file that is meant: a file, a folder, or a matrix (its newest run under `out`)."""
    given = Path(run)
    if given.is_file():
        return given
    if given.is_dir():
        return in_folder(given)
    inside = Path(out) / run
    if inside.is_dir():
        return in_folder(inside)
    found = listed(out)
    mine = [path for path, origin in found if origin.matrix == run]
    if mine:
        return mine[0]
    names = list(dict.fromkeys(origin.matrix for _, origin in found))
    if not names:
        raise UsageError(f"There is no result {run!r}, and none at all in {out}; `paceline lab run` makes one.")
    raise UsageError(
        f"There is no result {run!r}: give a file, a folder, or a matrix that was measured; {hint(run, names)}."
    )


def in_folder(folder: Path) -> Path:
    """The result file of a run's folder; of a folder with several the newest."""
    beside = folder.absolute().parent / f"results-{folder.absolute().name}.jsonl"
    for path in (folder / FILE, beside):
        if path.is_file():
            return path
    found = listed(folder)
    if not found:
        raise UsageError(f"There is no result in {folder}: it has neither {FILE} nor a folder with one.")
    return found[0][0]


def listed(out: Path | str) -> list[tuple[Path, Origin]]:
    """Every result in a folder and in the folders of its runs, the newest first; what is none is left out."""
    folder = Path(out)
    paths = [*folder.glob("*.jsonl"), *folder.glob(f"*/{FILE}")]
    found = []
    for path in paths:
        try:
            found.append((path, _origin(path)))
        except UsageError:
            continue
    return sorted(found, key=lambda each: (each[1].date, str(each[0])), reverse=True)


def folder_of(path: Path) -> Path:
    """Where the report of a result goes.

    >>> folder_of(Path("lab/modes-1/results.jsonl")).as_posix(), folder_of(Path("lab/results-1.jsonl")).as_posix()
    ('lab/modes-1', 'lab/1')
    >>> folder_of(Path("docs/modes.jsonl")).as_posix()
    'docs/modes-report'
    """
    if path.name == FILE:
        return path.parent
    old = _OLD.fullmatch(path.name)
    return path.parent / (old[1] if old else f"{path.stem}-report")


def _run_dir(path: Path, title: str) -> Path | None:
    """Where a cell's run left its files, as long as nobody removed them."""
    name, home = slug(title), folder_of(path)
    found = [home / name, *home.glob(f"*/{name}")] if home.is_dir() else []
    return next((folder for folder in found if (folder / "summary.json").is_file()), None)


# --- what -------------------------------------------------------------------------------------------------------------


def read(path: Path) -> Result:
    """The whole file. A line that was cut off, because whoever wrote it was killed, is left out and counted; of what
    was measured again when the run went on, the last counts."""
    lines = _lines(path)
    whole = [line for number, line in enumerate(lines) if number == 0 or _is_json(line)]
    kinds = _kinds(path, whole)
    if not kinds or kinds[0][0] != "provenance":
        raise UsageError(f"{path} is no result of the lab: its first line does not say where the numbers come from.")
    segments = _last([_shaped(path, number, line, Segment) for _, number, line in _of(kinds, "segment")], _place)
    rows = _last([_shaped(path, number, line, Line) for _, number, line in _of(kinds, "row")], lambda row: row.title)
    cells = [_cell(path, number, line) for _, number, line in _of(kinds, "cell")]
    known = {"provenance", "cell", "verdicts", "segment", "idle", "others", "failed", "row", "soak", "end"}
    return Result(
        path=path,
        origins=[_shaped(path, number, line, Origin) for _, number, line in _of(kinds, "provenance")],
        cells=_last(cells, lambda cell: (cell.table, cell.title)),
        said=[*_said(path, kinds)],
        rows=_named(rows, segments),
        segments=segments,
        failures=[each for each in _failures(path, kinds) if each.scenario not in {cell.title for cell in cells}],
        others=[_shaped(path, number, line, _Cores).cores for _, number, line in _of(kinds, "others")],
        unknown=sorted({kind for kind, _, _ in kinds} - known),
        has_end=bool(_of(kinds, "end")),
        num_cut=len(lines) - len(whole),
    )


def _last(values: list[Shape], key: Callable[[Shape], object]) -> list[Shape]:
    """One of each key: the last, at the place of the first."""
    return list({key(value): value for value in values}.values())


def _place(segment: Segment) -> object:
    return segment.repetition, segment.at


Kinds = list[tuple[str, int, bytes]]


def _lines(path: Path) -> list[bytes]:
    try:
        return [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except msgspec.DecodeError:
        return False
    return True


def _kinds(path: Path, lines: Iterable[bytes]) -> Kinds:
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append((msgspec.json.decode(line, type=_Kind).kind, number, line))
        except msgspec.MsgspecError as error:
            raise UsageError(f"{path} is no result of the lab: line {number} has no kind ({error}).") from error
    return found


def _of(kinds: Kinds, kind: str) -> Kinds:
    return [each for each in kinds if each[0] == kind]


def _shaped(path: Path, number: int, line: bytes, shape: type[Shape]) -> Shape:
    try:
        return msgspec.json.decode(line, type=shape)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"{path} has a format that this version does not know: line {number}: {error}. "
            "Read it with the version that wrote it; its first line has the commit."
        ) from error


def _origin(path: Path) -> Origin:
    """The first line alone: a list of results does not read them all."""
    try:
        with path.open("rb") as file:
            first = file.readline()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from error
    if _kinds(path, [first])[0][0] != "provenance":
        raise UsageError(f"{path} is no result of the lab.")
    return _shaped(path, 1, first, Origin)


def _cell(path: Path, number: int, line: bytes) -> Measured:
    told = _shaped(path, number, line, _Cell)
    return Measured(
        table=told.table,
        title=told.title,
        command=told.command,
        line=told.line,
        done=_shaped(path, number, line, Finished),
        used=_shaped(path, number, line, Used),
        ticks=_ticks(_run_dir(path, told.title)),
    )


def _ticks(run_dir: Path | None) -> list[Ticked]:
    """What the chief logged as accuracy, each value once."""
    if run_dir is None:
        return []
    ticks = [tick for record in records(run_dir, CHIEF) if (tick := tick_of(record)) is not None]
    found: list[Ticked] = []
    for tick in ticks:
        accuracy = tick.metrics.get("accuracy")
        if accuracy is not None and (not found or found[-1].accuracy != accuracy):
            found.append(Ticked(tick.t - ticks[0].t, tick.global_step, accuracy))
    return found


def _said(path: Path, kinds: Kinds) -> Iterable[Said]:
    for kind, number, line in kinds:
        if kind == "verdicts":
            yield _shaped(path, number, line, Said)
        elif kind == SOAK:
            yield Said(table="A soak: faults while it trains", lines=_shaped(path, number, line, _Soak).lines)


def _failures(path: Path, kinds: Kinds) -> list[Failure]:
    """Each with its table, where the file says it or the runs before and after it are of the same one."""
    tables = [_shaped(path, number, line, _Cell).table if kind == "cell" else "" for kind, number, line in kinds]
    found = []
    for at, (kind, number, line) in enumerate(kinds):
        if kind != "failed":
            continue
        failure = _shaped(path, number, line, Failure)
        before = next((table for table in reversed(tables[:at]) if table), "")
        after = next((table for table in tables[at:] if table), before)
        is_whole_run = not any(each in ("segment", "idle") for each, _, _ in kinds[:at])
        table = failure.table or (after if is_whole_run and before in ("", after) else "")
        found.append(msgspec.structs.replace(failure, table=table))
    return found


def _named(rows: list[Line], segments: list[Segment]) -> list[Line]:
    """The rows with the names of what they compared: a row's line has only its title, its segments have the names."""
    by_repetition: dict[int, list[Segment]] = {}
    for segment in segments:
        by_repetition.setdefault(segment.repetition, []).append(segment)
    names: dict[int, tuple[str, str]] = {}
    for run in by_repetition.values():
        ordered = sorted(run, key=lambda each: each.at)
        plan = [scenario.Segment(each.scenario, each.row) for each in ordered]
        for pair in scenario.pairs(plan, [max(each.us) if each.us else None for each in ordered]):
            at = next(number for number, each in enumerate(ordered) if each.row == pair.row)
            names[pair.row] = (ordered[at].scenario, ordered[at - 1].scenario)
    if len(names) != len(rows):
        return rows  # an interrupted run, or several in one file: who is who cannot be told
    of_row = [names[index] for index in sorted(names)]
    return [
        msgspec.structs.replace(row, scenario=mine, beside=beside)
        for row, (mine, beside) in zip(rows, of_row, strict=True)
    ]
