"""WHAT was measured? `paceline lab show`, `lab compare` and `lab report`: results that are there, told again.

Added to the verbs of cli/lab by cli/main. Must never measure anything, nor change a result.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.lab.results.telling import Section

RUN = "A result: its file, its folder, or a matrix (its newest run in --out)."
Run = Annotated[str | None, typer.Argument(metavar="[RUN]", help=f"{RUN} Without it: what there is.")]
One = Annotated[str, typer.Argument(metavar="RUN", help=RUN, show_default=False)]
First = Annotated[str, typer.Argument(metavar="A", help=RUN, show_default=False)]
Second = Annotated[str, typer.Argument(metavar="B", help="Another one, which is told against A.", show_default=False)]
Out = Annotated[str, typer.Option("--out", metavar="DIR", help="Where `lab run` writes results.")]
To = Annotated[str | None, typer.Option("--to", metavar="DIR", help="Where to write.  [default: the run's folder]")]


def show(run: Run = None, out: Out = "runs/lab") -> None:
    """Print the tables of a result again, with where its numbers come from and what limits each cell."""
    from paceline.lab.results import reading, telling

    if run is None:
        _list(out)
        return
    result = reading.read(reading.find(run, out))
    for name, value in telling.provenance(result):
        print(f"{name + ':':11}{value}")
    for warning in telling.warnings(result):
        print(f"Mind: {warning}")
    for section in telling.sections(result):
        _print(section)


def _list(out: str) -> None:
    from paceline.cli.table import print_table
    from paceline.lab.results import reading
    from paceline.lab.results.telling import mark_commit

    found = reading.listed(out)
    if not found:
        print(f"There are no results in {out}; `paceline lab run NAME` makes one.")
        return
    lines = [
        (
            origin.matrix, origin.date, origin.paceline, mark_commit(origin),
            "not finished" if reading.is_unfinished(path, origin) else "", str(path),
        )
        for path, origin in found
    ]  # fmt: skip
    print_table(("matrix", "date", "paceline", "commit", "state", "file"), lines)


def compare(a: First, b: Second, out: Out = "runs/lab") -> None:
    """Print two results number by number: both, the difference, and whether it is more than their noise explains.

    Noise: of rows side by side the spread of the A/A rows of both (or of the row, if that is more); of whole runs how
    far the seeds of each are apart.
    """
    from paceline.lab.results import comparing, reading

    results = [reading.read(reading.find(run, out)) for run in (a, b)]
    for name, result in zip("AB", results, strict=True):
        print(f"{name}: {result.path}, {result.origin.matrix}, {result.origin.date}")
    told = comparing.compare(*results)
    for text in told.minded:
        print(f"Mind: {text}")
    for text in told.unlike:
        print(f"NOT THE SAME: {text}")
    for section in told.sections:
        _print(section)
    print(f"\n{told.num_equal} numbers are the same in both.")
    for text in told.only:
        print(text[:1].upper() + text[1:])
    if not told.sections and not told.num_equal:
        print("The two have nothing in common that could be compared.")


def report(run: One, out: Out = "runs/lab", to: To = None) -> None:
    """Write report.html and its pictures again: one page that opens without a network."""
    from paceline.lab.results import reading
    from paceline.lab.results.report import write_for

    path = reading.find(run, out)
    print(write_for(path, Path(to) if to else reading.folder_of(path)))


def _print(section: "Section") -> None:
    from rich.console import Console

    from paceline.lab.tables import drawn, is_drawable, plain

    print(f"\n{section.title}")
    console = Console(highlight=False, markup=False)
    if sys.stdout.isatty() and is_drawable(section.columns, section.lines, console.width):
        console.print(drawn(section.columns, section.lines))
    else:
        print(plain(section.columns, section.lines))
    for name, words in section.words:
        print(f"- {name}: {words}")


def add_to(app: typer.Typer) -> None:
    """The three verbs, beside `lab run`."""
    app.command("show")(show)
    app.command("compare")(compare)
    app.command("report")(report)
