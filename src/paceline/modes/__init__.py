"""WHEN does a gradient count? A mode is a few pure questions; a new one is one file and one line here."""

from collections.abc import Callable

from paceline.errors import UsageError
from paceline.modes.base import Mode
from paceline.modes.each_push import EachPush
from paceline.modes.full_sync import FullSync
from paceline.modes.quorum import Quorum

MODES: dict[str, Callable[[], Mode]] = {"async": EachPush, "sync": FullSync}


def make(name: str, replicas_to_aggregate: int | None = None) -> Mode:
    """The mode that the flags ask for.

    >>> make("sync", replicas_to_aggregate=2).name
    'sync'
    """
    if name not in MODES:
        raise UsageError(f"unknown mode '{name}': use one of {', '.join(MODES)}")
    if name == "sync" and replicas_to_aggregate is not None:
        return Quorum(replicas_to_aggregate)
    return MODES[name]()
