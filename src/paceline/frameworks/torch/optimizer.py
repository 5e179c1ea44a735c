"""Have the step of a user's optimizer go to the ps: its class becomes a subclass of its own, the object stays the same.

Called by ctx.prepare. Three ways in which this goes wrong silently, and what holds (tests/traps):

- a scheduler made before `prepare` has left a wrapper of the old `step` in the instance: it is removed,
- step hooks live in a wrapper that a new `step` must be given again (`profile_hook_step`, in training_step),
- `fused=True` lets a GradScaler hand over gradients that are still scaled: the optimizer says that it cannot do that.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

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


def convert(optimizer: torch.optim.Optimizer, remote: Remote, step: Callable[..., Any]) -> None:
    """Change the optimizer in place: same object, same groups, another `step` (training_step.step_of)."""
    base = type(optimizer)
    own = optimizer.__dict__.get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        raise UsageError(
            "optimizer.step was replaced by a function of the script before prepare(), which the ps cannot run: "
            f"replace it after prepare(), or use optimizer.register_step_pre_hook(){script_line()}"
        )

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
        """Make a copy an optimizer of the own class, which steps by itself."""
        return object.__new__, (base,), self.__getstate__()

    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        if not set_to_none:
            remote.before_zeroing()
        base.zero_grad(self, set_to_none)

    members = {
        "state": property(lambda _: remote.state, replace_state),
        "__setstate__": set_state,
        "__reduce_ex__": copied,
        "load_state_dict": load_state_dict,
        "zero_grad": zero_grad,
    }
    optimizer.__dict__.pop("state", None)
    replace_step(optimizer, step, members)
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def replace_step(optimizer: torch.optim.Optimizer, step: Any, members: Mapping[str, Any]) -> None:
    """Give the optimizer a subclass of its own class with this step and these members, and no further groups."""

    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        raise UsageError(
            "add_param_group after prepare: the ps have laid out what they train by now. Give the optimizer all its "
            "groups before prepare(); parameters that are frozen at first may be among them"
        )

    step._wrapped_by_lr_sched = True  # schedulers must not wrap it again
    step.hooked = True  # nor must torch, which would run every hook twice
    optimizer.__dict__.pop("step", None)  # a scheduler that came first has wrapped the old one
    base = type(optimizer)
    own = {**members, "step": step, "add_param_group": add_param_group, "__module__": base.__module__}
    optimizer.__class__ = type(base.__name__, (base,), own)
