"""Take what a PyTorch script loads between prepare() and its first step as first values.

Used by frameworks/torch/training_step where several workers train: each of them loads the same weights into the model
or into parts of it, and the chief's go to the ps. A single worker needs no hooks: what it writes is found by
comparison.
"""

from collections.abc import Callable
from typing import Any

from torch import nn


class LoadHook:
    """Calls `on_load` after load_state_dict of a module, until `end`. A copy, in a copy of the model, does nothing."""

    def __init__(self, on_load: Callable[[], None] | None = None) -> None:
        self._on_load = on_load
        self._handles: list[Any] = []

    def install(self, model: nn.Module) -> None:
        """Register with all modules of the model."""
        self._handles = [each.register_load_state_dict_post_hook(self) for each in model.modules()]  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Remove the hooks."""
        self._on_load = None
        for handle in self._handles:
            handle.remove()

    def __call__(self, module: nn.Module, keys: Any) -> None:
        if self._on_load is not None:
            self._on_load()

    def __reduce__(self) -> Any:
        return LoadHook, ()
