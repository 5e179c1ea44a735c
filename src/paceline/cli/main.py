"""WHAT can be called? The command `paceline`: its verbs, its version, and the one door errors leave by.

Called by the installed script and `python -m paceline`. Must never import torch: --help answers at once.
"""

import sys
from typing import Annotated

import typer

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
from paceline.errors import EXIT_TRAINING, PacelineError
from paceline.launchers import hangup, output


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
    except SystemExit as end:
        lost = output.unwritten()
        if lost is None:
            raise
        output.complain(f"not all of it could be printed: {lost.strerror or lost}")
        if end.code or is_run(sys.argv[1:] if argv is None else argv):
            raise
        raise SystemExit(EXIT_TRAINING) from None


def is_run(argv: list[str]) -> bool:
    """Whether what the command is for lies in files, whatever becomes of its lines.

    >>> is_run(["lab", "run", "modes"]), is_run(["lab", "show"])
    (True, False)
    """
    return argv[:1] in (["run"], ["serve"], ["demo"]) or argv[:2] == ["lab", "run"]
