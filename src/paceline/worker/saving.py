"""WHAT goes into a checkpoint? The ps' parameters, carried tensors and optimizer state, whole again.

Called by ctx.save and by the worker that ends last. No framework: bytes from the ps go into files.
"""

from pathlib import Path
from typing import Protocol

import msgspec

from paceline.checkpoint.store import Entry, State, in_c_order, write
from paceline.params.arena import Arena
from paceline.params.layout import Layout
from paceline.params.placement import Plan
from paceline.version import VERSION
from paceline.wire import messages as m
from paceline.worker.client import Client
from paceline.worker.slots import gather


class Saved(Protocol):
    """What is saved: any framework's trainee."""

    layout: Layout
    plan: Plan
    client: Client
    spec: m.OptimizerSpec


def save(trainee: Saved, folder: Path, run_id: str, mode: str, has_averages: bool = False) -> Path:
    """Fetch everything and write checkpoints/step-N."""
    layout, links = trainee.layout, trainee.client.links
    model, version = _fetch(trainee, "parameters")
    averages = _fetch(trainee, "ema")[0] if has_averages else None
    _, carried = links[0].ask_bulk(m.Fetch("carried"), layout.carried_bytes)
    for spec, offset in zip(layout.carried, layout.carried_offsets, strict=True):
        model[spec.name] = in_c_order(spec, memoryview(carried)[offset:])
    optimizer = {}
    for tensor, named in gather(links, layout).items():
        spec = layout.trained[tensor]
        for slot, whole in named.items():
            entry = Entry(whole.dtype, (), bytes(whole.data))
            if not whole.is_scalar:
                entry = in_c_order(msgspec.structs.replace(spec, dtype=whole.dtype), memoryview(whole.data))
            optimizer[f"{spec.name}.{slot}"] = entry
    groups: list[dict[str, object]] = [dict(g) for g in trainee.spec.groups]
    state = State(run_id, version, mode, trainee.spec.name, groups, VERSION)
    return write(folder, model, optimizer, state, averages)


def _fetch(trainee: Saved, what: str) -> tuple[dict[str, Entry], int]:
    """All trained tensors, or their averages, and the global step they are of."""
    plan, links = trainee.plan, trainee.client.links
    arena = Arena.private(plan.total_bytes).memory
    version = 0
    for link in links:
        base = plan.base(link.index)
        reply, block = link.ask_bulk(m.Fetch(what), link.into.nbytes)
        arena[base : base + link.into.nbytes] = block
        if link.index == 0 and isinstance(reply, m.Fetched):
            version = reply.version
    offsets = plan.tensor_offsets()
    tensors = enumerate(trainee.layout.trained)
    return {s.name: in_c_order(s, arena[offsets.get(i, 0) :]) for i, s in tensors}, version
