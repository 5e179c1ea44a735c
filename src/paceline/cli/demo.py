"""WHAT shows that it works? `paceline demo`: `run` with a script that ships in the package.

Called by cli/main. Must never do anything that `paceline run SCRIPT` could not.
"""

from typing import Annotated

import typer

from paceline.cli import options as o
from paceline.cli.run import start
from paceline.cluster.spelling import hint
from paceline.errors import UsageError

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[mnist] [-- ARGS...]", help="Which demo, and after -- its arguments."),
]


@o.with_settings
def demo(
    ctx: typer.Context,
    words: Words = None,
    ps: o.Ps = None,
    workers: o.Workers = None,
    ps_hosts: o.PsHosts = None,
    worker_hosts: o.WorkerHosts = None,
    run_dir: o.RunDir = None,
    dry_run: o.DryRun = False,
) -> None:
    """Train MNIST (it ships inside the package) on 1 ps + 2 workers."""
    from paceline.launchers.demos import DEMOS

    rest = list(words or ())
    name = rest.pop(0) if rest and not rest[0].startswith("-") else "mnist"
    if name not in DEMOS:
        raise UsageError(f"Unknown demo {name!r}; {hint(name, DEMOS)}.")
    raise typer.Exit(start(ctx.params, str(DEMOS[name]), tuple(rest), is_module=False))
