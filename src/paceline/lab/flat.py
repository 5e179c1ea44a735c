"""HOW does a result get into a spreadsheet? `results.csv`: a line per whole run, per row, per failure; flat columns.

Called by lab/run when a run has ended, also when it was interrupted. Reads results.jsonl only.
"""

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from paceline.cluster.slow import parse
from paceline.errors import UsageError
from paceline.lab.cells import Finished
from paceline.lab.figures import figures, logged
from paceline.lab.result import NAME

CSV = "results.csv"
FIRST = ("kind", "matrix", "table", "title", "seed", "repetition", "ps", "workers")
FACTS = ("date", "paceline", "commit", "is_changed", "torch", "python", "system", "cpu", "cores")
Flat = dict[str, object]


class Told(Finished, frozen=True, kw_only=True):
    """A line of results.jsonl, of the kinds that a spreadsheet has."""

    kind: str
    table: str = ""
    title: str = ""
    seed: int | None = None
    repetition: int | None = None
    seconds: float | None = None
    num_ps: int = 0
    num_workers: int = 0
    settings: dict[str, object] = msgspec.field(default_factory=dict)
    own: dict[str, str] = msgspec.field(default_factory=dict)


def write(folder: Path) -> Path:
    """Make results.csv of results.jsonl."""
    text = as_csv((folder / NAME).read_bytes().splitlines())
    path = folder / CSV
    path.write_text(text, newline="")
    return path


def as_csv(lines: Iterable[bytes]) -> str:
    """The text of results.csv; what an interrupted run told, and then the one that went on, is told once."""
    found = {name_of(line): line for line in lines if line.strip()}  # the last of each name
    facts = provenance(found.values())
    flat = [each for line in found.values() for each in rows(line)]
    measured = {each["title"] for each in flat if each["kind"] == "cell"}
    told = [{**each, **facts} for each in flat if each["kind"] != "failed" or each["title"] not in measured]
    names = dict.fromkeys([*FIRST, *(name for each in told for name in each if name not in facts), *facts])
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(told)
    return text.getvalue()


def name_of(line: bytes) -> tuple[object, ...]:
    """What a line of results.jsonl is about.

    >>> name_of(b'{"kind": "failed", "scenario": "a", "cause": "b"}')
    ('failed', None, None, 'a')
    """
    fields = _decoded(line)
    return (fields.get("kind"), fields.get("table"), fields.get("title"), fields.get("scenario"))


def provenance(lines: Iterable[bytes]) -> Flat:
    """The columns that all lines share."""
    for line in lines:
        fields = _decoded(line)
        if fields.get("kind") == "provenance":
            versions = fields.get("versions")
            more = versions if isinstance(versions, dict) else {}
            cards = fields.get("gpus")
            named = "; ".join(map(str, cards)) if isinstance(cards, list) else ""
            told = {"matrix": fields.get("matrix"), **{name: fields.get(name) for name in FACTS}}
            return {**told, **more, "gpus": named}
    return {}


def _decoded(line: bytes) -> Mapping[str, object]:
    try:
        return msgspec.json.decode(line, type=dict[str, object])
    except msgspec.MsgspecError:
        return {}  # half a line


def rows(line: bytes) -> list[Flat]:
    """The lines of the spreadsheet that one line of results.jsonl becomes."""
    fields = _decoded(line)
    kind = fields.get("kind")
    if kind == "cell":
        return [_cell(msgspec.json.decode(line, type=Told))]
    if kind == "row":
        return [dict(fields)]
    if kind == "failed":
        return [{"kind": kind, "title": fields.get("scenario"), "cause": fields.get("cause")}]
    if kind in ("verdicts", "soak") and isinstance(lines := fields.get("lines"), list):
        return [_together(fields, each) for each in lines]
    return []


def _together(fields: Mapping[str, object], line: Mapping[str, object]) -> Flat:
    """What several runs say together: text as the table has it, in columns of its own."""
    named = {"kind": fields["kind"], "table": fields.get("table"), "title": next(iter(line.values()), "")}
    return {**named, **{f"together: {name}": value for name, value in line.items()}}


def _cell(told: Told) -> Flat:
    numbers = msgspec.structs.asdict(figures(told, _slowed(str(told.settings.get("slow", "")))))
    return {
        "kind": told.kind,
        "table": told.table,
        "title": told.title,
        "seed": told.seed,
        "repetition": told.repetition,
        "ps": told.num_ps,
        "workers": told.num_workers,
        **told.settings,
        **{f"--{name}": value for name, value in told.own.items()},
        "seconds": told.seconds,
        "global_step": told.global_step,
        **numbers,
        **{f"logged {name}": value for name, value in logged(told).items()},
    }


def _slowed(text: str) -> set[int]:
    try:
        return {task.index for task in parse(text)}
    except UsageError:
        return set()
