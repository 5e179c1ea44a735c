"""WHAT shall a run do differently? `paceline ctl mode|show`: its mode, changed or only read while it trains.

Called by cli/main. Must never change anything but what was asked for: bad input ends before ps:0 is asked.
"""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import options as o
from paceline.cli.kv import RunOrPs, access_by, run_or_ps
from paceline.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from paceline.worker.control import Shown

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Change a run while it trains, or see how it stands."
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="async, sync, bounded or local.")]
Replicas = Annotated[
    int | None, typer.Option("--replicas-to-aggregate", metavar="K", help="sync: so many gradients make a round.")
]
Tokens = Annotated[
    int | None, typer.Option("--extra-tokens", metavar="T", help="sync with K: one worker may put 1+T into a round.")
]
Grace = Annotated[
    str | None, typer.Option("--grace-ms", metavar="G|P%", help="sync with K: wait so long for more after the K-th.")
]
Staleness = Annotated[
    int | None, typer.Option("--staleness", metavar="S", help="bounded: so many steps a worker may be ahead.")
]
LocalSteps = Annotated[
    int | None, typer.Option("--local-steps", metavar="H", help="local: steps of a worker between two exchanges.")
]
Outer = Annotated[str | None, typer.Option("--outer", metavar="sync|async", help="local: how deltas become updates.")]
Scale = Annotated[
    bool, typer.Option("--staleness-scale/--no-staleness-scale", help="async, bounded: lr divided by 1 + staleness.")
]
Wait = Annotated[float, typer.Option("--wait-s", help="Give up when workers take longer to finish their step.")]


@app.command("mode")
def mode(
    name: Name,
    run: RunOrPs,
    replicas_to_aggregate: Replicas = None,
    extra_tokens: Tokens = None,
    grace_ms: Grace = None,
    staleness: Staleness = None,
    local_steps: LocalSteps = None,
    outer: Outer = None,
    staleness_scale: Scale = False,
    wait_s: Wait = 300.0,
    secret_file: o.SecretFile = None,
    tls: o.Tls = False,
    insecure: o.Insecure = False,
) -> None:
    """Switch to another mode, or to other numbers of it; what is not given is at its default."""
    from paceline.telemetry.lines import switched_line
    from paceline.worker.control import switch_mode

    try:
        done = switch_mode(
            run_or_ps(run),
            name,
            access=access_by(secret_file, tls, insecure),
            wait_s=wait_s,
            say=lambda line: print(line, file=sys.stderr, flush=True),
            replicas_to_aggregate=replicas_to_aggregate,
            extra_tokens=extra_tokens,
            grace_ms=grace_ms,
            staleness=staleness,
            local_steps=local_steps,
            outer=outer,
            staleness_scale=staleness_scale,
        )
    except KeyboardInterrupt:
        print("The change stays asked for: it holds once every worker has finished its step.", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    print(switched_line(str(done.before), str(done.after), done.global_step, done.pause_ms))


@app.command("show")
def show(run: RunOrPs, secret_file: o.SecretFile = None, tls: o.Tls = False, insecure: o.Insecure = False) -> None:
    """Print the mode that holds now, the global step and the live workers."""
    from paceline.worker.control import shown_by

    print("\n".join(shown(shown_by(run_or_ps(run), access_by(secret_file, tls, insecure)))))


def shown(now: "Shown") -> list[str]:
    """A line each for the mode, the global step and the workers."""
    said = [
        f"mode: {now.mode}",
        f"global step: {now.global_step}",
        f"live workers: {', '.join(now.live) or 'none'} ({len(now.live)} of {now.num_workers})",
    ]
    if now.wanted:
        said.append(f"changing to: {now.wanted}; waits for {', '.join(now.waits_for) or 'nobody'}")
    if now.lacks:
        said.append(f"paused: {now.lacks} more worker{'s' if now.lacks != 1 else ''} needed")
    return said
