"""HOW does a gradient leave? Into the slot that ps and worker share, or onto the wire from where it lies.

Used by frameworks/torch/training_step, one a model, after the client has joined. Autograd owns gradients: those that
are sent from where they lie are held only until the answer is here, in case they must be sent once more.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from paceline.params.arena import Arena, mover
from paceline.params.layout import ITEM_BYTES, Layout
from paceline.params.placement import Plan
from paceline.params.recast import Recast, wire_casts
from paceline.transport.base import Buffer
from paceline.views import as_bytes, flat, shaped, storage_order
from paceline.worker.link import Link

SMALL_BYTES = 1 << 20  # a shard up to this size is copied together before it is sent on tcp
MOVE_BYTES = (
    1 << 20
)  # tensors up to this size are moved by the system's library; larger ones by torch, on all its threads

Gradients = Sequence[torch.Tensor | None]


class Outgoing:
    """The slots of one worker as its gradients see them; `wire` is the dtype they travel in, if it is narrower."""

    def __init__(self, links: Sequence[Link], layout: Layout, plan: Plan, device: torch.device, wire: str) -> None:
        self._layout = layout
        self._plan = plan
        casts = wire_casts(wire)
        self.recasts = [Recast(layout, p, b, casts) for p, b in zip(plan.shards, plan.shard_bytes, strict=True)]
        is_small = max(plan.shard_bytes) <= SMALL_BYTES
        self.slots: list[memoryview | None] = []
        for link, pieces, recast in zip(links, plan.shards, self.recasts, strict=True):
            slot = None if link.slot is None else link.slot[: recast.size_bytes]
            link.slot_bytes = 0 if slot is None else recast.size_bytes
            if slot is None and (device.type != "cpu" or is_small or not recast.is_same):
                # Gradients of an accelerator must come to the host, what is cast must lie somewhere, and little ones
                # are sent faster in one piece.
                slot = Arena.private(recast.size_bytes).memory
            self.slots.append(slot if pieces else None)
        self._whole: list[tuple[int, torch.Tensor]] = []
        self._cut: list[tuple[int, int, int, torch.Tensor]] = []
        self._sums: list[torch.Tensor] = []
        for slot, pieces, recast in zip(self.slots, plan.shards, self.recasts, strict=True):
            if slot is not None:
                self._view(slot, pieces, recast)
        self._is_cast = not all(recast.is_same for recast in self.recasts)
        self.direct = [s for s, pieces in enumerate(plan.shards) if pieces and self.slots[s] is None]
        self._sent_as_is = sorted({piece.tensor for s in self.direct for piece in plan.shards[s]})
        self._payloads: list[Sequence[Buffer]] = [
            () if link.shares_memory or slot is None else (slot,) for link, slot in zip(links, self.slots, strict=True)
        ]
        self._last: list[
            tuple[torch.Tensor | None, int]
        ] = []  # what was sent as it lay, and autograd's count of changes
        self._move = mover()
        self._moved: list[tuple[int, torch.Tensor, int, int]] = []  # with address and size
        self._every: list[torch.Tensor] = []
        self._order: list[int] = []
        for index, view in self._whole:
            if device.type == "cpu" and not self._is_cast and view.nbytes <= MOVE_BYTES:
                self._moved.append((index, view, view.data_ptr(), view.nbytes))
            else:
                self._every.append(view)
                self._order.append(index)

    def _view(self, slot: memoryview, pieces: Sequence[Any], recast: Recast) -> None:
        trained = self._layout.trained
        for dtype in sorted({trained[p.tensor].dtype for p in pieces}):
            same = [p for p in pieces if trained[p.tensor].dtype == dtype]
            first, last = same[0], same[-1]
            numel = (last.offset - first.offset) // ITEM_BYTES[dtype] + last.numel
            self._sums.append(flat(slot, recast.dtype(dtype), recast.offset(first.offset), numel))
        for piece in pieces:
            spec = trained[piece.tensor]
            vector = flat(slot, recast.dtype(spec.dtype), recast.offset(piece.offset), piece.numel)
            if piece.numel == spec.numel:
                self._whole.append((piece.tensor, shaped(vector, spec.shape, spec.stride)))
            else:
                self._cut.append((piece.tensor, piece.start, piece.stop, vector))

    def write(
        self, gradients: Gradients, has_gaps: bool, sent: Collection[int] = ()
    ) -> tuple[Sequence[Sequence[Buffer]], bool]:
        """Into the slots. Returns what each shard's frame carries (nothing, if it is `sent` already), and whether all
        is surely finite."""
        self._copy(gradients, has_gaps)
        if not self.direct:
            return self._payloads, self._looks_finite(self._sums)
        self._last = [(g, g._version if g is not None else 0) for g in gradients]
        payloads = list(self._payloads)
        for shard in self.direct if not sent else ():
            payloads[shard] = self._buffers(shard, gradients)
        return payloads, self._looks_finite(
            [*self._sums, *(g for i in self._sent_as_is if (g := gradients[i]) is not None)]
        )

    def again(self, shard: int) -> Sequence[Buffer] | None:
        """What the last push carried to this shard, bit for bit; None: a gradient was changed since."""
        if shard not in self.direct:
            return self._payloads[shard]
        if not self._last or any(g is not None and g._version != version for g, version in self._last):
            return None
        return self._buffers(shard, [g for g, _ in self._last])

    def forget(self) -> None:
        """The answer is here: nothing will be sent again."""
        if self._last:
            self._last = []

    def _looks_finite(self, vectors: Sequence[torch.Tensor]) -> bool:
        """One sum finds a NaN or an infinity for a thirtieth of the price of isfinite."""
        total = 0.0
        for vector in vectors:
            total += (vector.sum(dtype=torch.float32) if self._is_cast else vector.sum()).item()
        return math.isfinite(total)

    def not_finite(self, gradients: Gradients) -> list[str]:
        """The tensors with a NaN or an infinity; none, if only the sum of large numbers overflowed."""
        names = [t.name for t in self._layout.trained]
        bad = [i for i, g in enumerate(gradients) if g is not None and not bool(torch.isfinite(g).all())]
        if bad or not self._is_cast:
            return [names[i] for i in bad]
        sent = [(i, view) for i, view in self._whole] + [(i, view) for i, _, _, view in self._cut]
        cast = {i for i, view in sent if gradients[i] is not None and not bool(torch.isfinite(view).all())}
        return [f"{names[i]} (as {self.dtype_of(i)} on the wire)" for i in sorted(cast)]

    def dtype_of(self, tensor: int) -> str:
        return self.recasts[0].dtype(self._layout.trained[tensor].dtype)

    def _copy(self, gradients: Gradients, has_gaps: bool) -> None:
        """Into the slots: whole tensors in one call, cut ones piece by piece in the order they lie in memory."""
        if self._whole:
            if has_gaps:
                pairs = [(view, g) for i, view in self._whole if (g := gradients[i]) is not None]
                if pairs:
                    torch._foreach_copy_([v for v, _ in pairs], [g for _, g in pairs])
            else:
                self._copy_all(gradients)
        for index, start, stop, vector in self._cut:
            gradient = gradients[index]
            if gradient is not None:
                vector.copy_(self.as_laid_out(index, gradient)[start:stop])

    def _copy_all(self, gradients: Sequence[Any]) -> None:
        for index, view, address, size in self._moved:
            gradient = gradients[index]
            if _lies_as(gradient, view):
                self._move(address, gradient.data_ptr(), size)
            else:
                view.copy_(gradient)
        if self._every:
            torch._foreach_copy_(self._every, [gradients[i] for i in self._order])

    def as_laid_out(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient as a flat vector in the order in which its parameter lies in memory."""
        spec = self._layout.trained[index]
        if gradient.stride() != spec.stride:
            ordered = torch.empty_strided(spec.shape, spec.stride, dtype=gradient.dtype, device=gradient.device)
            gradient = ordered.copy_(gradient)
        return storage_order(gradient)

    def _buffers(self, shard: int, gradients: Gradients) -> list[Buffer]:
        """A shard's bytes straight from the gradients: pieces, and zeros where there are none or between them."""
        buffers: list[Buffer] = []
        position = 0
        for piece in self._plan.shards[shard]:
            spec, gradient = self._layout.trained[piece.tensor], gradients[piece.tensor]
            if piece.offset > position:
                buffers.append(bytes(piece.offset - position))
            size = piece.numel * ITEM_BYTES[spec.dtype]
            if gradient is None:
                buffers.append(bytes(size))
            else:
                buffers.append(as_bytes(self.as_laid_out(piece.tensor, gradient)[piece.start : piece.stop]))
            position = piece.offset + size
        if position < self._plan.shard_bytes[shard]:
            buffers.append(bytes(self._plan.shard_bytes[shard] - position))
        return buffers


def _lies_as(gradient: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether its bytes, as they lie, are those of `view`: not of a subclass, which may keep its numbers elsewhere,
    nor with other strides, nor if its sign is still to be turned.

    >>> _lies_as(torch.ones(2, 3), torch.zeros(2, 3)), _lies_as(torch.ones(3, 2).t(), torch.zeros(2, 3))
    (True, False)
    """
    is_plain = type(gradient) is torch.Tensor and gradient.layout is torch.strided
    return is_plain and gradient.stride() == view.stride() and not gradient.is_neg()
