"""HOW is something measured? `paceline lab run NAME`: hands everything after `run` to the lab.

Called by cli/main. Must never measure anything itself.
"""

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure which topology is worth its cost.")

Args = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The scenario's own flags.")]


@app.callback()
def lab() -> None:
    """Measure which topology is worth its cost."""


@app.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    scenario: Annotated[str, typer.Argument(help="What to measure: overhead.", show_default=False)],
    args: Args = None,
) -> None:
    """Measure a scenario, print its table and write its result file."""
    from paceline.lab.run import main

    raise typer.Exit(main([scenario, *(args or ())]) or 0)
