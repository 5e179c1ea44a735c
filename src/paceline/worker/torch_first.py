"""Take what a PyTorch script loads between prepare() and its first step as first values.

Used by worker/torch. In this time the script may load weights into the model or into parts of it: the chief's go to the
ps. Where the run has made updates already (a resumed run, or a worker that was started again), the ps's values count.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from paceline.worker.torch_compiler import disabled


class Keeps(Protocol):
    """What is told that the time of first values is over."""

    is_alone: bool
    goes_on: bool

    def keep_writes(self) -> None: ...

    def end_first(self) -> None: ...


class FirstValues:
    """Hooks on the model that are gone after its first step."""

    def __init__(self, model: nn.Module, on_load: Callable[[], None], trainee: Keeps) -> None:
        self._trainee = trainee
        self._on_load = LoadHook(on_load)
        loading = () if trainee.is_alone else model.modules()  # a single worker's writes are found by comparison
        self._hooks: list[Any] = [m.register_load_state_dict_post_hook(self._on_load) for m in loading]  # type: ignore[no-untyped-call]
        if trainee.goes_on:
            # A forward pass may write, too (max_norm), and these are no first values. A hook for all modules, because
            # one on the model would be copied and pickled with it.
            parts = set(model.modules())
            before = disabled(lambda module, _: self._begin() if module in parts else None)
            self._hooks.append(nn.modules.module.register_module_forward_pre_hook(before))

    def _begin(self) -> None:
        if torch.is_grad_enabled():
            self._trainee.keep_writes()
            self._trainee.end_first()

    def end(self) -> None:
        """Remove the hooks."""
        self._on_load.tell = _ignore
        for handle in self._hooks:
            handle.remove()
        self._hooks = []


class LoadHook:
    """Calls `tell` after load_state_dict of its module. A copy of it, in a copy of the model, does nothing."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.tell = tell

    def __call__(self, module: nn.Module, keys: Any) -> None:
        self.tell()

    def __reduce__(self) -> Any:
        return LoadHook, (_ignore,)


def _ignore() -> None:
    """Do nothing."""
