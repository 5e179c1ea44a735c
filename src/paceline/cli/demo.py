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


def demo(
    ctx: typer.Context,
    words: Words = None,
    ps: o.Ps = None,
    workers: o.Workers = None,
    mode: o.Mode = "async",
    replicas_to_aggregate: o.Replicas = None,
    extra_tokens: o.ExtraTokens = None,
    grace_ms: o.GraceMs = "0",
    staleness: o.Staleness = None,
    local_steps: o.LocalSteps = None,
    outer: o.Outer = None,
    outer_lr: o.OuterLr = 0.7,
    outer_momentum: o.OuterMomentum = None,
    staleness_scale: o.StalenessScale = False,
    ema: o.Ema = None,
    wire: o.Wire = "float32",
    master: o.Master = "float32",
    overlap: o.Overlap = False,
    ledger: o.Ledger = False,
    min_workers: o.MinWorkers = None,
    slow: o.Slow = "",
    placement: o.Placement = "bytes",
    lane: o.Lane = "auto",
    data: o.Data = "shard",
    ps_hosts: o.PsHosts = None,
    worker_hosts: o.WorkerHosts = None,
    save_every: o.SaveEvery = "10m",
    run_dir: o.RunDir = None,
    log_every: o.LogEvery = 0,
    log_device_placement: o.LogPlacement = False,
    lease_s: o.LeaseS = 5.0,
    wait_s: o.WaitS = 300.0,
    dry_run: o.DryRun = False,
) -> None:
    """Train MNIST (it ships inside the package) on 1 ps + 2 workers."""
    from paceline.launchers.demos import DEMOS

    rest = list(words or ())
    name = rest.pop(0) if rest and not rest[0].startswith("-") else "mnist"
    if name not in DEMOS:
        raise UsageError(f"Unknown demo {name!r}; {hint(name, DEMOS)}.")
    raise typer.Exit(start(ctx.params, str(DEMOS[name]), tuple(rest), is_module=False))
