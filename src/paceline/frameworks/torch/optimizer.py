"""HOW does a user's optimizer become ours without becoming another object? Its class changes to a subclass of its own.

Called by ctx.prepare. Three ways in which this goes wrong silently, and what holds (tests/traps):

- a scheduler made before `prepare` has left a wrapper of the old `step` in the instance: it is removed,
- step hooks live in a wrapper that a new `step` must be given again: `profile_hook_step`,
- `fused=True` lets a GradScaler hand over gradients that are still scaled: the optimizer says that it cannot do that.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.optim import optimizer as optimizer_module

from paceline.errors import UsageError
from paceline.frameworks.torch.optimizer_state import OptimizerState
from paceline.worker.script import script_line


class Remote(Protocol):
    """What the optimizer needs of the cluster."""

    def step(self) -> None: ...

    @property
    def state(self) -> OptimizerState: ...

    def load_state(self) -> None: ...

    def before_zeroing(self) -> None: ...


def convert(optimizer: torch.optim.Optimizer, remote: Remote) -> None:
    """Change the optimizer in place: same object, same groups, `step` goes to the ps."""
    base = type(optimizer)
    own = optimizer.__dict__.get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise UsageError(
            "optimizer.step was replaced by a function of the script before prepare(), which the ps cannot run: "
            f"replace it after prepare(), or use optimizer.register_step_pre_hook(){script_line()}"
        )

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        self._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks at to warn about the order
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        remote.step()
        return loss

    def replace_state(_: torch.optim.Optimizer, state: Mapping[torch.Tensor, Any]) -> None:
        if state is not remote.state:
            remote.state.replace(state)

    def set_state(self: torch.optim.Optimizer, members: dict[str, Any]) -> None:
        if "state" in members:
            remote.state.replace(members["state"])
        base.__setstate__(self, {name: value for name, value in members.items() if name != "state"})

    def load_state_dict(self: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        base.load_state_dict(self, state)
        remote.load_state()

    def copied(self: torch.optim.Optimizer, _: Any) -> Any:
        """A copy steps by itself, as torch's own optimizer does."""
        return object.__new__, (base,), self.__getstate__()

    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        if not set_to_none:
            remote.before_zeroing()
        base.zero_grad(self, set_to_none)

    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        raise UsageError(
            "add_param_group after prepare: the ps have laid out what they train by now. Give the optimizer all its "
            "groups before prepare(); parameters that are frozen at first may be among them"
        )

    hooked = torch.optim.Optimizer.profile_hook_step(step)

    def either(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        # torch's wrapper opens a profiler record every time; without hooks and profiler nobody would see it.
        if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or _is_watched():
            return hooked(self, closure)
        return step(self, closure)

    either._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers must not wrap it again
    either.hooked = True  # type: ignore[attr-defined]  # nor must torch, which would run every hook twice
    members = {
        "step": either,
        "state": property(lambda _: remote.state, replace_state),
        "__setstate__": set_state,
        "__reduce_ex__": copied,
        "load_state_dict": load_state_dict,
        "zero_grad": zero_grad,
        "add_param_group": add_param_group,
        "__module__": base.__module__,
    }
    optimizer.__dict__.pop("step", None)
    optimizer.__dict__.pop("state", None)
    optimizer.__class__ = type(base.__name__, (base,), members)
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def _is_watched() -> bool:
    """Whether a profiler runs, or hooks for all optimizers are registered."""
    for_all = optimizer_module._global_optimizer_pre_hooks or optimizer_module._global_optimizer_post_hooks
    return bool(for_all) or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
