"""HOW does a Keras gradient leave? Into the slot that ps and worker share, or into memory that is sent from.

Used by frameworks/keras/training_step, one a model, after the client has joined. numpy: the gradients come as arrays on
TensorFlow's own memory. What is sent stays in its slot until the answer is here, so it can be sent once more.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from paceline.frameworks.keras.layout import Weight
from paceline.params.arena import Arena
from paceline.params.layout import ITEM_BYTES, Layout
from paceline.params.placement import Plan
from paceline.params.recast import Recast, wire_casts
from paceline.transport.base import Buffer
from paceline.worker.link import Link

Arrays = Sequence[Any]  # a numpy array a trained tensor, or None


def dtype_of(name: str) -> Any:
    """numpy's dtype; bfloat16 is not numpy's own."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def vector(memory: memoryview, dtype: str, offset: int, numel: int) -> Any:
    """`numel` numbers at byte `offset`, as a one-dimensional array on that memory."""
    if numel == 0:
        return np.empty(0, dtype_of(dtype))
    return np.frombuffer(memory, dtype_of(dtype), numel, offset)


class Outgoing:
    """The slots of one worker as its gradients see them; `wire` is the dtype they travel in, if it is narrower."""

    direct: list[int]

    def __init__(self, links: Sequence[Link], layout: Layout, plan: Plan, weights: Sequence[Weight], wire: str) -> None:
        self.direct = []  # all goes through a slot
        self._layout = layout
        self._weights = weights
        casts = wire_casts(wire)
        self._whole: list[tuple[int, Any]] = []
        self._cut: list[tuple[int, int, int, Any]] = []
        self._sums: list[Any] = []
        self._payloads: list[Sequence[Buffer]] = []
        for link, pieces, size in zip(links, plan.shards, plan.shard_bytes, strict=True):
            recast = Recast(layout, pieces, size, casts)
            link.slot_bytes = 0 if link.slot is None else recast.size_bytes
            slot = link.slot[: recast.size_bytes] if link.slot is not None else Arena.private(recast.size_bytes).memory
            self._view(slot, pieces, recast)
            self._payloads.append(() if link.shares_memory or not pieces else (slot,))

    def _view(self, slot: memoryview, pieces: Sequence[Any], recast: Recast) -> None:
        trained = self._layout.trained
        for dtype in sorted({trained[p.tensor].dtype for p in pieces}):
            same = [p for p in pieces if trained[p.tensor].dtype == dtype]
            first, last = same[0], same[-1]
            numel = (last.offset - first.offset) // ITEM_BYTES[dtype] + last.numel
            self._sums.append(vector(slot, recast.dtype(dtype), recast.offset(first.offset), numel))
        for piece in pieces:
            spec = trained[piece.tensor]
            part = vector(slot, recast.dtype(spec.dtype), recast.offset(piece.offset), piece.numel)
            if piece.numel == spec.numel:
                self._whole.append((piece.tensor, self._weights[piece.tensor].as_own(part.reshape(spec.shape))))
            else:
                self._cut.append((piece.tensor, piece.start, piece.stop, part))

    def write(
        self, gradients: Arrays, has_gaps: bool, sent: Collection[int] = ()
    ) -> tuple[Sequence[Sequence[Buffer]], bool]:
        """Into the slots. Returns what each shard's frame carries, and whether all is surely finite."""
        with np.errstate(all="ignore"):  # what overflows on a narrow wire is found by the sum
            for index, view in self._whole:
                if (gradient := gradients[index]) is not None:
                    np.copyto(view, gradient, casting="unsafe")
            for index, start, stop, part in self._cut:
                if (gradient := gradients[index]) is not None:
                    laid = self._weights[index].as_laid_out(gradient)
                    np.copyto(part, laid.reshape(-1)[start:stop], casting="unsafe")
            total = sum(float(np.add.reduce(each, dtype=_summed(each.dtype))) for each in self._sums)
        return self._payloads, math.isfinite(total)

    def again(self, shard: int) -> Sequence[Buffer] | None:
        """What the last push carried to this shard, bit for bit."""
        return self._payloads[shard]

    def forget(self) -> None:
        """The answer is here: nothing will be sent again."""

    def not_finite(self, gradients: Arrays) -> list[str]:
        """The tensors with a NaN or an infinity; none, if only the sum of large numbers overflowed."""
        names = [t.name for t in self._layout.trained]
        bad = {i for i, g in enumerate(gradients) if g is not None and not _is_finite(g)}
        for index, part in [*self._whole, *((i, part) for i, _, _, part in self._cut)]:
            if gradients[index] is not None and not _is_finite(part):
                bad.add(index)  # it was finite, and is not in the dtype of the wire
        return [names[i] for i in sorted(bad)]


def _summed(dtype: Any) -> Any:
    return np.float32 if dtype.itemsize < np.dtype(np.float32).itemsize else dtype


def _is_finite(values: Any) -> bool:
    return bool(np.isfinite(values.astype(_summed(values.dtype), copy=False)).all())
