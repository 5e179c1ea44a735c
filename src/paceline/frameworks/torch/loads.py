"""Take what a PyTorch script loads between prepare() and its first step as first values.

Used by frameworks/torch/training_step where several workers train: each of them loads the same weights into the model
or into parts of it, and the chief's go to the ps. A single worker needs no hooks: what it writes is found by
comparison.
"""

from collections.abc import Callable
from typing import Any

from torch import nn


class LoadHooks:
    """Hooks on the model's modules, which are gone after its first step."""

    def __init__(self, model: nn.Module, on_load: Callable[[], None]) -> None:
        self._hook = LoadHook(on_load)
        self._handles = [m.register_load_state_dict_post_hook(self._hook) for m in model.modules()]  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Remove the hooks."""
        self._hook.tell = _ignore
        for handle in self._handles:
            handle.remove()


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
