"""Lay out where a worker's gradients leave: slots that ps and worker share, or memory that is sent from.

The part that every framework shares, made again whenever a ps gives another slot. frameworks/torch/gradients and
frameworks/keras/gradients bring the views on that memory and copy into them. What is sent stays where it is until the
answer has come, so it can be sent once more.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from paceline.params.arena import Arena
from paceline.params.layout import ITEM_BYTES, Layout
from paceline.params.placement import Piece, Plan
from paceline.params.recast import Recast, wire_casts
from paceline.transport.base import Buffer
from paceline.worker.requests.link import Link

Gradients = Sequence[Any]  # one a trained tensor, or None


class Outgoing(ABC):
    """Views on the slots of one worker. `wire`: the dtype in which gradients travel, if it is narrower than theirs.
    `sends_as_is`: a shard without a shared slot is sent from where its gradients lie, unless they are cast."""

    def __init__(self, links: Sequence[Link], layout: Layout, plan: Plan, wire: str, sends_as_is: bool = False) -> None:
        self._layout = layout
        self._plan = plan
        self._casts = wire_casts(wire)
        self._whole: list[tuple[int, Any]] = []  # tensors that one shard has, with their view
        self._cut: list[tuple[int, int, int, Any]] = []  # parts of the others: tensor, start, stop, view
        self._sums: list[Any] = []  # all that the slots hold, a vector for each dtype
        self._payloads: list[Sequence[Buffer]] = []  # of each shard's frame
        self.direct: list[int] = []  # shards that are sent from where their gradients lie
        for shard, (link, pieces) in enumerate(zip(links, plan.shards, strict=True)):
            recast = Recast(layout, pieces, plan.shard_bytes[shard], self._casts)
            slot = None if link.slot is None else link.slot[: recast.size_bytes]
            link.slot_bytes = 0 if slot is None else recast.size_bytes
            if slot is None and pieces and sends_as_is and recast.is_same:
                self.direct.append(shard)
            elif pieces:
                slot = Arena.private(recast.size_bytes).memory if slot is None else slot
                self._view(slot, pieces, recast)
            self._payloads.append(() if link.shares_memory or slot is None or not pieces else (slot,))

    def _view(self, slot: memoryview, pieces: Sequence[Piece], recast: Recast) -> None:
        trained = self._layout.trained
        for dtype in sorted({trained[p.tensor].dtype for p in pieces}):
            same = [p for p in pieces if trained[p.tensor].dtype == dtype]
            first, last = same[0], same[-1]
            numel = (last.offset - first.offset) // ITEM_BYTES[dtype] + last.numel
            self._sums.append(self._vector(slot, recast.dtype(dtype), recast.offset(first.offset), numel))
        for piece in pieces:
            spec = trained[piece.tensor]
            vector = self._vector(slot, recast.dtype(spec.dtype), recast.offset(piece.offset), piece.numel)
            if piece.numel == spec.numel:
                self._whole.append((piece.tensor, self._shaped(piece.tensor, vector)))
            else:
                self._cut.append((piece.tensor, piece.start, piece.stop, vector))

    @abstractmethod
    def _vector(self, memory: memoryview, dtype: str, offset: int, numel: int) -> Any:
        """View `numel` numbers at byte `offset` of this memory."""

    @abstractmethod
    def _shaped(self, tensor: int, vector: Any) -> Any:
        """View a vector with the shape that this tensor has in the model."""

    @abstractmethod
    def _is_finite(self, values: Any) -> bool:
        """Tell whether none of these numbers is a NaN or an infinity."""

    @abstractmethod
    def write(
        self, gradients: Gradients, has_gaps: bool, sent: Collection[int] = ()
    ) -> tuple[Sequence[Sequence[Buffer]], bool]:
        """Copy the gradients into the slots; with `has_gaps` some are None. Return what the frame of each shard carries
        (nothing on the `sent` shards, which have it already), and whether all numbers are surely finite."""

    def again(self, shard: int) -> Sequence[Buffer] | None:
        """Return what the last push carried to this shard, bit for bit; None if that is gone."""
        return self._payloads[shard]

    def forget(self) -> None:  # noqa: B027 (slots hold it until the next push)
        """Let go of what was sent as it lay: its answer has come."""

    def not_finite(self, gradients: Gradients) -> list[str]:
        """Name the tensors with a NaN or an infinity; none if only the sum of large numbers has overflowed."""
        trained = self._layout.trained
        bad = [i for i, g in enumerate(gradients) if g is not None and not self._is_finite(g)]
        if bad:
            return [trained[i].name for i in bad]
        sent = [*self._whole, *((i, part) for i, _, _, part in self._cut)]
        bad = sorted({i for i, part in sent if gradients[i] is not None and not self._is_finite(part)})
        dtypes = {i: self._casts.get(trained[i].dtype, trained[i].dtype) for i in bad}
        return [f"{trained[i].name} (as {dtypes[i]} on the wire)" for i in bad]
