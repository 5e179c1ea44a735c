"""WHAT is saved that is not a tensor? The state.json of a checkpoint: where training was, in numbers and names.

Made by the worker that saves, read by the one that resumes and by `paceline ckpt`. Pure: bytes in, values out.
JSON has neither infinities nor keys that are numbers, but schedulers' states do: `spelled` writes those so that they
come back as they were (a tuple comes back as a list).
"""

import math
from collections.abc import Callable

import msgspec

from paceline.checkpoint.loop import UNKNOWN, Loop, loop_of
from paceline.checkpoint.manifest import STATE_JSON, decoded
from paceline.errors import CheckpointError
from paceline.modes.spec import ModeSpec

FLOAT, PAIRS = "$float", "$pairs"  # {"$float": "inf"} · {"$pairs": [[30, 1]]}


class ShardState(msgspec.Struct, frozen=True, kw_only=True):
    """One ps as it was copied: its version, and the last push it applied of each worker, (incarnation, push id)."""

    index: int
    version: int
    applied: dict[int, tuple[int, int]] = {}


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """Where one worker was at the loop boundary after the saved version."""

    index: int
    epoch: int = 0
    batch: int = 0  # batches taken in this epoch
    steps: int = 0
    passes: int = 0  # which pass over the loader that was
    at: str = ""  # the kind of boundary: wire/messages EPOCH, STEP, BATCH
    schedulers: list[dict[str, object] | None] = []  # state_dict()s in the order of prepare; None: cannot be JSON
    groups: list[dict[str, object]] | None = None  # options of this worker's optimizer, where they are its own
    samples: float | None = 0.0  # in all gradients that it has pushed, beside others; None: not known
    done: int = 0  # passes that were taken to their end
    loop: dict[str, str | int] = {}  # which loop of the script takes them: checkpoint/loop


class State(msgspec.Struct, frozen=True, kw_only=True):
    """All of state.json. What has a default may be missing in a file."""

    run_id: str
    global_step: int
    mode: ModeSpec
    optimizer: str  # its class
    groups: list[dict[str, object]]
    paceline: str  # the version that wrote it
    turn: int = 0  # of the dial: how often the mode was changed
    lineage: int = 0
    seed: int | None = None
    num_ps: int = 1
    num_workers: int = 1
    shards: list[ShardState] = []
    workers: list[WorkerState] = []

    @property
    def loop(self) -> Loop:
        """The loop of the script that made these steps; of several workers' loops, one that begins again."""
        loops = [loop_of(worker.loop) for worker in self.workers]
        return next((loop for loop in loops if loop.begins_again), loops[0] if loops else UNKNOWN)

    def worker(self, index: int) -> WorkerState | None:
        """Where that worker was; None when it was not there."""
        return next((w for w in self.workers if w.index == index), None)


def encode(state: State) -> bytes:
    """The bytes of state.json; CheckpointError when an option or a scheduler holds what JSON cannot say."""
    try:
        return msgspec.json.format(msgspec.json.encode(_with_options(state, spelled)))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{STATE_JSON} cannot be written: {error}.") from None


def decode(content: bytes | memoryview) -> State:
    """What state.json says; CheckpointError when that is not a State."""
    try:
        return _with_options(decoded(content, State, STATE_JSON), unspelled)
    except RecursionError:
        raise CheckpointError(f"{STATE_JSON}: its values are nested too deep.") from None


def _with_options(state: State, change: Callable[[object], object]) -> State:
    """The state with every value that a user's optimizer or scheduler chose written in the other way."""

    def options(said: dict[str, object]) -> dict[str, object]:
        return {name: change(value) for name, value in said.items()}

    workers = [
        msgspec.structs.replace(
            worker,
            schedulers=[None if s is None else options(s) for s in worker.schedulers],
            groups=None if worker.groups is None else [options(g) for g in worker.groups],
        )
        for worker in state.workers
    ]
    return msgspec.structs.replace(state, groups=[options(g) for g in state.groups], workers=workers)


def spelled(value: object) -> object:
    """The same value in JSON's means.

    >>> spelled({"best": float("inf"), "milestones": {30: 1}})
    {'best': {'$float': 'inf'}, 'milestones': {'$pairs': [[30, 1]]}}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: repr(value)}
    if isinstance(value, (list, tuple)):
        return [spelled(each) for each in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: spelled(each) for key, each in value.items()}
        return {PAIRS: [[spelled(key), spelled(each)] for key, each in value.items()]}
    return value


def unspelled(value: object) -> object:
    """The way back.

    >>> unspelled({"best": {"$float": "inf"}, "milestones": {"$pairs": [[30, 1]]}})
    {'best': inf, 'milestones': {30: 1}}
    """
    if isinstance(value, list):
        return [unspelled(each) for each in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$float": "inf" | "-inf" | "nan" as said} if len(value) == 1:
            return float(said)
        case {"$pairs": list(pairs)} if len(value) == 1 and all(_is_pair(pair) for pair in pairs):
            return {key: unspelled(each) for key, each in pairs}
    return {key: unspelled(each) for key, each in value.items()}


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], (int, float, str, bool))
