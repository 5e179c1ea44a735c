"""WHICH network sees photographs? That of TensorFlow's CIFAR-10 tutorial: two convolutions, three full layers.

Called by the demo cifar10 and examples. With a seed, must never depend on torch's global generator.
"""

import torch
from torch import nn

CLASSES = 10
SEES = 24  # pixels wide and high
DECAY = 0.004  # of the weights of the two full layers, as the tutorial has it

# By layer: the deviation of its first weights, and its first bias.
FIRST = ((0.05, 0.0), (0.05, 0.1), (0.04, 0.1), (0.04, 0.1), (1 / 192, 0.0))


class Cnn(nn.Module):
    """24 x 24 pixels in three colours -> conv 64, pool, norm -> conv 64, norm, pool -> 384 -> 192 -> 10 logits.

    >>> sum(p.numel() for p in Cnn().parameters())
    1068298
    """

    def __init__(self, channels: int = 64, seed: int | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 5, padding=2)
        self.conv2 = nn.Conv2d(channels, channels, 5, padding=2)
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)  # TensorFlow's SAME: what is missing is missing at the end
        self.norm = nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)  # TensorFlow's radius 4 and alpha 0.001 / 9
        self.full1 = nn.Linear(channels * (SEES // 4) ** 2, 384)
        self.full2 = nn.Linear(384, 192)
        self.out = nn.Linear(192, CLASSES)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        layers: tuple[nn.Conv2d | nn.Linear, ...] = self.conv1, self.conv2, self.full1, self.full2, self.out
        for layer, (deviation, bias) in zip(layers, FIRST, strict=True):
            least, most = -2 * deviation, 2 * deviation  # TensorFlow's truncated normal
            nn.init.trunc_normal_(layer.weight, std=deviation, a=least, b=most, generator=generator)
            assert layer.bias is not None
            nn.init.constant_(layer.bias, bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        seen = self.norm(self.pool(self.conv1(images).relu()))
        seen = self.pool(self.norm(self.conv2(seen).relu()))
        out: torch.Tensor = self.out(self.full2(self.full1(seen.flatten(1)).relu()).relu())
        return out

    def groups(self) -> list[dict[str, object]]:
        """For the optimizer: the weights of the two full layers decay, everything else does not."""
        decays = [self.full1.weight, self.full2.weight]
        others = [p for p in self.parameters() if not any(p is each for each in decays)]
        return [{"params": decays, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
