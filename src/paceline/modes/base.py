"""WHEN does a gradient count? The questions that every mode answers.

Asked by server/state and server/rounds; no clock, socket, thread or tensor may be seen from here.
"""

from collections.abc import Set
from typing import Protocol


class Mode(Protocol):
    """Facts in, decisions out. `has_rounds`: gradients are collected and become one update together."""

    name: str
    has_rounds: bool
    is_lockstep: bool  # no update can happen while a worker that trains still reads the last one

    def admits(self, base: int, version: int) -> bool:
        """May a gradient that was computed from version `base` count, now that the shard is at `version`?"""
        ...

    def is_due(self, waiting: Set[int], training: Set[int]) -> bool:
        """Do the gradients of the `waiting` workers make an update, while `training` workers take part?"""
        ...

    def may_read(self, base: int, version: int) -> bool:
        """May a worker that pushed from `base` have the parameters of `version` now?"""
        ...
