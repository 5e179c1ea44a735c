"""Parameter-server training for the machines you have: the public names, sorted.

Importing does nothing, not even import torch: each name is looked up when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.version import VERSION as __version__

if TYPE_CHECKING:
    from paceline.cluster.spec import ClusterSpec
    from paceline.errors import PacelineError
    from paceline.launchers.task import init
    from paceline.launchers.threads import launch
    from paceline.worker.context import Context
    from paceline.worker.torch_checkpoint import load_checkpoint

_NAMES = {
    "ClusterSpec": "paceline.cluster.spec",
    "Context": "paceline.worker.context",
    "PacelineError": "paceline.errors",
    "init": "paceline.launchers.task",
    "launch": "paceline.launchers.threads",
    "load_checkpoint": "paceline.worker.torch_checkpoint",
}

__all__ = ["ClusterSpec", "Context", "PacelineError", "__version__", "init", "launch", "load_checkpoint"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'")
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
