"""WHICH slice lives on which ps? A rule (bytes, round_robin, greedy) turns a layout into a plan.

Called by every worker and every ps on the same layout, so it must be deterministic and pure.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from paceline.errors import UsageError
from paceline.params.layout import ITEM_BYTES, Layout, TensorSpec, align


class Piece(msgspec.Struct, frozen=True):
    """Elements start..stop of trained tensor `tensor`, at byte `offset` of its shard."""

    tensor: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Plan(msgspec.Struct, frozen=True):
    """The pieces of every shard. The shards one after the other are the worker's arena."""

    shards: tuple[tuple[Piece, ...], ...]
    shard_bytes: tuple[int, ...]

    @property
    def num_ps(self) -> int:
        return len(self.shards)

    @property
    def total_bytes(self) -> int:
        return sum(self.shard_bytes)

    def base(self, shard: int) -> int:
        """The byte in the arena at which a shard starts."""
        return sum(self.shard_bytes[:shard])

    def tensor_offsets(self) -> dict[int, int]:
        """Arena byte at which each tensor starts. INVARIANT: the pieces of a tensor lie side by side."""
        offsets: dict[int, int] = {}
        for shard, pieces in enumerate(self.shards):
            base = self.base(shard)
            for piece in pieces:
                if piece.start == 0:
                    offsets[piece.tensor] = base + piece.offset
        return offsets

    def owners(self, tensor: int) -> list[tuple[int, Piece]]:
        """The shards that hold a tensor, with the piece each one has."""
        return [(s, p) for s, pieces in enumerate(self.shards) for p in pieces if p.tensor == tensor]


def place(layout: Layout, num_ps: int, rule: str) -> Plan:
    """The plan for a layout.

    >>> layout = Layout((TensorSpec("w", (64,), (1,), "float32", 0),))
    >>> place(layout, 2, "bytes").shard_bytes
    (128, 128)
    """
    if rule not in PLACEMENTS:
        raise UsageError(f"unknown placement '{rule}': use one of {', '.join(PLACEMENTS)}")
    return PLACEMENTS[rule](layout.trained, num_ps)


def _even_bytes(tensors: Sequence[TensorSpec], num_ps: int) -> Plan:
    """Lay all tensors out in a row and cut the row into equal parts, at multiples of 64 bytes, and where a tensor may
    be cut."""
    total = sum(align(t.size_bytes) for t in tensors)
    cuts = [_allowed(tensors, align(total * i // num_ps)) for i in range(num_ps + 1)]
    shards: list[list[Piece]] = [[] for _ in range(num_ps)]
    position = 0
    for index, tensor in enumerate(tensors):
        item = ITEM_BYTES[tensor.dtype]
        end = position + tensor.size_bytes
        for shard in range(num_ps):
            low, high = max(position, cuts[shard]), min(end, cuts[shard + 1])
            if low < high:
                piece = Piece(index, (low - position) // item, (high - position) // item, low - cuts[shard])
                shards[shard].append(piece)
        position += align(tensor.size_bytes)
    sizes = tuple(high - low for low, high in pairwise(cuts))
    return Plan(tuple(tuple(s) for s in shards), sizes)


def _allowed(tensors: Sequence[TensorSpec], cut: int) -> int:
    """Return the place nearest to `cut` at which the tensor that lies there may be cut."""
    position = 0
    for tensor in tensors:
        end = position + align(tensor.size_bytes)
        if position < cut < end and tensor.cut_every > 1:
            every = tensor.cut_every * ITEM_BYTES[tensor.dtype]
            nearest = round((cut - position) / every) * every
            return position + nearest if nearest < tensor.size_bytes else end
        position = end
    return cut


def _round_robin(tensors: Sequence[TensorSpec], num_ps: int) -> Plan:
    """Tensor i goes to ps i mod n, whatever its size: TensorFlow's replica_device_setter."""
    return _whole_tensors(tensors, [i % num_ps for i in range(len(tensors))], num_ps)


def _greedy(tensors: Sequence[TensorSpec], num_ps: int) -> Plan:
    """The largest tensor first, each to the ps that has least; no tensor is cut."""
    load = [0] * num_ps
    owner = [0] * len(tensors)
    for index in sorted(range(len(tensors)), key=lambda i: (-tensors[i].size_bytes, i)):
        owner[index] = load.index(min(load))
        load[owner[index]] += align(tensors[index].size_bytes)
    return _whole_tensors(tensors, owner, num_ps)


def _whole_tensors(tensors: Sequence[TensorSpec], owner: Sequence[int], num_ps: int) -> Plan:
    shards: list[list[Piece]] = [[] for _ in range(num_ps)]
    sizes = [0] * num_ps
    for index, tensor in enumerate(tensors):
        shard = owner[index]
        shards[shard].append(Piece(index, 0, tensor.numel, sizes[shard]))
        sizes[shard] += align(tensor.size_bytes)
    return Plan(tuple(tuple(s) for s in shards), tuple(sizes))


PLACEMENTS: dict[str, Callable[[Sequence[TensorSpec], int], Plan]] = {
    "bytes": _even_bytes,
    "round_robin": _round_robin,
    "greedy": _greedy,
}


def table(layout: Layout, plan: Plan) -> list[str]:
    """The lines of --log-device-placement: a variable's slice and the task that holds it."""
    lines = []
    for index, tensor in enumerate(layout.trained):
        for shard, piece in plan.owners(index):
            cut = "" if piece.numel == tensor.numel else f"[{piece.start}:{piece.stop}]"
            size = piece.numel * ITEM_BYTES[tensor.dtype]
            device = f"/job:ps/replica:0/task:{shard}/device:CPU:0"
            lines.append(f"{tensor.name}{cut}: (Variable {tensor.dtype}{list(tensor.shape)}, {size} bytes): {device}")
    return lines
