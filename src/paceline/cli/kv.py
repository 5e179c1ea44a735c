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
    from paceline.worker.reach import Access

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

    print_table(HEADERS, [cells(entry) for entry in kv.read(where, access_by(secret_file, tls, insecure))])


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

    entry, value = kv.value(where, name, access_by(secret_file, tls, insecure))
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


def access_by(secret_file: str | None, tls: bool, insecure: bool) -> "Access":
    """Make what the flags say of how tasks that were started by hand prove themselves."""
    from paceline.worker.reach import Access

    return Access(secret_file=secret_file, tls=tls, insecure=insecure)


def run_or_ps(run: str) -> Path | str:
    """Return the run folder that RUN names, there or under runs/; RUN itself if it is a list of addresses."""
    from paceline.worker.reach import addresses_of

    found = _folder(run)
    if found is not None:
        return found
    if addresses_of(run):
        return run
    by_hand = "for tasks that were started by hand, give the address of a ps, as in --ps_hosts: HOST:PORT"
    if Path(run).is_dir():
        raise UsageError(f"{run} is no run folder (it has no cluster.json); {by_hand}.")
    raise UsageError(f"No run folder {run!r}, and none of that name under runs/; {by_hand}.")


def _folder(run: str) -> Path | None:
    return next((each for each in (Path(run), Path("runs") / run) if (each / "cluster.json").is_file()), None)
