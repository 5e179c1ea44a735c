"""WHERE is a result, and what is in it? A folder, a file or a matrix name becomes a Result.

Called by the verbs `lab show`, `lab compare` and `lab report`, by lab/results/report and lab/results/flat. Must never
change a file, nor take for a result what is none: it says in a sentence what is wrong with it.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.cluster.spec import Task
from paceline.cluster.spelling import hint
from paceline.errors import UsageError
from paceline.lab.measuring.starting import slug
from paceline.lab.results import half_rows, older
from paceline.lab.results.lines import (
    NAME,
    Failure,
    Kind,
    Line,
    Measured,
    Origin,
    Others,
    Result,
    Said,
    Segment,
    Ticked,
)
from paceline.telemetry.read import records, tick_of

OUT = "runs/lab"
TAIL_BYTES = 200  # more than a last line has, and less than most others
SOAK, SOAK_TABLE = "soak", "A soak: faults while it trains"
CHIEF = Task("worker", 0)
_OLD = re.compile(r"results-(.+)\.jsonl")
Shape = TypeVar("Shape")


class _Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What a line is about, and whether it came to an end."""

    table: str = ""
    title: str = ""
    scenario: str = ""
    us: list[float] | None = None


class _Soak(msgspec.Struct, frozen=True, kw_only=True):
    lines: list[dict[str, str]]


# --- where ------------------------------------------------------------------------------------------------------------


def find(run: str, out: Path | str = OUT) -> Path:
    """The result file that is meant: a file, a folder, or a matrix (its newest run under `out`)."""
    given = Path(run)
    if given.suffix == ".csv":
        raise UsageError(f"{run} is a spreadsheet of a result: give {NAME} beside it, or their folder.")
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
    for path in (folder / NAME, beside):
        if path.is_file():
            return path
    found = listed(folder)
    if not found:
        raise UsageError(f"There is no result in {folder}: it has neither {NAME} nor a folder with one.")
    return found[0][0]


def listed(out: Path | str) -> list[tuple[Path, Origin]]:
    """Every result in a folder and in the folders of its runs, the newest first; what is none is left out."""
    folder = Path(out)
    paths = [*folder.glob("*.jsonl"), *folder.glob(f"*/{NAME}")]
    found = []
    for path in paths:
        try:
            found.append((path, _origin(path)))
        except UsageError:
            continue
    return sorted(found, key=lambda each: (each[1].date, str(each[0])), reverse=True)


def is_unfinished(path: Path, origin: Origin) -> bool:
    """As a list says it: the last line alone is read; of an older file nobody knows."""
    if not origin.plan:
        return False
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().splitlines()
    return not any(_is_end(line) for line in lines)


def _is_end(line: bytes) -> bool:
    try:
        return msgspec.json.decode(line, type=Kind).kind == "end"
    except msgspec.MsgspecError:
        return False


def folder_of(path: Path) -> Path:
    """Where the report of a result goes.

    >>> folder_of(Path("lab/modes-1/results.jsonl")).as_posix(), folder_of(Path("lab/results-1.jsonl")).as_posix()
    ('lab/modes-1', 'lab/1')
    >>> folder_of(Path("docs/modes.jsonl")).as_posix()
    'docs/modes-report'
    """
    if path.name == NAME:
        return path.parent
    old = _OLD.fullmatch(path.name)
    return path.parent / (old[1] if old else f"{path.stem}-report")


def _run_dir(path: Path, cell: Measured) -> Path | None:
    """Where a cell's run left its files, as long as nobody removed them; an older file does not name the folder."""
    home = folder_of(path)
    if cell.run:
        return home / cell.run
    name = slug(cell.title)
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
    rows = older.named(rows, segments)
    cells = _last(cells, lambda cell: (cell.table, cell.title))
    origins = [_shaped(path, number, line, Origin) for _, number, line in _of(kinds, "provenance")]
    found = Result(
        path=path,
        origins=origins if rows or segments else [older.counted(each, cells) for each in origins],
        cells=cells,
        said=_said(path, kinds),
        rows=rows,
        segments=segments,
        failures=_failures(path, kinds),
        others=[_shaped(path, number, line, Others).cores for _, number, line in _of(kinds, "others")],
        unknown=sorted({kind for kind, _, _ in kinds} - known),
        has_end=bool(_of(kinds, "end")),
        num_cut=len(lines) - len(whole),
    )
    if not found.is_unfinished:
        return found
    return msgspec.structs.replace(found, rows=[*rows, *half_rows.half_rows(segments, rows)])


def _last(values: list[Shape], key: Callable[[Shape], object]) -> list[Shape]:
    """One of each key: the last, at the place of the first."""
    return list({key(value): value for value in values}.values())


def _place(segment: Segment) -> object:
    return segment.group, segment.repetition, segment.at


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
            found.append((msgspec.json.decode(line, type=Kind).kind, number, line))
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
    cell = _shaped(path, number, line, Measured)
    return msgspec.structs.replace(older.rated(cell), ticks=_ticks(_run_dir(path, cell)))


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


def _said(path: Path, kinds: Kinds) -> list[Said]:
    """Of each table the last one between two provenances: a run that went on says everything again, of more runs."""
    found: dict[tuple[int, str], Said] = {}
    part = 0
    for kind, number, line in kinds:
        part += kind == "provenance"
        if kind == "verdicts":
            said = _shaped(path, number, line, Said)
        elif kind == SOAK:
            said = Said(table=SOAK_TABLE, lines=_shaped(path, number, line, _Soak).lines, kind=SOAK)
        else:
            continue
        found[part, said.table] = said
    return list(found.values())


def _failures(path: Path, kinds: Kinds) -> list[Failure]:
    """Those after which the same did not come to its end; between two provenances the last of each."""
    found: dict[tuple[int, str | None, str], Failure] = {}
    part = 0
    for at, (kind, number, line) in enumerate(kinds):
        part += kind == "provenance"
        if kind == "failed":
            failure = _placed(path, kinds, at)
            found[part, failure.table, failure.scenario] = failure
        elif kind in ("cell", "segment"):
            ran = _shaped(path, number, line, _Subject)
            if kind == "cell" or ran.us:
                again = {(table, ran.title or ran.scenario) for table in ("", None, ran.table)}
                found = {key: failure for key, failure in found.items() if key[1:] not in again}
    return list(found.values())


def _placed(path: Path, kinds: Kinds, at: int) -> Failure:
    """A failure with its table: as the file says it, else that of the whole runs before and after it, if it is one."""
    _, number, line = kinds[at]
    failure = _shaped(path, number, line, Failure)
    if failure.table is not None or any(kind in ("segment", "idle") for kind, _, _ in kinds[:at]):
        return failure
    tables = {near.table for near in (_near(path, reversed(kinds[:at])), _near(path, kinds[at:])) if near}
    return msgspec.structs.replace(failure, table=tables.pop()) if len(tables) == 1 else failure


def _near(path: Path, kinds: Iterable[tuple[str, int, bytes]]) -> _Subject | None:
    """The first cell of these."""
    found = next(((number, line) for kind, number, line in kinds if kind == "cell"), None)
    return None if found is None else _shaped(path, *found, _Subject)
