"""HOW is a result told again? Its tables with what failed in them, where its numbers come from, and what limits them.

Called by `paceline lab show` and lab/results/report, which draw the same sections for a terminal and for a page. Pure:
no file, nothing printed. Must never leave out a failure.
"""

import msgspec

from paceline.lab import tables
from paceline.lab.cells import NONE, NOT_BROKEN, REMARK, mark
from paceline.lab.results import pushing
from paceline.lab.results.facts import facts, parts_of, row_words
from paceline.lab.results.limits import Verdict, verdict
from paceline.lab.results.lines import Failure, Line, Measured, Origin, Result, families
from paceline.telemetry.limit import Limit
from paceline.telemetry.usage import MEASURED, GpuUse

ROWS = "Side by side"
ROW_COLUMNS = ("configuration", "step µs", "beside µs", "ratio", "median", "spread", "verdict")
CARDS = "Cards, mean / peak (of at most)"
CARD_COLUMNS = ("run", "task", "GPU", "fan %", "°C", "W", "MiB", "busy %", "card")  # as telemetry/usage.MEASURED
PARTS = "Where a step goes, µs"
FAILED, MISSING = "Failed", "Missing"
UNKNOWN_OTHERS = "Nobody knows what other programs used meanwhile: that is written when the runs have ended."
ROOM = "their ps apply less than a fifth of the time, so another ps would not pay"


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A table, and the sentences that belong under it: (of what, what is to say)."""

    title: str
    columns: tuple[str, ...]
    lines: list[tuple[str, ...]]
    words: list[tuple[str, str]] = []


def sections(result: Result) -> list[Section]:
    """All tables of a result: what runs say together, then the runs, then rows; without columns that say nothing."""
    told = [_lean(section) for section in _said(result)]
    told += [_lean(_whole_runs(result, title)) for title in result.tables]
    told += [cards for title in result.tables if (cards := _cards(result, title)).lines]
    told += [_rows(result)] if result.rows else []
    told += _parts(result)
    for title, is_broken in ((FAILED, True), (MISSING, False)):
        loose = [each for each in result.failures if not each.table and _is_broken(each) == is_broken]
        if loose:
            lines: list[tuple[str, ...]] = [(failure.scenario, mark(failure.cause)) for failure in loose]
            told.append(Section(title=title, columns=("what", REMARK), lines=lines))
    return told


def _is_broken(failure: Failure) -> bool:
    return not failure.cause.startswith(NOT_BROKEN)


def _lean(section: Section) -> Section:
    """Without the columns that are empty in every line; the first and the last stay."""
    last = len(section.columns) - 1
    kept = [
        at for at in range(last + 1)
        if at in (0, last) or any(line[at] not in ("", NONE) for line in section.lines)
    ]  # fmt: skip
    lines = [tuple(line[at] for at in kept) for line in section.lines]
    return msgspec.structs.replace(section, columns=tuple(section.columns[at] for at in kept), lines=lines)


def _whole_runs(result: Result, title: str) -> Section:
    cells = result.of(title)
    names = [name for cell in cells for name in cell.line]
    columns = tuple(dict.fromkeys(name for name in names if name != REMARK)) or ("what",)
    shown = [dict(cell.line) for cell in cells]
    for cell, line in zip(cells, shown, strict=True):
        if cell.labels and sum(each.labels == cell.labels for each in cells) > 1:
            line[columns[0]] = ", ".join(filter(None, [line.get(columns[0], ""), which(cell)]))
    lines = [(*(line.get(name, NONE) for name in columns), line.get(REMARK, "")) for line in shown]
    lines += [_failed(failure, len(columns)) for failure in result.failures if failure.table == title]
    is_said = any(said.table == title for said in result.said)
    return Section(
        title=f"{title}: every run" if is_said else title,
        columns=(*columns, REMARK),
        lines=lines,
        words=[*limits(result, cells), *pushing.words(cells, result.origin.cores)],
    )


def which(cell: Measured) -> str:
    """Which of several runs of the same it is.

    >>> which(Measured(table="", title="", command=(), line={}, seed=3, repetition=0))
    'repetition 1, seed 3'
    """
    parts = [f"repetition {cell.repetition + 1}" if cell.repetition is not None else ""]
    parts += [f"seed {cell.seed}" if cell.seed is not None else ""]
    return ", ".join(filter(None, parts))


def _failed(failure: Failure, num_columns: int) -> tuple[str, ...]:
    return (failure.scenario, *[NONE] * (num_columns - 1), mark(failure.cause))


def limits(result: Result, cells: list[Measured]) -> list[tuple[str, str]]:
    """What limits each of them, in words; runs that differ in their seed alone are told once, by the first of them.

    Those of which nothing is known but that their ps have room are told together.
    """
    found = {
        _of_several(name, runs): verdict(facts(result, runs[0]))
        for name, runs in families(cells).items()
        if runs[0].workers or facts(result, runs[0]).cable  # a process alone has nobody to wait for
    }
    alike: dict[str, list[str]] = {}
    for name, each in found.items():
        if each.limit is Limit.UNKNOWN and each.has_room:
            alike.setdefault(each.because, []).append(name)
    together = [(because, names) for because, names in alike.items() if len(names) > 1]
    apart = [name for name in found if not any(name in names for _, names in together)]
    return [(name, str(found[name])) for name in apart] + [
        ("; ".join(names), str(Verdict(limit=Limit.UNKNOWN, because=because, advice=ROOM)))
        for because, names in together
    ]


def _of_several(name: str, runs: list[Measured]) -> str:
    first = which(runs[0])
    return f"{name} ({first})" if len(runs) > 1 and first else name


def _cards(result: Result, title: str) -> Section:
    """What the cards of the first run of each family did, in the columns of document 000."""
    lines = [
        (name, task.name, f"gpu:{gpu.index}", *_card(gpu), gpu.name or NONE)
        for name, runs in families(result.of(title)).items()
        for task in runs[0].tasks
        for gpu in task.gpus
    ]
    return Section(title=f"{CARDS}: {title}", columns=CARD_COLUMNS, lines=lines)


def _card(gpu: GpuUse) -> tuple[str, ...]:
    """
    >>> from paceline.telemetry.usage import Spread
    >>> _card(GpuUse(index=0, power_w=Spread(30.5, 41.0), power_limit_w=180.0))
    ('-', '-', '30 / 41 (180)', '-', '-')
    """
    limits = {"power_w": gpu.power_limit_w, "memory_mib": gpu.memory_total_mib}
    told = []
    for name in MEASURED:
        spread, limit = getattr(gpu, name), limits.get(name)
        of = "" if limit is None else f" ({limit:.0f})"
        told.append(NONE if spread is None else f"{spread.mean:.0f} / {spread.peak:.0f}{of}")
    return tuple(told)


def _said(result: Result) -> list[Section]:
    """One table for each title: a file that was put together has the same one several times."""
    by_title: dict[str, list[dict[str, str]]] = {}
    for each in result.said:
        known = by_title.setdefault(each.table, [])
        known += [line for line in each.lines if line not in known]
    made = []
    for title, lines in by_title.items():
        columns = tuple(dict.fromkeys(name for line in lines for name in line))
        if columns:
            shown = [tuple(line.get(name, NONE) for name in columns) for line in lines]
            made.append(Section(title=title, columns=columns, lines=shown))
    return made


def _rows(result: Result) -> Section:
    words = [(row.title, row_words(result, row)) for row in result.rows]
    if not any(segment.parts for segment in result.segments):
        words.append(("All rows", "Where the differences go was not measured."))
    return Section(title=ROWS, columns=ROW_COLUMNS, lines=[_row(row) for row in result.rows], words=words)


def _row(row: Line) -> tuple[str, ...]:
    return (
        row.title,
        f"{row.us:.0f}",
        f"{row.beside_us:.0f}",
        f"{row.ratio:.3f}",
        f"{row.median:.3f}",
        f"{row.spread:.3f}",
        row.verdict,
    )


def _parts(result: Result) -> list[Section]:
    found = {
        name: parts
        for name in dict.fromkeys(segment.scenario for segment in result.segments)
        if (parts := parts_of(result.segments, name)) is not None
    }
    if not found:
        return []
    columns, lines = tables.divided([(name, [parts]) for name, parts in found.items()])
    return [Section(title=PARTS, columns=columns, lines=lines)]


# --- where the numbers come from --------------------------------------------------------------------------------------


def provenance(result: Result) -> list[tuple[str, str]]:
    """What must be known to judge a number: a name and a value each; several values where the file has several."""
    shown = {
        "matrix": [each.matrix for each in result.origins],
        "date": _range([each.date for each in result.origins]),
        "paceline": [each.paceline for each in result.origins],
        "commit": [mark_commit(each) for each in result.origins],
        "torch": [each.torch or "" for each in result.origins],
        "python": [each.python or "" for each in result.origins],
        "system": [each.system or "" for each in result.origins],
        "processor": [f"{each.cpu}, {each.cores} cores" if each.cpu else "" for each in result.origins],
        "GPUs": [", ".join(each.gpus) for each in result.origins],
        "packages": [", ".join(f"{k} {v}" for k, v in each.versions.items()) for each in result.origins],
        "seeds": [", ".join(map(str, each.seeds)) for each in result.origins],
        "settings": [_settings(result, each) for each in result.origins],
        "file": [str(result.path)],
    }
    return [(name, " | ".join(dict.fromkeys(filter(None, values)))) for name, values in shown.items() if any(values)]


def _settings(result: Result, origin: Origin) -> str:
    """How much was measured side by side; whole runs have theirs in their commands, but for how often they ran."""
    is_whole = not result.rows and not result.segments and bool(result.cells or result.said)
    told = {name: value for name, value in origin.settings.items() if not is_whole or (name == "reps" and value != 1)}
    return ", ".join(f"{name} {value}" for name, value in told.items())


def _range(dates: list[str]) -> list[str]:
    return [min(dates)] if len(dates) == 1 else [f"{min(dates)} to {max(dates)}"]


def mark_commit(origin: Origin) -> str:
    """
    >>> mark_commit(Origin(matrix="", date="", paceline="", commit="0123456789abcdef", is_changed=True))
    '0123456789ab, with changes that are in no commit'
    """
    if origin.commit is None:
        return "not known"
    return origin.commit[:12] + (", with changes that are in no commit" if origin.is_changed else "")


def warnings(result: Result) -> list[str]:
    """What a reader must know before believing anything."""
    told = []
    if len(result.origins) > 1:
        told.append(f"This file was put together from {len(result.origins)} runs; see where they come from.")
    if any(each.is_changed for each in result.origins):
        told.append("The code had changes that are in no commit: nobody else can measure the same again.")
    if result.is_unfinished:
        told.append("This run was not finished: it was interrupted, or it still runs.")
        told += [] if result.others else [UNKNOWN_OTHERS]
    busy = max(result.others, default=0.0)
    if busy > tables.MAX_OTHERS:
        told.append(f"Other programs used {busy:.2f} cores meanwhile; 0 is what a measurement wants.")
    if result.noise is not None and result.noise > tables.MAX_NOISE:
        told.append(f"One process against itself was off by {result.noise:.2f}: ratios closer to 1 say nothing.")
    if result.num_cut:
        told.append(f"Lines that are cut off, because whoever wrote them was killed: {result.num_cut}.")
    if result.unknown:
        told.append(f"Lines of a kind that this version does not know were left out: {', '.join(result.unknown)}.")
    broken = [each for each in result.failures if _is_broken(each)]
    if broken:
        told.append(f"{len(broken)} of what was to be measured failed; the tables say why.")
    return told
