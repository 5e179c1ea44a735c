"""WHAT can be called? The command `paceline`: its verbs, its version, and the one door errors leave by.

Called by the installed script and `python -m paceline`. Must never import torch: --help answers at once.
"""

import errno
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline import hangup
from paceline.cli import (
    chaos,
    ckpt,
    ctl,
    demo,
    doctor,
    emit,
    env,
    keys,
    kv,
    lab,
    lab_results,
    plan,
    run,
    serve,
    verify,
)
from paceline.errors import EXIT_TRAINING, EXIT_USAGE, PacelineError
from paceline.telemetry import output

# Errors that a path given by the user may cause.
OF_A_PATH = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR,
)  # fmt: skip


def dashes(flag: str) -> str:
    """Dashes and underscores are the same in every flag; click calls this for flags only, never for values.

    >>> dashes("job_name")
    'job-name'
    """
    return flag.replace("_", "-")


SETTINGS = {"token_normalize_func": dashes, "help_option_names": ["--help", "-h"]}
OURS_FIRST = {
    **SETTINGS,
    "allow_interspersed_args": False,
}  # parsing ends at SCRIPT: the rest is the script's

app = typer.Typer(
    name="paceline",
    help="Parameter-server training for the machines you have.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=SETTINGS,
)
app.command("run", context_settings=OURS_FIRST)(run.run)
app.command("serve", context_settings=OURS_FIRST)(serve.serve)
app.command("demo", context_settings=SETTINGS)(demo.demo)
app.add_typer(emit.app, name="emit", context_settings=SETTINGS)
app.command("env", context_settings=SETTINGS)(env.env)
app.add_typer(kv.app, name="kv", context_settings=SETTINGS)
app.add_typer(keys.app, name="keys", context_settings=SETTINGS)
app.add_typer(ctl.app, name="ctl", context_settings=SETTINGS)
app.add_typer(ckpt.app, name="ckpt", context_settings=SETTINGS)
app.command("verify", context_settings=SETTINGS)(verify.verify)
app.command("doctor", context_settings=SETTINGS)(doctor.doctor)
app.command("chaos", context_settings=SETTINGS)(chaos.chaos)
lab_results.add_to(lab.app)
app.add_typer(lab.app, name="lab", context_settings=SETTINGS)
app.command("plan", context_settings=OURS_FIRST)(plan.plan)


def show_version(wanted: bool) -> None:
    """Prints the installed version and ends."""
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        typer.echo(f"paceline {version('paceline')}")
    except PackageNotFoundError:
        typer.echo("paceline (not installed)")
    raise typer.Exit()


Version = Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")]


@app.callback()
def options(version: Version = False) -> None:
    """Parameter-server training for the machines you have."""


def main(argv: list[str] | None = None) -> None:
    """Runs one command; a PacelineError becomes one line on stderr and its exit code."""
    output.keep_printing(is_task=False)
    hangup.as_interrupt()
    try:
        app(args=argv, prog_name="paceline")
    except PacelineError as error:
        output.complain(" ".join(str(error).split()))
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        told = unusable(error)
        if told is None:
            raise
        output.complain(told)
        raise SystemExit(EXIT_USAGE) from None
    except SystemExit as end:
        lost = output.unwritten()
        if lost is None:
            raise
        output.complain(f"not all of it could be printed: {lost.strerror or lost}")
        if end.code or is_run(sys.argv[1:] if argv is None else argv):
            raise
        raise SystemExit(EXIT_TRAINING) from None


def unusable(error: OSError) -> str | None:
    """Say why a path that was given cannot be used; None if the error is of another kind.

    >>> unusable(OSError(13, "Permission denied", "/closed/runs/r/cluster.json"))
    '/closed/runs/r/cluster.json cannot be used: Permission denied; give another path, or ask for access to this one.'
    """
    if error.errno not in OF_A_PATH or error.filename is None:
        return None
    path, advice = os.fsdecode(error.filename), "give another path, or ask for access to this one"
    closed = next((str(each) for each in reversed(Path(path).absolute().parents) if is_closed(each)), None)
    if closed is not None:
        return f"{path} cannot be reached: you may not enter {closed} ({error.strerror}); {advice}."
    return f"{path} cannot be used: {error.strerror}; {advice}."


def is_closed(folder: Path) -> bool:
    """Tell whether a folder exists and may not be entered."""
    try:
        return folder.is_dir() and not os.access(folder, os.X_OK)
    except OSError:
        return False  # one above it is


def is_run(argv: list[str]) -> bool:
    """Tell whether the results of a command lie in files, so that lost output does not make it fail.

    >>> is_run(["lab", "run", "modes"]), is_run(["lab", "show"])
    (True, False)
    """
    return argv[:1] in (["run"], ["serve"], ["demo"]) or argv[:2] == ["lab", "run"]
