"""WHAT is `p.grad` of a parameter that lives on another task? A tensor without memory that stands for the one there.

Made by ingraph/resident. Asked for its norm, it asks there; multiplied in place, it is multiplied there: that is what
torch's clip_grad_norm_ does, over all parameters, wherever their gradients are. Anything else is refused in a sentence.
Must never read as a number that it is not: others are clipped by it.
"""

from typing import Any

import torch

from paceline.errors import UsageError
from paceline.ingraph import adopted
from paceline.ingraph.mirror import Mirror

_NORM, _TIMES = torch.ops.aten.linalg_vector_norm.default, torch.ops.aten.mul_.Tensor


class Elsewhere(torch.Tensor):
    """The gradient of one parameter of a copy."""

    _mirror: Mirror
    _number: int

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, mirror: Mirror, number: int) -> "Elsewhere":
        made = torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)
        made._mirror, made._number = mirror, number
        return made

    def __init__(self, *_: Any) -> None:
        """All is done by then."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"a gradient of shape {tuple(self.shape)} on {self._mirror.task}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given = args[0] if args else None
        if isinstance(given, Elsewhere) and func is _NORM and len(args) <= 2 and not kwargs:
            return given._ask(adopted.norm, float(args[1]) if len(args) == 2 else 2.0).to(given.device)
        if isinstance(given, Elsewhere) and func is _TIMES and args[1].dim() == 0:
            given._ask(adopted.scale, args[1])
            return given
        where = next((each._mirror.task for each in args if isinstance(each, Elsewhere)), "another task")
        raise UsageError(
            f"This gradient is on {where}, where its own optimizer uses it: clip_grad_norm_ and zero_grad() reach it, "
            "anything else does not. place() the part without an optimizer, and its gradients come here."
        )

    def _ask(self, what: Any, *args: Any) -> Any:
        with self._mirror.lock:
            return self._mirror.ask(what, self._number, *args)
