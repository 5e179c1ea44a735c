"""WHAT of an interrupted run need not be measured again? The newest one of the same matrix, if nothing has changed.

Called by lab/run before it begins; lab/measuring/whole_runs and lab/measuring/repetitions ask what they may skip. Must
never put results of another version, commit, machine or request together with new ones: it says that they differ.
"""

import fcntl
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from paceline.lab.cells import Cell, Finished
from paceline.lab.results.lines import NAME, Failure, Kind, Measured, Others, Segment
from paceline.lab.results.result import Provenance
from paceline.launchers.closing import shown

SAME = {  # what must not have changed, and what it is called
    "paceline": "version of paceline",
    "commit": "commit",
    "changes": "state of the source files",
    "plan": "request",
    "torch": "version of torch",
    "python": "version of Python",
    "cpu": "processor",
    "cores": "number of cores",
    "gpus": "set of GPUs",
}


class Kept:
    """What the lines of a result file say was measured; nothing, for a run that begins."""

    def __init__(self, path: Path | None = None) -> None:
        self.facts: Provenance | None = None
        self.is_ended = False
        self.failures: dict[str, str] = {}  # of scenarios, by name
        self.others: dict[int, float] = {}  # cores that other programs used while a group of rows was measured
        self.cells: dict[str, Measured] = {}
        self._repetitions: dict[tuple[int, int], dict[int, Segment]] = {}  # by group and number
        for line in _lines(path) if path is not None else ():
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            kind = msgspec.json.decode(line, type=Kind).kind
            if kind == "provenance":
                self.facts = msgspec.json.decode(line, type=Provenance)
            elif kind == "cell":
                ran = msgspec.json.decode(line, type=Measured)
                self.cells[ran.title] = ran
            elif kind == "segment":
                segment = msgspec.json.decode(line, type=Segment)
                self._repetitions.setdefault((segment.group, segment.repetition), {})[segment.at] = segment
                if segment.us:
                    self.failures.pop(segment.scenario, None)  # it went well when the run went on
            elif kind == "failed":
                failed = msgspec.json.decode(line, type=Failure)
                if not failed.table:
                    self.failures[failed.scenario] = failed.cause
            elif kind == "others":
                others = msgspec.json.decode(line, type=Others)
                if others.of == "rows":
                    self.others[others.group] = max(self.others.get(others.group, 0.0), others.cores)
            self.is_ended = kind == "end"
        except msgspec.MsgspecError:
            return  # half a line: whoever wrote it was killed

    def of(self, cell: Cell) -> Finished | None:
        """What this very cell left; None: it is to run."""
        ran = self.cells.get(cell.title)
        if ran is None or (ran.command, ran.seed, ran.repetition) != (cell.command, cell.seed, cell.repetition):
            return None
        return ran

    def repetition(self, group: int, number: int, num_segments: int) -> list[Segment] | None:
        """All segments of a repetition of a group in their order; None: it did not come to its end."""
        found = self._repetitions.get((group, number), {})
        return [found[at] for at in range(num_segments)] if set(found) >= set(range(num_segments)) else None

    def segment_us(self) -> dict[str, float]:
        """How long a step of every scenario took last, in the slowest worker."""
        last = [each for found in self._repetitions.values() for each in found.values() if each.us]
        return {each.scenario: max(each.us) for each in last if each.us}


def _lines(path: Path) -> Iterator[bytes]:
    try:
        yield from path.read_bytes().splitlines()
    except OSError:
        return


def earlier(out: Path, matrix: str) -> list[tuple[Path, Kept]]:
    """The result files of this matrix, the newest first."""
    found = []
    for path in sorted(out.glob(f"{matrix}-*/{NAME}"), key=lambda each: each.parent.name, reverse=True):
        kept = Kept(path)
        if kept.facts is not None and kept.facts.matrix == matrix:
            found.append((path, kept))
    return found


def unfinished(
    files: list[tuple[Path, Kept]], facts: Provenance, cells: Sequence[Cell] = ()
) -> tuple[tuple[Path, Kept] | None, str]:
    """The file to go on with, if the newest one of the same request has not ended; with it what is to be said.
    `cells`: those that are asked for now."""
    said = ""
    for path, kept in files:
        assert kept.facts is not None
        other = differences(kept.facts, facts)
        if not other and kept.is_ended:
            break
        if kept.is_ended or is_held(path):
            continue
        if not other:
            return (path, kept), f"Going on with {shown(path.parent)}, which was not finished; --fresh begins anew."
        if not said:
            how = f" ({changed(kept, facts, cells)})" if other[0] == SAME["plan"] else ""
            said = f"{shown(path.parent)} was not finished, but with another {other[0]}{how}; nothing of it is taken."
    return None, said


def differences(before: Provenance, now: Provenance) -> list[str]:
    """What has changed, in words."""
    return [told for name, told in SAME.items() if getattr(before, name) != getattr(now, name)]


def changed(before: Kept, now: Provenance, cells: Sequence[Cell]) -> str:
    """How a request differs, as far as the lines of the other one tell it."""
    assert before.facts is not None
    then, amounts = before.facts, msgspec.structs.asdict(now.settings)
    for name, old in msgspec.structs.asdict(then.settings).items():
        if amounts[name] != old:
            return f"{name} was {old}, and is {amounts[name]}"
    if then.seeds != now.seeds:
        return f"seeds were {_listed(then.seeds)}, and are {_listed(now.seeds)}"
    asked = {cell.title: cell for cell in cells}
    for title, ran in before.cells.items():
        if title not in asked:
            return f"{title!r} was measured, and is not asked for"
        if ran.command != asked[title].command:
            return f"{title!r} was {' '.join(ran.command)}, and is {' '.join(asked[title].command)}"
    return "the script's text, limit_s, or what it had not come to"


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds)) or "none"


def is_held(path: Path) -> bool:
    """Whether somebody is measuring into this file now."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return True
    return False
