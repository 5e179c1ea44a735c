"""WHEN does a gradient count? A mode is a few pure questions; a new one is one file and one line here."""

from collections.abc import Callable

from paceline.modes.base import Mode
from paceline.modes.bounded import Bounded
from paceline.modes.each_push import EachPush
from paceline.modes.full_sync import FullSync
from paceline.modes.local_steps import outer_mode
from paceline.modes.quorum import Quorum
from paceline.modes.spec import ModeSpec, check

MODES: dict[str, Callable[[ModeSpec, int], Mode]] = {
    "async": lambda spec, num_workers: EachPush(spec),
    "sync": lambda spec, num_workers: FullSync(spec),
    "sync, k of n": Quorum,
    "bounded": lambda spec, num_workers: Bounded(spec),
    "local": outer_mode,
}


def make(spec: ModeSpec, num_workers: int) -> Mode:
    """The mode that the flags ask for.

    >>> make(ModeSpec(name="sync", replicas_to_aggregate=2), 3).is_due({0: 1, 2: 1}, {0, 1, 2})
    True
    """
    check(spec, num_workers)
    is_quorum = spec.name == "sync" and spec.replicas_to_aggregate is not None
    return MODES["sync, k of n" if is_quorum else spec.name](spec, num_workers)
