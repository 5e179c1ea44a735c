"""WHICH network looks where the digit is? Document 003's (spatial) transformer: it moves its input, then classifies it.

Called by the demo transformer and examples. This is Jaderberg's spatial transformer of 2015, not attention. Must begin
as the identity: before training, what comes out of the transform is what went in.
"""

import torch
from torch import nn
from torch.nn.functional import affine_grid, grid_sample

SIDE = 40
CLASSES = 10
IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)  # two rows: what x and y of a point become
FILTERS = 16
FULL = 1024
DROPS = 0.2  # of the units, in training


class SpatialTransformer(nn.Module):
    """Localisation 1600-20-6, the transform, two convolutions, 1024 units, ten logits; `larger`: the document's bigger
    one, three convolutions at full resolution with pooling and normalisation.

    >>> model, images = SpatialTransformer(), torch.rand(2, 1, 40, 40)
    >>> torch.allclose(model.eval().transform(images), images, atol=1e-5)
    True
    """

    def __init__(self, larger: bool = False) -> None:
        super().__init__()
        last = nn.Linear(20, len(IDENTITY))
        nn.init.zeros_(last.weight)
        with torch.no_grad():
            last.bias.copy_(torch.tensor(IDENTITY))
        self.localisation = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 20), nn.Tanh(), nn.Dropout(DROPS), last)
        self.sees = nn.Sequential(*(_larger() if larger else _two_convolutions()))
        self.classifies = nn.Sequential(
            nn.Flatten(), nn.Linear(FILTERS * 10 * 10, FULL), nn.ReLU(), nn.Dropout(DROPS), nn.Linear(FULL, CLASSES)
        )

    def transform(self, images: torch.Tensor) -> torch.Tensor:
        """The images as the classifier gets them: shifted, turned, magnified as the localisation net says."""
        where = self.localisation(images).view(-1, 2, 3)
        grid = affine_grid(where, list(images.shape), align_corners=False)
        return grid_sample(images, grid, align_corners=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifies(self.sees(self.transform(images)))
        return logits


def _two_convolutions() -> list[nn.Module]:
    """40 x 40 -> 20 x 20 -> 10 x 10, by strides."""
    first = nn.Conv2d(1, FILTERS, 3, stride=2, padding=1)
    second = nn.Conv2d(FILTERS, FILTERS, 3, stride=2, padding=1)
    return [first, nn.ReLU(), second, nn.ReLU()]


def _larger() -> list[nn.Module]:
    """40 x 40 -> 20 x 20 -> 10 x 10 by pooling, so that a convolution sees four times as many points; then one more."""
    layers: list[nn.Module] = []
    for before in (1, FILTERS):
        layers += [nn.Conv2d(before, FILTERS, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.LocalResponseNorm(9, alpha=9e-4, beta=0.75, k=1.0), nn.Dropout(DROPS)]
    return [*layers, nn.Conv2d(FILTERS, FILTERS, 3, padding=1), nn.ReLU(), nn.Dropout(DROPS)]
