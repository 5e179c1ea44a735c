"""Find what a PyTorch script writes into parameters on an accelerator: worker/step/training_step does it for
memory of the host.

Used by frameworks/torch/training_step. The digest is computed on the card, so only one number crosses to the host.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.worker.script import script_line

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


class OtherTraining:
    """Parameters of the model that the prepared optimizer does not train. Other workers never see what a second
    optimizer makes of them. Values that a script computes without gradients (an average, say) are left alone."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self._had_gradient = {name for name, p in parameters.items() if p.requires_grad}
        self.remember()

    def remember(self) -> None:
        """Take the values that lie there now for those that all workers have."""
        self._versions = [p._version for p in self._parameters.values()]

    def check(self) -> None:
        """Refuse what was trained since `remember`."""
        if [p._version for p in self._parameters.values()] == self._versions:
            return
        for (name, parameter), version in zip(self._parameters.items(), self._versions, strict=True):
            if parameter._version != version and (parameter.grad is not None or name in self._had_gradient):
                raise UsageError(
                    f"{name} was changed by something else than the prepared optimizer, which does not train it; the "
                    f"other workers would not see that{script_line()}. Train it by a parameter group of the prepared "
                    "optimizer, or, if it is not trained, call requires_grad_(False) on it before prepare()"
                )
        self.remember()


def renormalised(model: nn.Module, written: Sequence[torch.Tensor]) -> str:
    """Say what to do if one of these parameters was written by an embedding with `max_norm=` in its own forward pass;
    empty if none was."""
    known = {id(parameter) for parameter in written}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm and id(module.weight) in known:
            layer = f"layer {name}" if name else "the model"
            return (
                f"In forward {layer}, {type(module).__name__}(…, max_norm={module.max_norm}), scales the rows that it "
                f"looks up. Leave max_norm= out and call paceline.constrain(layer.weight, max_norm={module.max_norm}) "
                "before prepare(): the ps then bounds the norms of all rows after every update"
            )
    return ""
