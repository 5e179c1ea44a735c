"""Train a torch model on a worker's own for a while: mode local (worker/local_steps).

Used by frameworks/torch/preparation instead of TorchTrainee. The optimizer stays the user's own object, whichever it
is; its class becomes a subclass whose step does what an exchange needs around its own.
"""

import functools
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.frameworks.torch.constraints import hold_after_steps
from paceline.frameworks.torch.training_step import TorchTrainee
from paceline.worker.local_steps import LocalSteps, Outer


class LocalTrainee(LocalSteps, TorchTrainee):
    """One torch model that trains by itself between exchanges."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, num_ps: int, placement: str, outer: Outer
    ) -> None:
        self._step_samples: list[float] = []  # since the last exchange
        super().__init__(model, optimizer, num_ps, placement, outer=outer)
        self._origin = [p.detach().clone() for p in self.parameters]

    def num_groups(self) -> int:
        return len(self.optimizer.param_groups)

    def follow(self) -> None:
        """Around the optimizer's own step, in which its hooks run. Hooks of ours would run twice where a subclass calls
        the step of its base, and not at all after a step that raised."""
        optimizer, base = self.optimizer, type(self.optimizer)
        hold_after_steps(optimizer)

        @functools.wraps(base.step)
        def step(self_: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
            if self_ is not optimizer:  # a copy, which trains something else
                return base.step(self_, *args, **options)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks at, to warn
            self.before_step()
            loss = base.step(optimizer, *args, **options)
            self._count_samples()
            self.stepped()
            return loss

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers must not wrap it again
        step.hooked = True  # type: ignore[attr-defined]  # nor must torch
        optimizer.__dict__.pop("step", None)  # a scheduler that came first has wrapped the old one
        members = {"step": step, "add_param_group": _refuse_groups, "__module__": base.__module__}
        optimizer.__class__ = type(base.__name__, (base,), members)

    def _count_samples(self) -> None:
        """Add the samples of this step to those of the delta, unless a GradScaler had a fused optimizer skip it."""
        overflows = getattr(self.optimizer, "found_inf", None)
        if not (isinstance(overflows, torch.Tensor) and overflows.item()):
            samples = super()._samples()
            self._step_samples += [] if samples is None else [samples]

    def _samples(self) -> float | None:
        samples, self._step_samples = self._step_samples, []
        if not samples:
            return None
        return sum(samples) if all(samples) else 0.0

    def _delta(self) -> list[Any]:
        return list(torch._foreach_sub(self._origin, self._values()))

    def _values(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.parameters]

    def _note_origin(self) -> None:
        self._step_samples = []
        torch._foreach_copy_(self._origin, self._values())

    def _go_back(self) -> None:
        torch._foreach_copy_(self._values(), self._origin)

    def forget_steps(self) -> None:
        super().forget_steps()
        self._step_samples = []

    def _is_finite(self, gradients: Any) -> bool:
        is_finite = super()._is_finite(gradients)
        if not is_finite:
            self.optimizer.state.clear()  # what it remembers is not finite either
        return is_finite


def _refuse_groups(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
    raise UsageError(
        "add_param_group after prepare: the ps have laid out what they train by now. Give the optimizer all its groups "
        "before prepare(); parameters that are frozen at first may be among them"
    )
