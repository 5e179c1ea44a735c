"""Find what a PyTorch script writes into parameters on an accelerator: worker/writes for memory of a card.

Used by worker/torch. The digest is computed on the card, so only one number crosses to the host.
"""

from collections.abc import Sequence

import torch

CHUNK_WORDS = 1 << 22  # 64-bit words that are multiplied at once, which bounds the memory that a digest needs


class DeviceWrites:
    """A sum of products over the block of all parameters. Each word has an odd factor, so that a change of one word
    always changes the sum. `pulled`: the host's copy of the block; `tensors`: where each tensor's bytes lie in it."""

    def __init__(self, block: torch.Tensor, pulled: torch.Tensor, tensors: Sequence[slice]) -> None:
        self._block = block
        self._pulled = pulled
        self._tensors = tensors
        whole = block[: block.numel() // 8 * 8].view(torch.int64)  # tensors lie at multiples of 64 bytes
        self._chunks = torch.split(whole, CHUNK_WORDS)
        generator = torch.Generator(block.device).manual_seed(1)
        shape = (min(whole.numel(), CHUNK_WORDS),)
        self._factors = torch.randint(-(1 << 62), 1 << 62, shape, generator=generator, device=block.device) * 2 + 1
        self.remember()

    def remember(self) -> None:
        self._sums = self._digest()

    def found(self) -> Sequence[int]:
        if torch.equal(self._digest(), self._sums):
            return ()
        now = self._block.cpu()
        return [i for i, part in enumerate(self._tensors) if not torch.equal(now[part], self._pulled[part])]

    def _digest(self) -> torch.Tensor:
        if not self._chunks[0].numel():
            return self._factors
        return torch.stack([(chunk * self._factors[: chunk.numel()]).sum() for chunk in self._chunks])
