"""WHAT do the tests of the modes train? One small model, and batches that each worker and step can draw anywhere.

Used by the tests in this folder: the cluster and the reference program in one process call the same functions, so
that only the arithmetic between gradients and parameters can differ.
"""

from collections.abc import Iterable

import torch
from alike import LOCK
from torch import nn

LANES = ("inproc", "shm", "tcp")
Gradient = list[torch.Tensor | None]


def model_of(seed: int = 3, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Shapes whose sizes are no multiples of anything, so that SIMD tails and cut tensors show."""
    with LOCK:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(37, 29), nn.Tanh(), nn.Linear(29, 17), nn.Tanh(), nn.Linear(17, 3)).to(dtype)


def batch(worker: int, step: int, size: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + worker)
    return torch.randn(size, 37, generator=generator) * 10 ** (-step % 3)


def gradients(model: nn.Module, x: torch.Tensor) -> Gradient:
    """The gradient of this batch, in the parameters and returned."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    model(x.to(dtype)).square().mean().backward()
    return [p.grad for p in model.parameters()]


def give(model: nn.Module, gradient: Iterable[torch.Tensor | None]) -> None:
    """Make this the gradient."""
    for parameter, each in zip(model.parameters(), gradient, strict=True):
        parameter.grad = each


def drawn(model: nn.Module, number: int) -> list[torch.Tensor]:
    """A gradient out of thin air, the same for everybody who asks for this number."""
    generator = torch.Generator().manual_seed(7000 + number)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in model.parameters()]
