"""async: every gradient is an update, at once; nobody waits.

worker:  loop: pull w; g = gradient(w); push g
ps:      on push g: w = optimizer(w, g); answer w
"""

from collections.abc import Mapping, Set

from paceline.modes.spec import ModeSpec


class EachPush:
    keeps_clocks = False
    is_lockstep = False
    has_rounds = False
    adds_up = False

    def __init__(self, spec: ModeSpec) -> None:
        self.spec = spec

    def admits(self, base: int, version: int) -> bool:
        return True

    def is_due(self, given: Mapping[int, int], training: Set[int]) -> bool:
        return bool(given)

    def may_read(self, ahead: int) -> bool:
        return True

    def grace_s(self, round_s: float) -> float:
        return 0.0
