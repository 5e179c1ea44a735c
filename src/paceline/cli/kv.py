"""WHAT does a ps hold? `paceline kv ls|get`: a run's variables by name, also while it trains.

Called by cli/main. Must never change a variable.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.table import print_table
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.worker.kv import Entry

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Read a run's variables by name from its ps.")

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name under runs/ (also: latest).")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="A variable's name, as ls prints it.")]
HEADERS = ("name", "shape", "dtype", "version", "ps", "trained")


@app.command("ls")
def ls(run: Run) -> None:
    """List every variable: shape, dtype, version, and which ps hold it."""
    folder = run_folder(run)
    from paceline.worker import kv

    print_table(HEADERS, [cells(entry) for entry in kv.read(folder)])


@app.command("get")
def get(run: Run, name: Name) -> None:
    """Print one variable: what ls says about it, then its values."""
    folder = run_folder(run)
    from paceline.worker import kv

    entry, value = kv.value(folder, name)
    for header, cell in zip(HEADERS, cells(entry), strict=True):
        print(f"{header}: {cell}")
    print(value)


def cells(entry: "Entry") -> tuple[str, ...]:
    """One row of the listing."""
    shape = "x".join(str(size) for size in entry.shape) or "scalar"
    trained = "trained" if entry.is_trained else "carried"
    return entry.name, shape, str(entry.dtype), str(entry.version), ",".join(entry.ps), trained


def run_folder(run: str) -> Path:
    """RUN as given, or under runs/."""
    for folder in (Path(run), Path("runs") / run):
        if (folder / "cluster.json").is_file():
            return folder
    raise UsageError(f"No run folder {run!r}, and none of that name under runs/.")
