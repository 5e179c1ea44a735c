"""WHICH network draws its own input? Document 003's autoencoder: 784-200-784, softplus in the middle.

Called by the demo autoencoder and examples. With a seed, must never depend on torch's global generator.
"""

import torch
from torch import nn
from torch.nn.functional import softplus

PIXELS = 28 * 28


class Autoencoder(nn.Module):
    """From pixels to `hidden` numbers and back; in training `noise` is the deviation of what disturbs the input.

    >>> Autoencoder()(torch.zeros(2, 784)).shape
    torch.Size([2, 784])
    """

    def __init__(self, pixels: int = PIXELS, hidden: int = 200, noise: float = 0.0, seed: int | None = None) -> None:
        super().__init__()
        self.encoder = nn.Linear(pixels, hidden)
        self.decoder = nn.Linear(hidden, pixels)
        self.noise = noise
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for layer in (self.encoder, self.decoder):
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and self.noise:
            images = images + self.noise * torch.randn_like(images)
        drawn: torch.Tensor = self.decoder(softplus(self.encoder(images)))
        return drawn


def reconstruction_cost(drawn: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Half the sum of all squared differences, as the document's program has it.

    >>> reconstruction_cost(torch.ones(2, 3), torch.zeros(2, 3))
    tensor(3.)
    """
    return 0.5 * (drawn - images).square().sum()
