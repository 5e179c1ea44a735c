"""Parameter-server training for the machines you have: the public names, sorted.

Importing does nothing, not even import torch: each name is looked up when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.version import VERSION as __version__

if TYPE_CHECKING:
    from paceline.cluster.spec import ClusterSpec
    from paceline.errors import PacelineError
    from paceline.ingraph.config import ConfigProto
    from paceline.ingraph.graph import Graph
    from paceline.ingraph.neighbours import connect
    from paceline.ingraph.op import op
    from paceline.ingraph.place import place
    from paceline.ingraph.scope import device
    from paceline.ingraph.server import Server
    from paceline.ingraph.session import Session
    from paceline.ingraph.towers import towers
    from paceline.launchers.task import init
    from paceline.launchers.threads import launch
    from paceline.worker.checkpoints.loading import load_checkpoint
    from paceline.worker.constraints import constrain
    from paceline.worker.context import Context

_NAMES = {
    "ClusterSpec": "paceline.cluster.spec",
    "ConfigProto": "paceline.ingraph.config",
    "Context": "paceline.worker.context",
    "Graph": "paceline.ingraph.graph",
    "PacelineError": "paceline.errors",
    "Server": "paceline.ingraph.server",
    "Session": "paceline.ingraph.session",
    "connect": "paceline.ingraph.neighbours",
    "constrain": "paceline.worker.constraints",
    "device": "paceline.ingraph.scope",
    "init": "paceline.launchers.task",
    "launch": "paceline.launchers.threads",
    "load_checkpoint": "paceline.worker.checkpoints.loading",
    "op": "paceline.ingraph.op",
    "place": "paceline.ingraph.place",
    "towers": "paceline.ingraph.towers",
}

__all__ = [
    "ClusterSpec", "ConfigProto", "Context", "Graph", "PacelineError", "Server", "Session", "__version__", "connect",
    "constrain", "device", "init", "launch", "load_checkpoint", "op", "place", "towers",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'")
    return getattr(import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
