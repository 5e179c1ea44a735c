"""Gather the optimizer's state, which lies in pieces on the ps, and scatter it to them.

Used by the training steps of frameworks/ for what a script reads and writes, and by checkpoints. No framework: bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from paceline.params.layout import ITEM_BYTES, Layout
from paceline.params.placement import Plan
from paceline.transport.base import Buffer
from paceline.wire import messages as m
from paceline.worker.requests.link import Link

MAX_SLOTS = 8  # state tensors a parameter, more than any torch optimizer has
COUNTERS = ("step", "mu_product")  # optimizer state that is one number, whatever the shape of its parameter


class WholeSlot:
    """One optimizer slot of one tensor: its bytes in storage order, or one number."""

    def __init__(self, dtype: str, is_scalar: bool, data: bytearray) -> None:
        self.dtype = dtype
        self.is_scalar = is_scalar
        self.data = data


Slots = dict[int, dict[str, WholeSlot]]  # trained tensor -> slot name -> value


def gather(links: Sequence[Link], layout: Layout) -> Slots:
    """Fetch all optimizer state of the cluster, tensor by tensor."""
    return assemble([link.ask_bulk(m.Fetch("slots"), m.Fetched, limit_of(link.into.nbytes)) for link in links], layout)


def limit_of(shard_bytes: int) -> int:
    """Return how many bytes of optimizer state a shard of that size can have."""
    return MAX_SLOTS * 2 * shard_bytes + (1 << 20)


def assemble(fetched: Sequence[tuple[m.Fetched, bytearray]], layout: Layout) -> Slots:
    """Put the state of every tensor together from what each ps has sent."""
    slots: Slots = {}
    for reply, block in fetched:
        for entry in reply.slots:
            spec = layout.trained[entry.tensor]
            size = entry.size_bytes if entry.is_scalar else spec.numel * ITEM_BYTES[entry.dtype]
            named = slots.setdefault(entry.tensor, {})
            whole = named.setdefault(entry.slot, WholeSlot(entry.dtype, entry.is_scalar, bytearray(size)))
            start = 0 if entry.is_scalar else entry.start * ITEM_BYTES[entry.dtype]
            whole.data[start : start + entry.size_bytes] = block[entry.offset : entry.offset + entry.size_bytes]
    return slots


class Asked(Protocol):
    """One ps that can be asked."""

    index: int

    def ask(self, request: m.Request, *, bulk: Sequence[Buffer] = ()) -> object: ...


def scatter(links: Sequence[Asked], plan: Plan, slots: Mapping[int, Mapping[str, WholeSlot]]) -> None:
    """Send each ps the pieces that it owns."""
    for link in links:
        pieces = plan.shards[link.index]
        entries: list[m.SlotEntry] = []
        block = bytearray()
        for piece in pieces:
            for name, whole in slots.get(piece.tensor, {}).items():
                item = ITEM_BYTES[whole.dtype]
                data = whole.data if whole.is_scalar else whole.data[piece.start * item : piece.stop * item]
                span = (piece.tensor, piece.start, piece.stop)
                entries.append(m.SlotEntry(*span, name, whole.dtype, whole.is_scalar, len(block), len(data)))
                block += data
        link.ask(m.Assign("slots", entries), bulk=[block] if block else [])
