"""HOW does one read a run later? Writes report.html, one page that opens without a network, and its pictures.

Called by lab/run at the end of a run, and by `paceline lab report`. Must never write what a user named into a page
unescaped, nor fail where matplotlib is missing: then the page has tables only, and says so.

    write(folder)   folder/report.html, folder/pictures/*.svg and *.png
"""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from paceline.errors import UsageError
from paceline.lab.cells import NONE, NOT_BROKEN
from paceline.lab.results import reading, telling
from paceline.lab.results.lines import Result
from paceline.lab.results.series import pictures
from paceline.lab.results.telling import Section
from paceline.lab.tables import is_text
from paceline.launchers.closing import shown

PAGE, PICTURES = "report.html", "pictures"
NO_PICTURES = "There are no pictures: matplotlib is not installed (pip install 'paceline[lab]')."
BAD, GOOD = ("failed", "OVER", "MISCOUNTED", "✗"), ("aim reached", "within the bar", "holds")
STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; color: #222; background: #fff; margin: 0; }
main { max-width: 82rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p { max-width: 60rem; } .date { color: #666; margin-top: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #888; font-weight: 600; } .text { text-align: left; }
th, td:first-child { white-space: normal; } td:first-child { min-width: 11rem; }
td.range { white-space: normal; } td.range span { white-space: nowrap; }
td.long { white-space: normal; min-width: 14rem; overflow-wrap: anywhere; }
tr.failed td { background: #fdecea; color: #8e1b12; } tr.skipped td { background: #f4f4f4; color: #666; }
tr.good td:last-child { color: #2c6e2f; }
.mind { background: #fff6e0; border-left: 4px solid #e0a100; padding: .4rem .8rem; margin: .4rem 0; max-width: 60rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .86rem; max-width: 60rem; }
dt { color: #666; } dd { margin: 0; overflow-wrap: anywhere; }
ul.limits { font-size: .9rem; padding-left: 1.2rem; max-width: 64rem; } ul.limits b { font-weight: 600; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(34rem, 100%), 1fr)); gap: 1.2rem; }
.pictures { align-items: start; }
figure { margin: 0; border: 1px solid #e4e4e4; padding: .4rem; } figure svg { width: 100%; height: auto; }
@media print { .pictures { display: block; } figure, tr { break-inside: avoid; } }
"""
GUIDE = (
    "Ratios are lower quartiles over interleaved repetitions, each against the mean of what ran right before and right "
    "after it; the row that begins with A/A is the same against the same, and its distance from 1 is the noise of the "
    "machine: a difference that is not larger means nothing.",
    "Whole runs are one run a line unless a seed is named; runs whose titles differ in the seed alone are drawn and "
    "explained once. A red line failed, and says why; a grey one could not be tried here.",
    "What limits a cell is said from its own numbers by fixed rules. “Not enough is known” means that the numbers "
    "which would decide it were not measured in this run.",
)


def write(folder: Path) -> Path:
    """The report of the run in a folder: its result is there, or beside it."""
    return write_for(reading.in_folder(folder), folder)


def told(folder: Path) -> str:
    """Write it, and say where it is; or, in a sentence, why there is none: a run is not lost for want of a page."""
    try:
        return f"Report: {shown(write(folder))}"
    except (UsageError, OSError) as error:
        return f"There is no report: {error}"


def write_for(path: Path, folder: Path) -> Path:
    """The report of a result file, into a folder."""
    result = reading.read(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drawn, why = _drawn(result, folder / PICTURES)
        target, draft = folder / PAGE, folder / f".{PAGE}.{os.getpid()}"
        draft.write_text(page(result, drawn, why), encoding="utf-8")
        os.replace(draft, target)
    except OSError as error:
        raise UsageError(f"No report can be written to {folder}: {error.strerror}.") from error
    return target


def _drawn(result: Result, folder: Path) -> tuple[list[str], str]:
    """The SVG of every picture; none, and why, without matplotlib."""
    try:
        from paceline.lab.results.plots import save
    except ImportError:
        return [], NO_PICTURES
    return [save(picture, folder) for picture in pictures(result)], ""


# --- the page ---------------------------------------------------------------------------------------------------------


def page(result: Result, drawn: Sequence[str], no_pictures: str = "") -> str:
    """All of it as HTML; `drawn` are pictures as SVG, made from the same result."""
    title = f"paceline lab: {result.origin.matrix}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="date">{escape(result.origin.date)}, paceline {escape(result.origin.paceline)}, '
        f"{escape(telling.mark_commit(result.origin))}</p>",
        *(f'<p class="mind">{escape(text)}</p>' for text in telling.warnings(result)),
        *(_section(section) for section in telling.sections(result)),
        *_pictures(drawn, no_pictures),
        "<h2>How to read this</h2>",
        *(f"<p>{escape(text)}</p>" for text in GUIDE),
        "<h2>Where the numbers come from</h2>",
        _provenance(result),
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style></head>\n<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def _section(section: Section) -> str:
    texts = [is_text(section.columns, section.lines, column) for column in range(len(section.columns))]
    head = "".join(
        f"<th{_class(to_left)}>{escape(name)}</th>" for name, to_left in zip(section.columns, texts, strict=True)
    )
    rows = "\n".join(_row(line, texts) for line in section.lines)
    words = "".join(f"<li><b>{escape(name)}</b>: {escape(text)}</li>\n" for name, text in section.words)
    return (
        f'<h2>{escape(section.title)}</h2>\n<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>" + (f'\n<ul class="limits">{words}</ul>' if words else "")
    )


def _row(line: Sequence[str], texts: Sequence[bool]) -> str:
    if len(line) > 2 and set(line[1:-1]) == {NONE}:  # what is said of it has the place of what was not measured
        cells = [f"<td{_class(True, line[0])}>{escape(line[0])}</td>"]
        cells += [f'<td colspan="{len(line) - 1}"{_class(True, line[-1])}>{escape(line[-1])}</td>']
    else:
        cells = [f"<td{_class(to_left, text)}>{_text(text)}</td>" for text, to_left in zip(line, texts, strict=True)]
    return f"<tr{_mark(line)}>{''.join(cells)}</tr>"


def _text(text: str) -> str:
    """Escaped; what stands in brackets behind a number may go below it, but not apart."""
    number, bracket, rest = text.partition(" (")
    return f"{escape(number)} <span>({escape(rest)}</span>" if bracket else escape(text)


def _class(to_left: bool, text: str = "") -> str:
    looks = (("text", to_left), ("long", len(text) > 60), ("range", not to_left and " (" in text))
    names = [name for name, holds in looks if holds]
    return f' class="{" ".join(names)}"' if names else ""


def _mark(line: Sequence[str]) -> str:
    """How a row is coloured: by what its last column says.

    >>> _mark(("a", "failed: it ended")), _mark(("a", "missing: no ray")), _mark(("a", ""))
    (' class="failed"', ' class="skipped"', '')
    """
    said = line[-1]
    if said.startswith(BAD) or ", then failed" in said:
        return ' class="failed"'
    if said.startswith(NOT_BROKEN) or said == "not measured":
        return ' class="skipped"'
    return ' class="good"' if said.startswith(GOOD) else ""


def _pictures(drawn: Sequence[str], no_pictures: str) -> list[str]:
    if not drawn:
        return [f'<p class="mind">{escape(no_pictures)}</p>'] if no_pictures else []
    figures = "\n".join(f"<figure>{text}</figure>" for text in drawn)
    return ["<h2>Pictures</h2>", f'<div class="pictures">{figures}</div>']


def _provenance(result: Result) -> str:
    lines = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in telling.provenance(result))
    return f"<dl>{''.join(lines)}</dl>"
