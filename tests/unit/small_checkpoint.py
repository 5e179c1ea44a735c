"""A small checkpoint: every dtype, an empty tensor, a scalar, and a state with everything in it."""

from pathlib import Path

import msgspec
import numpy as np

from paceline.checkpoint.state import ShardState, State, WorkerState
from paceline.checkpoint.store import write
from paceline.checkpoint.tensors import SAFETENSORS_DTYPES, Entry
from paceline.modes.spec import ModeSpec
from paceline.params.layout import ITEM_BYTES

STATE = State(
    run_id="run-1",
    global_step=1200,
    mode=ModeSpec(name="sync", replicas_to_aggregate=2, grace_ms=5.0),
    optimizer="Adam",
    groups=[{"lr": 0.1, "betas": [0.9, 0.999]}],
    paceline="0.1.0",
    turn=3,
    lineage=2,
    seed=77,
    num_ps=2,
    num_workers=2,
    shards=[
        ShardState(index=0, version=1200, applied={0: (1, 600), 1: (65537, 599)}),
        ShardState(index=1, version=1200),
    ],
    workers=[
        WorkerState(index=0, epoch=3, batch=17, steps=600, schedulers=[{"last_epoch": 3, "milestones": {30: 1}}, None]),
        WorkerState(index=1, epoch=3, batch=16, steps=599, groups=[{"lr": float("inf")}]),
    ],
)


def filled(seed: int) -> dict[str, Entry]:
    """A tensor of every dtype, one without elements and a scalar; other seeds, other bytes."""
    dice = np.random.default_rng(seed)
    tensors = {
        dtype: Entry(dtype, (3, 5), dice.integers(0, 2, 15 * ITEM_BYTES[dtype], dtype=np.uint8).tobytes())
        for dtype in SAFETENSORS_DTYPES
    }
    tensors["empty"] = Entry("float32", (0, 3), b"")
    tensors["scalar"] = Entry("float64", (), dice.bytes(8))
    return tensors


def write_step(folder: Path, step: int, seed: int | None = None, lineage: int = 0) -> Path:
    """checkpoints/step-N, with optimizer, averages and workers."""
    state = msgspec.structs.replace(STATE, global_step=step, lineage=lineage)
    seed = step if seed is None else seed
    return write(folder, filled(seed), filled(seed + 1), state, averages=filled(seed + 2), workers=filled(seed + 3))
