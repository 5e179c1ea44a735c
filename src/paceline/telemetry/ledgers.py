"""WHERE are a run's ledgers, and what do they prove together? Files in, one verdict out.

Called by `paceline verify`, the launcher and tests. Every start of a run has its own set: when a run is resumed, the
ledgers of before are set aside, because its tasks count from the start again.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from paceline import files
from paceline.cluster.settings import Settings
from paceline.cluster.spec import Task
from paceline.errors import UsageError
from paceline.modes.spec import ModeSpec
from paceline.telemetry.ledger import Record, problem, records_of
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.verify import Verdict, check

ASIDE = "earlier"
CUT = ".cut"
MOVED = ".moved-"


class Recorded:
    """One task's records, read when they are asked for: those of its ledgers, one after the other."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __iter__(self) -> Iterator[Record]:
        before = 0
        for path in self._paths:
            record = None
            for record in records_of(content(path)):
                yield record._replace(number=record.number + before) if before else record
            before += record.number if record is not None else 0


def content(path: Path) -> bytes:
    """Read a ledger; refuse one that is a link, or lies in a linked folder."""
    with files.reading(path.parent.parent, path) as file:
        return file.read()


def _problem(path: Path) -> str:
    try:
        return problem(content(path))
    except files.Unusable as error:
        return f"is not read: {error.why}"


def set_predecessor_aside(run: Path, task: Task) -> None:
    """This task is started elsewhere: what it was before may still live and write, so it keeps its file, under another
    name, and counts as what came before."""
    path = RunPaths(run).ledger(task)
    if path.exists():
        path.rename(path.with_name(f"{path.stem}{MOVED}{len(_predecessors(path)) + 1}.bin"))


def _predecessors(path: Path) -> list[Path]:
    """The ledgers of this one's task before it was started elsewhere, the oldest first."""
    return sorted(path.parent.glob(f"{path.stem}{MOVED}*.bin"), key=lambda each: _number(each.with_suffix("")))


def note_cut(path: Path) -> None:
    """The end of this ledger was lost with its host, or all of it: nothing is compared with it."""
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(CUT).touch()


def set_aside(run: Path) -> None:
    """Make room for another start of this run; what was written stays."""
    folder = RunPaths(run).ledgers
    written = [*sorted(folder.glob("*.bin")), *sorted(folder.glob(f"*{CUT}"))]  # of a cut one nothing may have come
    if not written:
        return
    aside = folder / f"{ASIDE}-{len(list(folder.glob(f'{ASIDE}-*'))) + 1}"
    aside.mkdir()
    for file in written:
        file.rename(aside / file.name)


def verdict_of(run: Path) -> Verdict:
    """What the ledgers of all starts of this run prove."""
    paths = RunPaths(run)
    folders = [*sorted(paths.ledgers.glob(f"{ASIDE}-*"), key=_number), paths.ledgers]
    sets = [folder for folder in folders if any(folder.glob("*.bin"))]
    if not sets:
        raise UsageError(f"{run} has no ledger; one is written when the run is started with --ledger.")
    total = Verdict()
    for folder in sets:
        is_newest = folder == paths.ledgers
        found = _verdict(paths, folder, _first_mode(paths) if is_newest else None)
        where = "" if is_newest else f"{folder.name}/"
        total.records += found.records
        total.violations += [each._replace(task=where + each.task) for each in found.violations]
        total.lost += [where + each for each in found.lost]
        total.missing += [where + each for each in found.missing]
        total.damaged += [where + each for each in found.damaged]
    return total


def _number(folder: Path) -> int:
    number = folder.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def _verdict(paths: RunPaths, folder: Path, first_mode: ModeSpec | None) -> Verdict:
    has_chief = _has_chief(paths, folder)
    ps, workers, damaged = {}, {}, []
    for file in sorted(folder.glob("*.bin")):
        job, _, index = file.stem.rpartition("-")
        if job not in ("ps", "worker", "chief") or not index.isdecimal() or file.with_suffix(CUT).exists():
            continue
        files = [*_predecessors(file), file]
        whys = [(each, why) for each in files if (why := _problem(each))]
        damaged += [f"{job}:{index}: its ledger {why} ({each.name})" for each, why in whys]
        if whys:
            continue
        if job == "ps":
            ps[int(index)] = Recorded(files)
        else:
            workers[int(index) + (has_chief and job == "worker")] = Recorded(files)
    verdict = check(ps, workers, first_mode)
    verdict.damaged += damaged
    return verdict


def _has_chief(paths: RunPaths, folder: Path) -> bool:
    """Whether the run has a job chief, which is counted before the workers; its ledger may be lost."""
    try:
        return "chief" in paths.read_cluster().jobs
    except UsageError:
        return any(folder.glob("chief-*.bin"))


def _first_mode(paths: RunPaths) -> ModeSpec | None:
    try:
        return msgspec.json.decode(files.content(paths.root, paths.config.name), type=Settings).mode_spec
    except (OSError, msgspec.MsgspecError):
        return None  # a run by hand has no config.json, unless ps:0 has written one
