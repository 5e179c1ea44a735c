"""WHAT does a ps hold? `paceline kv ls|get`: a run's variables by name, also while it trains.

Called by cli/main. Must never change a variable.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options as o
from paceline.cli.table import print_table
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.worker.kv import Entry

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Read a run's variables by name from its ps.")

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name under runs/ (also: latest).")]
RunOrPs = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run folder, its name under runs/ (also: latest), or the address of a ps, as --ps_hosts has it.",
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="A variable's name, as ls prints it.")]
HEADERS = ("name", "shape", "dtype", "version", "ps", "trained")


@app.command("ls")
def ls(run: RunOrPs, secret_file: o.SecretFile = None, tls: o.Tls = False, insecure: o.Insecure = False) -> None:
    """List every variable: shape, dtype, version, and which ps hold it."""
    where = run_or_ps(run)
    from paceline.worker import kv
    from paceline.worker.reach import Access

    access = Access(secret_file=secret_file, tls=tls, insecure=insecure)
    print_table(HEADERS, [cells(entry) for entry in kv.read(where, access)])


@app.command("get")
def get(
    run: RunOrPs,
    name: Name,
    secret_file: o.SecretFile = None,
    tls: o.Tls = False,
    insecure: o.Insecure = False,
) -> None:
    """Print one variable: what ls says about it, then its values."""
    where = run_or_ps(run)
    from paceline.worker import kv
    from paceline.worker.reach import Access

    entry, value = kv.value(where, name, Access(secret_file=secret_file, tls=tls, insecure=insecure))
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
    found = _folder(run)
    if found is None:
        raise UsageError(f"No run folder {run!r}, and none of that name under runs/.")
    return found


def run_or_ps(run: str) -> Path | str:
    """RUN as given, or under runs/, or the addresses that it is."""
    from paceline.worker.reach import addresses_of

    found = _folder(run)
    if found is not None:
        return found
    if addresses_of(run):
        return run
    by_hand = "of tasks that were started by hand give the address of a ps, as in --ps_hosts: HOST:PORT"
    if Path(run).is_dir():
        raise UsageError(f"{run} says of no run who takes part (cluster.json is missing); {by_hand}.")
    raise UsageError(f"No run folder {run!r}, and none of that name under runs/; {by_hand}.")


def _folder(run: str) -> Path | None:
    return next((each for each in (Path(run), Path("runs") / run) if (each / "cluster.json").is_file()), None)
