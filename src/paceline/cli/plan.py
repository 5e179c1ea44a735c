"""HOW is a topology chosen? `paceline plan SCRIPT`: flags in, a calibration, a table, a recommendation, a picture out.

Called by cli/main. Must never import torch itself, and must never look at SCRIPT's own arguments.
"""

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cluster.cores import usable_cores
from paceline.errors import TrainingFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.plan.costs import Costs
    from paceline.plan.planning import Plan, Wanted

CLEAR_LINE = "\r\x1b[K"

Script = Annotated[
    str | None, typer.Argument(metavar="[SCRIPT]", help="The training script to calibrate.", show_default=False)
]
ScriptArgs = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="SCRIPT's own arguments.")]
Workers = Annotated[
    str,
    typer.Option("--workers", metavar="N|A:B|A,B", help="How many workers: up to N, a range, or these."),
]
Ps = Annotated[str, typer.Option("--ps", metavar="N,…", help="How many ps.  [default: 1,2; beyond 16 workers 1,4,16]")]
Modes = Annotated[
    str,
    typer.Option(
        "--mode", metavar="MODE,…", help="async, sync, bounded, local; sync:3, sync:90%, bounded:5, local:20."
    ),
]
LinkText = Annotated[
    str,
    typer.Option(
        "--link",
        metavar="SPEED[,LATENCY]",
        help="A host for each task, joined by 1Gbit/s,0.2ms; here: one machine.  [default: here, up to 16 workers]",
    ),
]
Lane = Annotated[str, typer.Option("--lane", help="On one machine: shm or tcp.")]
Cores = Annotated[int | None, typer.Option("--cores-per-host", help="Cores of each host.  [default: this machine's]")]
Price = Annotated[
    str,
    typer.Option("--price", metavar="P|worker=P,ps=P", help="Of a host, an hour; here: of the machine."),
]
Slow = Annotated[str, typer.Option("--slow", metavar="TASK=Nx,…", help="worker:1=4x is 4 times slower.")]
Kept = Annotated[
    str | None,
    typer.Option("--calibration", metavar="FILE", help="Of an earlier plan (calibration.json), instead of SCRIPT."),
]
Seconds = Annotated[float, typer.Option("--seconds", help="Of each calibrating run.")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", help="Threads a task, when calibrating.  [default: 1; with --link all cores]"),
]
Out = Annotated[str | None, typer.Option("--out", metavar="DIR", help="Write plan.json, plan.svg and plan.png there.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the simulation's dice.")]
StepMs = Annotated[float | None, typer.Option("--step-ms", help="Instead of SCRIPT: computing time of a step.")]
Bytes = Annotated[str, typer.Option("--bytes", metavar="SIZE", help="With --step-ms: size of the parameters.")]
ApplyMs = Annotated[float | None, typer.Option("--apply-ms", help="With --step-ms: an update on the ps.")]
Batch = Annotated[float, typer.Option("--batch", help="With --step-ms: samples a step; 1: samples/s are steps/s.")]
Module = Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name, as in python -m.")]


def plan(
    script: Script = None,
    args: ScriptArgs = None,
    workers: Workers = "1:4",
    ps: Ps = "",
    mode: Modes = "async,sync",
    link: LinkText = "",
    lane: Lane = "shm",
    cores_per_host: Cores = None,
    price: Price = "",
    slow: Slow = "",
    calibration: Kept = None,
    seconds: Seconds = 8.0,
    threads: Threads = None,
    out: Out = None,
    seed: Seed = 0,
    step_ms: StepMs = None,
    size: Bytes = "",
    apply_ms: ApplyMs = None,
    batch: Batch = 1.0,
    module: Module = False,
) -> None:
    """Predict what other topologies would cost: calibrates SCRIPT here for some seconds, simulates the rest."""
    from paceline.plan import picture, told

    wanted, note = _wanted(workers, ps, mode, link, lane, cores_per_host, price, slow)
    sources = [script is not None, calibration is not None, step_ms is not None]
    if sum(sources) != 1:
        raise UsageError(
            "Give a script to calibrate, or --calibration FILE of an earlier plan, or --step-ms with --bytes and "
            f"--apply-ms: one of them{', not several' if sum(sources) > 1 else ''}."
        )
    folder = told.made_folder(Path(out)) if out else None
    if folder is not None:
        picture.check()
    if calibration is not None:
        costs = told.read_costs(Path(calibration))
    elif step_ms is not None:
        costs = _given(step_ms, size, apply_ms, batch, wanted.cores)
    else:
        costs = _calibrated(str(script), tuple(args or ()), module, seconds, threads, wanted)
    if wanted.lane not in costs.lanes:
        raise UsageError(f"This calibration has no lane {wanted.lane}; make it again with --lane tcp or a --link.")
    if folder is not None:
        told.keep(costs, folder)
    made = _planned(costs, wanted, seed)
    _tell(made, note)
    if folder is not None:
        paths = [told.write(made, folder), *picture.draw(made, folder)]
        print("Written: " + ", ".join(str(path) for path in [folder / "calibration.json", *paths]))


def _wanted(
    workers: str, ps: str, mode: str, link: str, lane: str, cores: int | None, price: str, slow: str
) -> "tuple[Wanted, str]":
    """What is asked for, checked before anything runs; and what was chosen for the user."""
    from paceline.plan import topology as t
    from paceline.plan.planning import Wanted

    counts = t.counts(workers, "workers")
    is_far = counts[-1] > t.ONE_HOST_WORKERS
    note = ""
    if not link and is_far:
        link = t.DEFAULT_LINK
        note = f"A host for each task, joined by {link} (--link says otherwise; --link here is one machine)."
    joined = t.parse_link(link or "here")
    modes = [part.strip() for part in mode.split(",") if part.strip()]
    if not modes:
        raise UsageError("--mode is empty; name at least one, such as async.")
    t.check_modes(modes, counts[-1])
    if lane not in ("shm", "tcp"):
        raise UsageError(f"--lane is {lane!r}; use shm or tcp.")
    if cores is not None and cores < 1:
        raise UsageError(f"--cores-per-host is {cores}; a host has at least 1.")
    named_ps = t.counts(ps or ("1,4,16" if is_far else "1,2"), "ps", t.MAX_PS)
    wanted = Wanted(
        workers=counts, ps=named_ps, modes=modes, link=joined, lane="tcp" if joined else lane,
        cores=cores or usable_cores(), price=t.parse_price(price), slow=t.parse_slow(slow, counts[-1]),
    )  # fmt: skip
    return wanted, note


def _given(step_ms: float, size: str, apply_ms: float | None, batch: float, cores: int) -> "Costs":
    from paceline.plan.costs import given
    from paceline.plan.topology import parse_size

    if not size or apply_ms is None:
        raise UsageError("--step-ms needs --bytes (of the parameters) and --apply-ms (an update on the ps) beside it.")
    for flag, value in (("step-ms", step_ms), ("apply-ms", apply_ms), ("batch", batch)):
        if not math.isfinite(value) or value < 0 or (value == 0 and flag != "apply-ms"):
            raise UsageError(f"--{flag} is {value:g}; it must be more than 0.")
    return given(step_ms, parse_size(size), apply_ms, batch, cores)


def _calibrated(
    script: str, args: tuple[str, ...], is_module: bool, seconds: float, threads: int | None, wanted: "Wanted"
) -> "Costs":
    from paceline.launchers.entry import Program
    from paceline.plan.calibrate import calibrate

    if not math.isfinite(seconds) or seconds <= 0:
        raise UsageError(f"--seconds is {seconds:g}; it must be more than 0.")
    if threads is not None and threads < 1:
        raise UsageError(f"--threads is {threads}; a task has at least 1.")
    said = os.environ.get("OMP_NUM_THREADS", "")
    chosen = threads or (int(said) if said.isdecimal() else 0) or (usable_cores() if wanted.link else 1)
    program = Program(script=script, args=args, is_module=is_module)
    try:
        needs = (wanted.lane == "tcp", wanted.has_rounds)
        return calibrate(program, seconds, chosen, *needs, lambda line: print(line, file=sys.stderr, flush=True))
    except TrainingFailed as error:
        print(error, file=sys.stderr)
        raise UsageError(f"{script} failed while it was calibrated, so there is nothing to plan with.") from None


def _planned(costs: "Costs", wanted: "Wanted", seed: int) -> "Plan":
    from random import Random

    from paceline.plan.planning import Planner

    def progress(done: int, of: int) -> None:
        if sys.stderr.isatty():
            print(f"\rsimulating curve {done + 1} of {of}", end="", file=sys.stderr, flush=True)

    try:
        return Planner(costs, wanted, lambda: Random(seed)).plan(seed, progress)
    finally:
        if sys.stderr.isatty():
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)


def _tell(made: "Plan", note: str) -> None:
    from paceline.plan import told

    print("\n".join(told.costs_lines(made.costs, made.wanted.lane)))
    if note:
        print(note)
    _print_table(told.head(made), told.rows(made))
    print("★ recommended, ○ knee: the last number of workers that pays.")
    print("\n".join(made.said))
    print(f"Recommended: {made.reason}")


def _print_table(head: "Sequence[str]", rows: "Sequence[Sequence[str]]") -> None:
    """With a frame in a terminal where all of it has room; else columns side by side."""
    from paceline.lab.tables import drawn, plain

    if sys.stdout.isatty():
        from rich.console import Console

        console, framed = Console(), drawn(head, rows)
        if console.measure(framed).maximum < console.width:
            console.print(framed)
            return
    print(plain(head, rows))
