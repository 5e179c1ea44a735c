"""WHAT shows that it works? `paceline demo`: `run` with a script that ships in the package.

Called by cli/main. Must never do anything that `paceline run SCRIPT` could not.
"""

from typing import Annotated

import typer

from paceline.cli import options as o
from paceline.cli.run import start
from paceline.cluster.spelling import hint
from paceline.errors import EXIT_OK, UsageError

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[mnist|autoencoder|transformer|cifar10] [-- ARGS...]",
        help="Which demo, and after -- its arguments.",
    ),
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
    """Train on 1 ps + 2 workers: MNIST (it ships inside the package), or another of the built-in programs."""
    from paceline.launchers.demos import DEMOS
    from paceline.launchers.entry import Program, execute

    rest = list(words or ())
    name = rest.pop(0) if rest and not rest[0].startswith("-") else "mnist"
    if name not in DEMOS:
        raise UsageError(f"Unknown demo {name!r}; {hint(name, DEMOS)}.")
    if rest and not rest[0].startswith("-"):
        raise UsageError(f"A demo's own arguments are options, after --; {rest[0]!r} is none.")
    chosen = DEMOS[name]
    if {"-h", "--help"} & set(rest):
        execute(Program(script=str(chosen.script), args=("--help",)))
    own = {flag: value for flag, value in chosen.flags.items() if is_default(ctx, flag)}
    code = start({**ctx.params, **own}, str(chosen.script), tuple(rest), is_module=False)
    if code == EXIT_OK and not dry_run:
        typer.echo(f"Look at {chosen.advice(rest)}")
    raise typer.Exit(code)


def is_default(ctx: typer.Context, flag: str) -> bool:
    """Whether the user has said nothing about a flag."""
    source = ctx.get_parameter_source(flag)
    return source is not None and source.name == "DEFAULT"
