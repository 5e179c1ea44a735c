"""IN WHICH precision does torch compute just now? What `torch.autocast` says here also counts where a copy computes.

Read by ingraph/place and towers in the thread that trains (autocast belongs to a thread), entered by ingraph/replicas
and copies wherever the copy is. Must never reach the backward pass: torch computes that without autocast.
"""

from typing import Any

import msgspec
import torch

from paceline.errors import UsageError

_KINDS = ("cpu", "cuda")
_DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}


class Precision(msgspec.Struct, frozen=True):
    """The dtype of each kind of device for which autocast is on, and whether cast weights are kept.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     now = Precision.now()
    >>> with now.on(torch.device("cpu")):
    ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
    torch.bfloat16
    """

    dtypes: dict[str, str]
    is_cached: bool

    @staticmethod
    def now() -> "Precision":
        """What holds in this thread."""
        dtypes = {kind: _name(torch.get_autocast_dtype(kind)) for kind in _KINDS if torch.is_autocast_enabled(kind)}
        return Precision(dtypes, torch.is_autocast_cache_enabled())

    def on(self, device: torch.device) -> Any:
        """A block in which it holds for that device, whatever holds around it."""
        name = self.dtypes.get(device.type)
        if name is None:
            return plain_on(device)
        return torch.autocast(device.type, dtype=_DTYPES[name], cache_enabled=self.is_cached)


def plain_on(device: torch.device) -> Any:
    """A block without autocast."""
    return torch.autocast(device.type, enabled=False)


def _name(dtype: torch.dtype) -> str:
    for name, known in _DTYPES.items():
        if known == dtype:
            return name
    raise UsageError(f"torch.autocast to {dtype} does not reach other devices; use one of: {', '.join(_DTYPES)}.")
