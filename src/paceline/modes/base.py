"""WHEN does a gradient count? The questions that every mode answers.

Asked by server/control/state; no clock, socket, thread or tensor may be seen from here.
"""

from collections.abc import Mapping, Set
from typing import Protocol

from paceline.modes.spec import ModeSpec


class Mode(Protocol):
    """Facts in, decisions out. `has_rounds`: gradients are collected and become one update together."""

    spec: ModeSpec
    has_rounds: bool
    is_lockstep: bool  # no update can happen while a worker that trains still reads the last one
    keeps_clocks: bool  # workers wait for the slowest one
    adds_up: bool  # one worker may put several gradients into a round

    def admits(self, base: int, version: int) -> bool:
        """Return whether a gradient that was computed from version `base` may be put into the round that is open now
        that the shard is at `version`. Without rounds every gradient counts, and this is not asked."""
        ...

    def is_due(self, given: Mapping[int, int], training: Set[int]) -> bool:
        """Do the gradients make an update? `given`: how many each worker has put into the open round."""
        ...

    def may_read(self, ahead: int) -> bool:
        """May a worker go on that is so many steps ahead: of its open round, or of the slowest worker?"""
        ...

    def grace_s(self, round_s: float) -> float:
        """How long a round that is due waits for more, when rounds take `round_s`."""
        ...
