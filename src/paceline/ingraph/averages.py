"""WHAT is the average of the parameters over time? shadow = decay * shadow + (1 - decay) * variable, after each update.

Used by ingraph/towers; in a cluster with ps `--ema` does the same there, with the same arithmetic.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from paceline.errors import UsageError


class Averages:
    """The shadows of one model's trained parameters."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            raise UsageError(f"ema is {decay}; the decay must lie between 0 and 1, such as 0.999.")
        self._decay = decay
        self.shadows = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        self.is_held = False

    def update(self, model: nn.Module) -> None:
        """The parameters have changed."""
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in self.shadows:
                    self.shadows[name].mul_(self._decay).add_(parameter * (1 - self._decay))

    @contextmanager
    def held(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the averages; afterwards its own values again, to the bit."""
        if self.is_held:
            yield
            return
        own = {name: p for name, p in model.named_parameters() if name in self.shadows}
        before = {name: p.detach().clone() for name, p in own.items()}
        self.is_held = True
        try:
            self._put(own, self.shadows)
            yield
        finally:
            self._put(own, before)
            self.is_held = False

    def _put(self, parameters: dict[str, nn.Parameter], values: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(values[name])
