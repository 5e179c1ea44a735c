"""Bring torch's tensors and optimizer to mode local (worker/step/local_steps).

Used by frameworks/torch/preparation instead of TorchStep. The optimizer stays the user's own object, whichever it
is; its class becomes a subclass whose step does what an exchange needs around its own.
"""

import functools
from typing import Any

import torch

from paceline.frameworks.torch.constraints import hold_after_steps
from paceline.frameworks.torch.optimizer import replace_step
from paceline.frameworks.torch.training_step import TorchStep
from paceline.worker.step.local_steps import LocalSteps


class LocalTorchStep(LocalSteps, TorchStep):
    """One torch model that trains by itself between exchanges."""

    def __init__(self, *args: Any, **bound: Any) -> None:
        super().__init__(*args, **bound)
        self._origin = [p.detach().clone() for p in self.parameters]

    def num_groups(self) -> int:
        return len(self.optimizer.param_groups)

    def follow(self) -> None:
        """Act around the optimizer's own step, in which its hooks run. Hooks of ours would run twice where a subclass
        calls the step of its base, and not at all after a step that raised."""
        optimizer, base = self.optimizer, type(self.optimizer)
        hold_after_steps(optimizer)

        @functools.wraps(base.step)
        def step(self_: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
            if self_ is not optimizer:  # a copy, which trains something else
                return base.step(self_, *args, **options)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks at, to warn
            self.before_step()
            loss = base.step(optimizer, *args, **options)
            self.stepped()
            return loss

        replace_step(optimizer, step, {})

    def _was_skipped(self) -> bool:
        """Tell whether a GradScaler had a fused optimizer skip the step, because its gradients overflow."""
        overflows = getattr(self.optimizer, "found_inf", None)
        return isinstance(overflows, torch.Tensor) and bool(overflows.item())

    def _delta(self) -> list[Any]:
        return list(torch._foreach_sub(self._origin, self._values()))

    def _values(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.parameters]

    def _note_origin(self) -> None:
        torch._foreach_copy_(self._origin, self._values())

    def _go_back(self) -> None:
        torch._foreach_copy_(self._values(), self._origin)

    def _is_finite(self, gradients: Any) -> bool:
        is_finite = super()._is_finite(gradients)
        if not is_finite:
            self.optimizer.state.clear()  # what it remembers is not finite either
        return is_finite
