"""Find what a PyTorch script writes into parameters on an accelerator: worker/writes for memory of a card.

Used by worker/torch. The digest is computed on the card, so only one number crosses to the host.
"""

from collections.abc import Sequence

import torch

CHUNK_WORDS = 1 << 22  # 64-bit words that are multiplied at once, which bounds the memory that a digest needs


class DeviceWrites:
    """A sum of products over the block of all parameters. Each word has an odd factor, so that a change of one word
    always changes the sum. Which tensor was written is not known: all are returned."""

    def __init__(self, block: torch.Tensor, num_tensors: int) -> None:
        whole = block[: block.numel() // 8 * 8].view(torch.int64)  # tensors lie at multiples of 64 bytes
        self._chunks = torch.split(whole, CHUNK_WORDS)
        self._all = range(num_tensors)
        generator = torch.Generator(block.device).manual_seed(1)
        shape = (min(whole.numel(), CHUNK_WORDS),)
        self._factors = torch.randint(-(1 << 62), 1 << 62, shape, generator=generator, device=block.device) * 2 + 1
        self.remember()

    def remember(self) -> None:
        self._sums = self._digest()

    def found(self) -> Sequence[int]:
        return () if torch.equal(self._digest(), self._sums) else self._all

    def _digest(self) -> torch.Tensor:
        if not self._chunks[0].numel():
            return self._factors
        return torch.stack([(chunk * self._factors[: chunk.numel()]).sum() for chunk in self._chunks])
