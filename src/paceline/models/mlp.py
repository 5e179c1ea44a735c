"""WHICH model do the documents train? Two fully connected layers for MNIST, 784-100-10.

Called by demos, tests and the lab. With a seed, must never depend on torch's global generator.
"""

import torch
from torch import nn

from paceline.errors import UsageError

PIXELS = 28 * 28
CLASSES = 10
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid}


def mlp(hidden: int = 100, activation: str = "sigmoid") -> nn.Sequential:
    """784-`hidden`-10 with torch's own initial weights; gives logits (the softmax is in the loss).

    >>> [tuple(p.shape) for p in mlp().parameters()]
    [(100, 784), (100,), (10, 100), (10,)]
    """
    if activation not in ACTIVATIONS:
        raise UsageError(f"no activation is called {activation!r}: known are {', '.join(ACTIVATIONS)}")
    return nn.Sequential(nn.Linear(PIXELS, hidden), ACTIVATIONS[activation](), nn.Linear(hidden, CLASSES))


def document_000(seed: int) -> nn.Sequential:
    """The model of document 000: sigmoid, weights from N(0, 1), biases 0; the same for the same seed."""
    model = mlp(hidden=100, activation="sigmoid")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.normal_(0.0, 1.0, generator=generator)
                layer.bias.zero_()
    return model


def document_002(hidden: int = 100) -> nn.Sequential:
    """The model of document 002: ReLU, weights from a truncated normal, biases 0; drawn from torch's own generator."""
    model = mlp(hidden, activation="relu")
    for layer in model:
        if isinstance(layer, nn.Linear):
            deviation = layer.in_features**-0.5
            nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
            nn.init.zeros_(layer.bias)
    return model


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of document 002: summed over a batch, and clipped, so that a digit that is ruled out costs 23, not
    infinity.

    >>> logits, labels = torch.tensor([[0.0, 0.0], [1000.0, 0.0]]), torch.tensor([0, 1])
    >>> f"{summed_cross_entropy(logits, labels):.2f}"
    '23.72'
    """
    likely = logits.softmax(1).gather(1, labels[:, None]).clamp(1e-10, 1.0)
    return -likely.log().sum()
