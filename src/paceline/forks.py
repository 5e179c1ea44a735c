"""Keep children that a script forks from acting for their parent: they hold copies of its connections and memory.

os.fork, multiprocessing's "fork" and DataLoader workers all pass here. Objects with descriptors or shared memory
register with `hold` and are closed in a child, without a message to the other side. Objects that act for a task keep an
`Owner` and ask it. A task that launchers/forking makes has made nothing before its fork, so it owns everything.
"""

import os
import weakref
from typing import Protocol

from paceline.errors import UsageError

INSTEAD = (
    "Call it there. The child's copy of the model is its own: evaluate it, or train it with an optimizer that it makes"
)


class Held(Protocol):
    """A descriptor, or memory that several processes map."""

    def close_in_child(self) -> None:
        """Close this in a forked child, so that nothing changes for the parent. Must not raise or wait."""


_owners: "weakref.WeakSet[Owner]" = weakref.WeakSet()


class Owner:
    """The process in which this was made.

    >>> owner = Owner()
    >>> owner.is_here
    True
    """

    __slots__ = ("__weakref__", "_pid", "is_here")

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.is_here = True  # this is that process, not a child of it
        _owners.add(self)

    def refusal(self, what: str) -> UsageError:
        """Return the error for a child that does what only the owner can."""
        return UsageError(
            f"{what} in a forked child: only its parent (pid {self._pid}) takes part in the run. {INSTEAD}"
        )


_held: "weakref.WeakSet[Held]" = weakref.WeakSet()


def hold(held: Held) -> None:
    """Have this closed in every child that is forked from now on."""
    _held.add(held)


def release(held: Held) -> None:
    """Undo `hold`: it is closed here, too."""
    _held.discard(held)


def _is_forked() -> None:
    for owner in list(_owners):
        owner.is_here = False
    _owners.clear()
    inherited = list(_held)
    _held.clear()
    for each in inherited:
        each.close_in_child()


os.register_at_fork(after_in_child=_is_forked)
