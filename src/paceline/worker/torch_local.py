"""HOW does a worker train on its own for a while? Mode local: H steps of its own optimizer, then one exchange.

Used by worker/torch_preparation instead of TorchTrainee. The optimizer stays the user's own object, whichever it is;
its class becomes a subclass whose step does what an exchange needs around its own. What is pushed as a gradient is the
delta: where the last exchange left the parameters, less where they are now. The ps applies it with an outer SGD
(server/shard knows nothing of all this).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.modes.spec import outer_momentum
from paceline.wire.frames import Outcome
from paceline.wire.messages import OptimizerSpec, Options
from paceline.worker.torch import TorchTrainee
from paceline.worker.torch_constraints import hold_after_steps
from paceline.worker.trainee import outer_spec
from paceline.worker.writes import Unwatched, Writes


class LocalTrainee(TorchTrainee):
    """One model that trains by itself between exchanges."""

    is_local = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        num_ps: int,
        placement: str,
        outer: str,
        outer_lr: float,
        momentum: float | None,
    ) -> None:
        self._outer, self._outer_lr, self._momentum = outer, outer_lr, momentum
        self._since_exchange = 0
        self._step_samples: list[float] = []  # since the last exchange
        super().__init__(model, optimizer, num_ps, placement)
        self._origin = [p.detach().clone() for p in self.parameters]

    def make_spec(self) -> OptimizerSpec:
        groups = len(self.optimizer.param_groups)
        return outer_spec(groups, self._outer_lr, outer_momentum(self._momentum, self._outer))

    def _changed_options(self) -> list[Options] | None:
        """The user's options are for the user's optimizer, which runs here; the outer ones change with the dial."""
        outer = self.client.dial.spec.outer
        if outer == self._outer:
            return None
        self._outer = outer
        self.spec = self.make_spec()
        return self.spec.groups

    def follow(self, after_step: Callable[[], None]) -> None:
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
            self._stepped()
            after_step()
            return loss

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers must not wrap it again
        step.hooked = True  # type: ignore[attr-defined]  # nor must torch
        optimizer.__dict__.pop("step", None)  # a scheduler that came first has wrapped the old one
        members = {"step": step, "add_param_group": _refuse_groups, "__module__": base.__module__}
        optimizer.__class__ = type(base.__name__, (base,), members)

    def _stepped(self) -> None:
        """The optimizer has made a step of its own; every H-th is followed by an exchange."""
        self._since_exchange += 1
        if self._since_exchange >= self.client.dial.spec.local_steps:
            self._exchange()
        self.steps += 1

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

    def _exchange(self) -> None:
        with torch.no_grad():
            deltas = torch._foreach_sub(self._origin, self._values())
            self._since_exchange = 0
            self._push(list(deltas))

    def finish(self) -> UsageError | None:
        """Push the steps since the last exchange, too."""
        refused = super().finish()
        if self._since_exchange:
            self.wants_ticket = self.is_budgeted
            self._exchange()
        return refused

    def _values(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.parameters]

    def end_first(self) -> None:
        super().end_first()
        self.writes: Writes = Unwatched()  # every step of this worker writes the parameters

    def _start_here(self) -> None:
        """Deltas count from where the parameters are now."""
        self._since_exchange, self._step_samples = 0, []
        torch._foreach_copy_(self._origin, self._values())

    def joined(self, on_load: Callable[[], None]) -> None:
        super().joined(on_load)
        self._start_here()

    def settle(self) -> None:
        if not self.client.is_pending:
            return
        super().settle()
        if self.last_outcome is Outcome.ADDED:
            torch._foreach_copy_(self._values(), self._origin)  # another delta for the same round, from its start
        else:
            self._start_here()

    def _send_parameters(self, what: str) -> None:
        super()._send_parameters(what)
        self._start_here()

    def forget_steps(self) -> None:
        torch._foreach_copy_(self._values(), self._origin)
        self._since_exchange, self._step_samples = 0, []

    def _is_finite(self, gradients: Any) -> bool:
        is_finite = super()._is_finite(gradients)
        if not is_finite:
            self.optimizer.state.clear()  # what it remembers is not finite either
        return is_finite

    def take_newest(self) -> None:
        """Between two exchanges the worker's own steps are kept; only at an exchange there is nothing to lose."""
        if self._since_exchange == 0:
            super().take_newest()
            self._start_here()


def _refuse_groups(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
    raise UsageError(
        "add_param_group after prepare: the ps have laid out what they train by now. Give the optimizer all its groups "
        "before prepare(); parameters that are frozen at first may be among them"
    )
