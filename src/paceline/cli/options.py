"""WHICH flags do run, demo and serve share? Their declarations, once, and what becomes of them.

Called by the verbs. Must never import torch, and must never start anything.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
import typer

from paceline.cluster import flags
from paceline.cluster.settings import Settings
from paceline.errors import UsageError


def _not_empty(context: typer.Context, flag: typer.CallbackParam, value: str) -> str:
    """A list that was given, and names nothing: a variable of a shell script was empty, say."""
    source = context.get_parameter_source(flag.name or "")
    if not value.strip() and source is not None and source.name == "COMMANDLINE":
        raise UsageError(f"{flag.opts[0]} is empty; name what it is to do, or leave it out.")
    return value


Ps = Annotated[int | None, typer.Option("--ps", help="Number of ps tasks.  [default: 1]")]
Workers = Annotated[
    str | None,
    typer.Option(
        "--workers",
        metavar="N|MIN:MAX",
        help="Number of worker tasks; MIN:MAX starts MIN and leaves room for others to join.  [default: 2]",
    ),
]
MinWorkers = Annotated[
    int | None,
    typer.Option("--min-workers", help="Training pauses while fewer take part.  [default: MIN of --workers, else 1]"),
]
Mode = Annotated[str, typer.Option("--mode", help="When a gradient counts: async, sync, bounded or local.")]
Replicas = Annotated[
    int | None,
    typer.Option("--replicas-to-aggregate", metavar="K", help="With --mode sync: K gradients a round."),
]
ExtraTokens = Annotated[
    int | None,
    typer.Option("--extra-tokens", metavar="T", help="With K: one worker may put 1 + T gradients into a round."),
]
GraceMs = Annotated[
    str,
    typer.Option("--grace-ms", metavar="G|P%", help="With K: wait for more after the K-th, in ms or % of a round."),
]
Staleness = Annotated[
    int | None,
    typer.Option("--staleness", metavar="S", help="With --mode bounded: at most S steps ahead.  [default: 3]"),
]
LocalSteps = Annotated[
    int | None,
    typer.Option("--local-steps", metavar="H", help="With --mode local: H steps between pushes.  [default: 10]"),
]
Outer = Annotated[
    str | None, typer.Option("--outer", help="With --mode local: deltas count as in sync or async.  [default: sync]")
]
OuterLr = Annotated[float, typer.Option("--outer-lr", help="With --mode local: learning rate on the ps.")]
OuterMomentum = Annotated[
    float | None,
    typer.Option("--outer-momentum", help="With --mode local: Nesterov momentum on the ps.  [0.9; outer async: 0]"),
]
StalenessScale = Annotated[
    bool, typer.Option("--staleness-scale", help="Divide a stale gradient's learning rate by 1 + its staleness.")
]
Ema = Annotated[
    float | None, typer.Option("--ema", metavar="DECAY", help="Keep a running average of the parameters on the ps.")
]
Wire = Annotated[str, typer.Option("--wire", help="Gradients travel as float32, bfloat16 or float16.")]
Master = Annotated[
    str, typer.Option("--master", help="The ps keep half-precision parameters in float32, or as the model has them.")
]
Ledger = Annotated[
    bool,
    typer.Option("--ledger", envvar="PACELINE_LEDGER", help="Write down every gradient's way, for `paceline verify`."),
]
Overlap = Annotated[bool, typer.Option("--overlap", help="Send gradients while backward still runs.")]
Slow = Annotated[
    str,
    typer.Option(
        "--slow", metavar="TASK=Nx,…", help="For studies: worker:1=5x sleeps as if 5 times slower.", callback=_not_empty
    ),
]
Placement = Annotated[str, typer.Option("--placement", help="What lies where: bytes, round_robin or greedy.")]
Lane = Annotated[str, typer.Option("--lane", help="How bytes travel: auto, shm, tcp or grpc (an extra).")]
Data = Annotated[str, typer.Option("--data", help="shard: share the set out; full: every worker sees all of it.")]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="S", help="Seed each worker's random numbers, with a number of its own."),
]
PsHosts = Annotated[str | None, typer.Option("--ps_hosts", metavar="HOST:PORT,…", help="Addresses of job ps.")]
WorkerHosts = Annotated[
    str | None, typer.Option("--worker_hosts", metavar="HOST:PORT,…", help="Addresses of job worker.")
]
SyncCode = Annotated[bool, typer.Option("--sync-code", help="Copy SCRIPT's folder to the hosts first.")]
SaveEvery = Annotated[str, typer.Option("--save-every", help="Checkpoint every 500 (steps), 10m, 30s, or none.")]
Buffers = Annotated[
    str,
    typer.Option(
        "--buffers",
        metavar="mean|chief",
        help="Save models with the workers' mean BatchNorm statistics, or the chief's.",
    ),
]
RunDir = Annotated[
    str | None,
    typer.Option("--run-dir", help="The run folder.  [default: runs/<new>; by hand: none, and nothing is saved]"),
]
LogEvery = Annotated[int, typer.Option("--log-every", help="Print every N-th step; 0: a few lines a second.")]
LogStyle = Annotated[
    str, typer.Option("--log-style", metavar="paceline|tf", help="tf: print lines in the words of TensorFlow 1.")
]
LogPlacement = Annotated[bool, typer.Option("--log-device-placement", help="Print where every variable went.")]
WorkerDevice = Annotated[
    str,
    typer.Option(
        "--worker-device",
        metavar="DEVICE,…",
        help="Where workers compute: /cpu:0; /gpu:0,/gpu:1 in turn; /job:worker/task:1/gpu:0.  [the cards in turn]",
    ),
]
PsDevice = Annotated[
    str, typer.Option("--ps-device", metavar="DEVICE", help="/gpu:0 leaves GPUs visible to the ps.  [hidden]")
]
VirtualGpus = Annotated[
    int, typer.Option("--virtual-gpus", metavar="N", help="N devices /gpu:i on the cards there are, for studies.")
]
SoftPlacement = Annotated[
    bool, typer.Option("--soft-placement/--no-soft-placement", help="Use the CPU where a GPU is missing.")
]
AllowGrowth = Annotated[
    bool, typer.Option("--allow-growth/--no-allow-growth", help="Take GPU memory as needed, or the share at once.")
]
MemoryFraction = Annotated[
    float | None, typer.Option("--gpu-memory-fraction", metavar="F", help="A worker's share of its card's memory.")
]
Keep = Annotated[int, typer.Option("--keep", help="How many checkpoints stay.")]
Resume = Annotated[
    str,
    typer.Option("--resume", metavar="auto|PATH|none", help="Go on from a checkpoint: auto takes the run's newest."),
]
Reseed = Annotated[
    bool, typer.Option("--reseed", help="A ps that lost its memory gets the freshest worker's parameters.")
]
MaxRestarts = Annotated[int, typer.Option("--max-restarts", help="How often a task that failed is started again.")]
LeaseS = Annotated[float, typer.Option("--lease-s", help="Seconds of silence after which a task is out.")]
StallS = Annotated[
    float | None,
    typer.Option("--stall-s", help="Seconds without progress after which it is out; 0: never.  [max(300, 20 steps)]"),
]
SecretFile = Annotated[str | None, typer.Option("--secret-file", help="What all tasks share; readable by you alone.")]
Tls = Annotated[bool, typer.Option("--tls", help="Encrypt what travels on tcp.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="No secret: whoever reaches a port may take part.")]
Chaos = Annotated[
    str,
    typer.Option(
        "--chaos", metavar="FAULTS", help="Inject faults: kill=ps:0@500,stop=worker:1@200:10s,…", callback=_not_empty
    ),
]
ChaosSeed = Annotated[int, typer.Option("--chaos-seed", help="Which random faults.")]
WaitS = Annotated[float, typer.Option("--wait-s", help="Seconds a task waits for the others.")]
On = Annotated[
    str | None,
    typer.Option(
        "--on",
        metavar="ray|ray://HOST|HOST:6379",
        help="Run on a Ray cluster (an extra): the one that is found, by its client port, or on a machine of it.  "
        "[default: this host]",
    ),
]
WorkerCpus = Annotated[float, typer.Option("--worker-cpus", help="With --on ray: CPUs of a worker.")]
WorkerGpus = Annotated[float, typer.Option("--worker-gpus", help="With --on ray: GPUs of a worker.")]
Colocate = Annotated[bool, typer.Option("--colocate", help="With --on ray: every ps on one machine with its workers.")]
ShowLogs = Annotated[
    bool | None,
    typer.Option(
        "--show-logs/--no-show-logs",
        help="Print what tasks print, with their names.  [over several hosts and on Ray]",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")]
Plain = Annotated[
    bool,
    typer.Option(
        "--plain", help="SCRIPT does not use paceline: every task runs it, with TF1's four flags and TF_CONFIG."
    ),
]
Module = Annotated[bool, typer.Option("-m", help="SCRIPT is a module's name, as in python -m.")]
Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script.", show_default=False)]
ScriptArgs = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="SCRIPT's own arguments, passed untouched.")
]


# Every flag that ends up in Settings, in the order of --help; its default is the one in Settings.
SHARED: dict[str, object] = {
    "mode": Mode,
    "replicas_to_aggregate": Replicas,
    "extra_tokens": ExtraTokens,
    "grace_ms": GraceMs,
    "staleness": Staleness,
    "local_steps": LocalSteps,
    "outer": Outer,
    "outer_lr": OuterLr,
    "outer_momentum": OuterMomentum,
    "staleness_scale": StalenessScale,
    "ema": Ema,
    "wire": Wire,
    "master": Master,
    "overlap": Overlap,
    "ledger": Ledger,
    "min_workers": MinWorkers,
    "slow": Slow,
    "placement": Placement,
    "lane": Lane,
    "data": Data,
    "seed": Seed,
    "save_every": SaveEvery,
    "buffers": Buffers,
    "keep": Keep,
    "resume": Resume,
    "reseed": Reseed,
    "max_restarts": MaxRestarts,
    "log_every": LogEvery,
    "log_style": LogStyle,
    "log_device_placement": LogPlacement,
    "worker_device": WorkerDevice,
    "ps_device": PsDevice,
    "virtual_gpus": VirtualGpus,
    "soft_placement": SoftPlacement,
    "allow_growth": AllowGrowth,
    "gpu_memory_fraction": MemoryFraction,
    "lease_s": LeaseS,
    "stall_s": StallS,
    "wait_s": WaitS,
    "tls": Tls,
    "insecure": Insecure,
    "chaos": Chaos,
    "chaos_seed": ChaosSeed,
}


def with_settings(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a command all shared flags after its own; it finds their values in its context's `params`."""
    own = inspect.signature(verb)

    @functools.wraps(verb)
    def called(**params: object) -> None:
        verb(**{name: params[name] for name in own.parameters})

    plain = {**msgspec.structs.asdict(Settings(run_id="")), "min_workers": None}
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=plain[name], annotation=kind)
        for name, kind in SHARED.items()
    ]
    called.__signature__ = own.replace(parameters=[*own.parameters.values(), *shared])  # type: ignore[attr-defined]
    called.__annotations__ = {**verb.__annotations__, **SHARED}
    return called


def settings(params: Mapping[str, object]) -> Settings:
    """Return a command's parameters as Settings; whoever makes the run fills in its id and folder."""
    given = {name: params[name] for name in SHARED}
    if given["lane"] == "inproc":
        raise UsageError("Lane inproc is for tests within one process; use auto, shm or tcp.")
    started = started_workers(params)
    given["ledger"] = bool(given["ledger"] or given["chaos"])  # what faults did must be provable
    if given["min_workers"] is None:
        given["min_workers"] = started or 1
    return msgspec.convert({"run_id": "", "started_workers": started, **given}, Settings)


def started_workers(params: Mapping[str, object]) -> int | None:
    """MIN of --workers MIN:MAX; None where --workers is a number, or was not given.

    >>> started_workers({"workers": "2:6"}), started_workers({"workers": "2"})
    (2, None)
    """
    given = str(params.get("workers") or "")
    return flags.worker_range(given)[0] if ":" in given else None


def num_workers(params: Mapping[str, object]) -> int | None:
    """How many workers the cluster has room for: N, or MAX; None where --workers was not given."""
    given = params.get("workers")
    return None if given is None else flags.worker_range(str(given))[1]


def addresses(text: str | None) -> tuple[str, ...]:
    """Return a flag's list of addresses.

    >>> addresses("a:1, b:2")
    ('a:1', 'b:2')
    """
    stripped = (text or "").strip("\"'")
    return tuple(part.strip() for part in stripped.split(",") if part.strip())
