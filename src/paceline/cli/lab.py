"""HOW is something measured? `paceline lab run NAME`: flags in, one request for lab/run out.

Called by cli/main. Must never measure anything itself, and must never import torch.
"""

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure which topology is worth its cost.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="What to measure: overhead.", show_default=False)]
Reps = Annotated[int | None, typer.Option("--reps", help="Interleaved repetitions.  [default: 7, with --quick 3]")]
Steps = Annotated[int | None, typer.Option("--steps", help="Steps a segment.  [default: 300, with --quick 100]")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer and shorter: to see that it works, not to believe it.")]
Only = Annotated[str, typer.Option("--only", metavar="TEXT", help="Only the rows that have TEXT in their title.")]
Out = Annotated[str, typer.Option("--out", metavar="DIR", help="Where results and logs go.")]


@app.callback()
def lab() -> None:
    """Measure which topology is worth its cost."""


@app.command("run")
def run(
    name: Name, reps: Reps = None, steps: Steps = None, quick: Quick = False, only: Only = "", out: Out = "runs/lab"
) -> None:
    """Measure a matrix of scenarios side by side, print its table and write its result file."""
    from paceline.lab.run import Request, main
    from paceline.lab.scenario import Amounts

    default_reps, default_steps = (3, 100) if quick else (7, 300)
    amounts = Amounts(
        reps=default_reps if reps is None else reps,
        steps=default_steps if steps is None else steps,
    )
    raise typer.Exit(main(Request(matrix=name, amounts=amounts, out=out, only=only)))
