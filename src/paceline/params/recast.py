"""WHERE do a shard's elements lie in another dtype? Gradients may travel narrower, masters are kept wider.

Used by server/numbers and frameworks/torch/training_step on the same pieces, so it must be deterministic and pure.
Neighbouring pieces of one dtype keep their places among each other, counted in elements; only the bytes of an element
change.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from paceline.params.layout import ITEM_BYTES, Layout, align
from paceline.params.placement import Piece

WIRES = ("float32", "bfloat16", "float16")
MASTERS = ("float32", "model")


def wire_casts(wire: str) -> dict[str, str]:
    """What travels in another dtype than its own: only what becomes narrower.

    >>> wire_casts("bfloat16")
    {'float64': 'bfloat16', 'float32': 'bfloat16'}
    """
    if wire == "float32":
        return {}
    return dict.fromkeys(("float64", "float32"), wire)


def master_casts(master: str) -> dict[str, str]:
    """What a ps keeps in another dtype than the model's: half precision, unless told otherwise."""
    return {} if master == "model" else {"bfloat16": "float32", "float16": "float32"}


class Recast:
    """Byte offsets and dtypes of one shard's pieces after a cast."""

    def __init__(self, layout: Layout, pieces: Sequence[Piece], size_bytes: int, casts: Mapping[str, str]) -> None:
        self._casts = casts
        self._starts: list[int] = []  # old byte at which each region of one dtype begins
        self._regions: list[tuple[int, int, int]] = []  # new byte, old and new bytes of an element
        dtypes = [layout.trained[p.tensor].dtype for p in pieces]
        self.is_same = not any(dtype in casts for dtype in dtypes)
        self.size_bytes = size_bytes
        if not self.is_same:
            self.size_bytes = self._lay(pieces, dtypes)

    def _lay(self, pieces: Sequence[Piece], dtypes: Sequence[str]) -> int:
        end = 0
        last = None
        for piece, dtype in zip(pieces, dtypes, strict=True):
            if dtype != last:
                self._starts.append(piece.offset)
                self._regions.append((align(end), ITEM_BYTES[dtype], ITEM_BYTES[self.dtype(dtype)]))
                last = dtype
            end = self.offset(piece.offset) + piece.numel * ITEM_BYTES[self.dtype(dtype)]
        return align(end)

    def dtype(self, dtype: str) -> str:
        return self._casts.get(dtype, dtype)

    def offset(self, offset: int) -> int:
        """Where what lies at this byte of the shard lies after the cast."""
        if self.is_same:
            return offset
        index = bisect_right(self._starts, offset) - 1
        start, old, new = self._regions[index]
        return start + (offset - self._starts[index]) // old * new
