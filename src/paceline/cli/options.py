"""WHICH flags do run, demo and serve share? Their declarations, once, and what becomes of them.

Called by the verbs. Must never import torch, and must never start anything.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec
import typer

from paceline.cluster.settings import Settings
from paceline.errors import UsageError

Ps = Annotated[int | None, typer.Option("--ps", help="Number of ps tasks.  [default: 1]")]
Workers = Annotated[int | None, typer.Option("--workers", help="Number of worker tasks.  [default: 2]")]
Mode = Annotated[str, typer.Option("--mode", help="When a gradient counts: async or sync.")]
Replicas = Annotated[
    int | None,
    typer.Option("--replicas-to-aggregate", metavar="K", help="With --mode sync: K gradients a round."),
]
Placement = Annotated[str, typer.Option("--placement", help="What lies where: bytes, round_robin or greedy.")]
Lane = Annotated[str, typer.Option("--lane", help="How bytes travel: auto, shm or tcp.")]
Data = Annotated[str, typer.Option("--data", help="shard: share the set out; full: every worker sees all of it.")]
PsHosts = Annotated[str | None, typer.Option("--ps_hosts", metavar="HOST:PORT,…", help="Addresses of job ps.")]
WorkerHosts = Annotated[
    str | None, typer.Option("--worker_hosts", metavar="HOST:PORT,…", help="Addresses of job worker.")
]
SaveEvery = Annotated[str, typer.Option("--save-every", help="Checkpoint every 500 (steps), 10m, 30s, or none.")]
RunDir = Annotated[
    str | None,
    typer.Option("--run-dir", help="The run folder.  [default: runs/<new>; by hand: none, and nothing is saved]"),
]
LogEvery = Annotated[int, typer.Option("--log-every", help="Print every N-th step; 0: a few lines a second.")]
LogPlacement = Annotated[bool, typer.Option("--log-device-placement", help="Print where every variable went.")]
LeaseS = Annotated[float, typer.Option("--lease-s", help="Seconds of silence after which a task is out.")]
WaitS = Annotated[float, typer.Option("--wait-s", help="Seconds a task waits for the others.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")]
Module = Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name, as in python -m.")]
Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script.", show_default=False)]
ScriptArgs = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="SCRIPT's own arguments, passed untouched.")
]


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """The values of the flags that end up in Settings; taken from a command's parameters by name."""

    mode: str
    replicas_to_aggregate: int | None
    placement: str
    lane: str
    data: str
    save_every: str
    log_every: int
    log_device_placement: bool
    lease_s: float
    wait_s: float


def settings(params: Mapping[str, object]) -> Settings:
    """Return a command's parameters as Settings; whoever makes the run fills in its id and folder."""
    shared = msgspec.convert(dict(params), Shared)
    if shared.lane == "inproc":
        raise UsageError("Lane inproc is for tests within one process; use auto, shm or tcp.")
    return Settings(run_id="", **msgspec.structs.asdict(shared))


def addresses(text: str | None) -> tuple[str, ...]:
    """Return a flag's list of addresses.

    >>> addresses("a:1, b:2")
    ('a:1', 'b:2')
    """
    stripped = (text or "").strip("\"'")
    return tuple(part.strip() for part in stripped.split(",") if part.strip())
