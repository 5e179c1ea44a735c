"""WHAT shall a ps do? The words that server/control/state decides in; server/core makes them true.

Pure values. A new one is a tuple here and a branch in core.perform.
"""

from typing import NamedTuple

from paceline.wire.decisions import Decision, Key
from paceline.wire.frames import Outcome


class Part(NamedTuple):
    """What one worker gives to an update: the sum of its counted gradients, the one in its slot, or both."""

    key: Key
    push_id: int
    gradients: int = 1
    has_sum: bool = False
    has_slot: bool = True


class Apply(NamedTuple):
    """Make one update from these, in this order; its lr divided by `divisor`."""

    parts: tuple[Part, ...]
    divisor: int = 1


class Add(NamedTuple):
    """Add the gradient in this worker's slot to its sum: it is counted, and the slot is needed again."""

    key: Key
    is_first: bool
    push_id: int = 0


class Answer(NamedTuple):
    """Tell this worker what became of its push, and that it may read `version` now. Of a pull: only the latter."""

    key: Key
    push_id: int
    outcome: Outcome
    version: int
    decisions: tuple[Decision, ...] = ()
    flags: int = 0
    is_push: bool = True


class Free(NamedTuple):
    """Nobody will read this gradient slot again."""

    key: Key


class Copy(NamedTuple):
    """Copy everything as it is after the update before this: it is to be saved."""


class Wake(NamedTuple):
    """Ask again after so many seconds: a grace ends then."""

    after_s: float


Action = Apply | Add | Answer | Free | Wake | Copy
