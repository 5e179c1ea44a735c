"""HOW is something measured? `paceline lab run NAME`: flags in, one request for lab/run out.

Called by cli/main. Must never measure anything itself, and must never import torch.
"""

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure which topology is worth its cost.")

KNOWN = (  # in the order of the error message; a test holds it against lab.MATRICES, which would take long to import
    "overhead", "modes", "apply", "safety", "accuracy", "budget", "in-graph", "documents", "tensorflow", "carriers",
    "peers", "seeds", "towers", "scale", "watch", "cards", "slow-link", "links", "soak",
)  # fmt: skip
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE.toml",
        help=f"What to measure: {', '.join(KNOWN[:-1])} or {KNOWN[-1]}; or a file that describes a matrix over a "
        "script of your own (docs/lab.md).",
        show_default=False,
    ),
]
Reps = Annotated[
    int | None,
    typer.Option(
        "--reps",
        help="Interleaved repetitions of the rows side by side  [default: 7, with --quick 3], or of the whole runs of "
        "watch, cards  [1] and slow-link  [3, with --quick 1].",
    ),
]
Steps = Annotated[
    int | None, typer.Option("--steps", help="Steps a segment.  [default: of overhead 300, modes 50, apply 20]")
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer and shorter: to see that it works, not to believe it.")]
Short = Annotated[
    bool, typer.Option("--short", help="Of accuracy: the same curves at a tenth of the cost (lr 0.01, 55 batches).")
]
Only = Annotated[
    str,
    typer.Option(
        "--only", metavar="TEXT", help="Only the lines that have TEXT in their title, and what those are compared with."
    ),
]
Minutes = Annotated[
    float | None, typer.Option("--minutes", help="Of a soak, with faults.  [default: 30, with --quick 3]")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="AXIS=A,B",
        help="Of a built-in matrix: only the lines with these values, and what they are held against. Of a file: these "
        "values instead of the axis's own, or an axis more. --set mode=sync --set lane=tcp,shm.",
    ),
]
Seeds = Annotated[
    int | None, typer.Option("--seeds", metavar="N", help="Each cell with N seeds; the table has mean and spread.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Begin anew: do not go on with a run that was interrupted.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List what would be measured with a time each; start nothing.")]
Out = Annotated[str, typer.Option("--out", metavar="DIR", help="Where results and logs go.")]


@app.callback()
def lab() -> None:
    """Measure which topology is worth its cost."""


@app.command("run")
def run(
    name: Name,
    reps: Reps = None,
    steps: Steps = None,
    quick: Quick = False,
    short: Short = False,
    only: Only = "",
    out: Out = "runs/lab",
    minutes: Minutes = None,
    set_: Set = None,
    seeds: Seeds = None,
    fresh: Fresh = False,
    dry_run: DryRun = False,
) -> None:
    """Measure a matrix of runs and scenarios, print its tables and write its results. Interrupted, it goes on later."""
    from paceline.lab.run import Request, main

    request = Request(
        matrix=name,
        reps=reps,
        steps=steps,
        is_quick=quick,
        is_short=short,
        only=only,
        out=out,
        minutes=minutes,
        sets=tuple(set_ or ()),
        seeds=seeds,
        is_fresh=fresh,
        is_dry=dry_run,
    )
    raise typer.Exit(main(request))
