"""Write torch gradients into the slots that ps and worker share, or send them from where they lie.

Used by frameworks/torch/training_step; worker/step/outgoing has what every framework shares. Autograd owns gradients:
those that are sent from where they lie are held only until the answer has come, in case they must be sent once more.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from paceline.params.arena import mover
from paceline.params.layout import ITEM_BYTES, Layout
from paceline.params.placement import Plan
from paceline.transport.base import Buffer
from paceline.views import as_bytes, flat, shaped, storage_order
from paceline.worker.requests.link import Link
from paceline.worker.step import outgoing

SMALL_BYTES = 1 << 20  # a shard up to this size is copied together before it is sent on tcp
MOVE_BYTES = 1 << 20  # larger tensors are copied by torch, on all its threads; others by the system's library

Gradients = Sequence[torch.Tensor | None]


class Outgoing(outgoing.Outgoing):
    """Slots, seen by torch. Gradients of an accelerator must come to the host, and small ones are sent faster in one
    piece; all others are sent from where they lie on a lane without shared memory."""

    def __init__(self, links: Sequence[Link], layout: Layout, plan: Plan, device: torch.device, wire: str) -> None:
        is_on_host = device.type == "cpu"
        super().__init__(links, layout, plan, wire, is_on_host and max(plan.shard_bytes) > SMALL_BYTES)
        self._sent_as_is = sorted({piece.tensor for s in self.direct for piece in plan.shards[s]})
        self._last: list[tuple[torch.Tensor | None, int]] = []  # what was sent as it lay, and its count of changes
        self._move = mover()
        self._moved: list[tuple[int, torch.Tensor, tuple[int, ...], int, int]] = []  # with stride, address and size
        self._copied: list[torch.Tensor] = []
        self._order: list[int] = []
        for index, view in self._whole:
            if is_on_host and not self._casts and view.nbytes <= MOVE_BYTES:
                self._moved.append((index, view, view.stride(), view.data_ptr(), view.nbytes))
            else:
                self._copied.append(view)
                self._order.append(index)

    def _vector(self, memory: memoryview, dtype: str, offset: int, numel: int) -> torch.Tensor:
        return flat(memory, dtype, offset, numel)

    def _shaped(self, tensor: int, vector: torch.Tensor) -> torch.Tensor:
        spec = self._layout.trained[tensor]
        return shaped(vector, spec.shape, spec.stride)

    def _is_finite(self, values: torch.Tensor) -> bool:
        return bool(torch.isfinite(values).all())

    def write(
        self, gradients: Sequence[Any], has_gaps: bool, sent: Collection[int] = ()
    ) -> tuple[Sequence[Sequence[Buffer]], bool]:
        gradient: Any  # where nothing is missing it is a tensor
        if has_gaps:
            pairs = [(view, g) for i, view in self._whole if (g := gradients[i]) is not None]
            if pairs:
                torch._foreach_copy_([v for v, _ in pairs], [g for _, g in pairs])
        else:
            for index, view, stride, address, size in self._moved:
                gradient = gradients[index]
                # A subclass may keep its numbers elsewhere, and the sign of a gradient may still be to be turned.
                is_plain = type(gradient) is torch.Tensor and gradient.layout is torch.strided
                if is_plain and gradient.stride() == stride and not gradient.is_neg():
                    self._move(address, gradient.data_ptr(), size)
                else:
                    view.copy_(gradient)
            if self._copied:
                torch._foreach_copy_(self._copied, [gradients[i] for i in self._order])
        for index, start, stop, vector in self._cut:
            gradient = gradients[index]
            if gradient is not None:
                vector.copy_(self.as_laid_out(index, gradient)[start:stop])
        if not self.direct:
            return self._payloads, self._looks_finite(self._sums)
        self._last = [(g, 0 if g is None else g._version) for g in gradients]
        payloads = list(self._payloads)
        for shard in () if sent else self.direct:
            payloads[shard] = self._buffers(shard, gradients)
        as_is = [g for i in self._sent_as_is if (g := gradients[i]) is not None]
        return payloads, self._looks_finite([*self._sums, *as_is])

    def again(self, shard: int) -> Sequence[Buffer] | None:
        if shard not in self.direct:
            return super().again(shard)
        if not self._last or any(g is not None and g._version != version for g, version in self._last):
            return None
        return self._buffers(shard, [g for g, _ in self._last])

    def forget(self) -> None:
        self._last = []

    def _looks_finite(self, vectors: Sequence[torch.Tensor]) -> bool:
        """Look for a NaN or an infinity with one sum, at a thirtieth of the price of isfinite."""
        total = 0.0
        for vector in vectors:
            total += (vector.sum(dtype=torch.float32) if self._casts else vector.sum()).item()
        return math.isfinite(total)

    def as_laid_out(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """View a gradient as a flat vector in the order in which its parameter lies in memory; copy it if need be."""
        spec = self._layout.trained[index]
        if gradient.stride() != spec.stride:
            ordered = torch.empty_strided(spec.shape, spec.stride, dtype=gradient.dtype, device=gradient.device)
            gradient = ordered.copy_(gradient)
        return storage_order(gradient)

    def _buffers(self, shard: int, gradients: Gradients) -> list[Buffer]:
        """View a shard's bytes on its gradients: pieces, and zeros where there are none or between them."""
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
