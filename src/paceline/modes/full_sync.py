"""sync: one update from one gradient of every worker that trains; each waits for its round.

worker:  loop: pull w of this round; g = gradient(w); push g
ps:      when all training workers are in: w = optimizer(w, (g0 + g1 + …) / n); answer all
"""

from collections.abc import Mapping, Set

from paceline.modes.spec import ModeSpec


class FullSync:
    keeps_clocks = False
    is_lockstep = True
    has_rounds = True
    adds_up = False

    def __init__(self, spec: ModeSpec) -> None:
        self.spec = spec

    def admits(self, base: int, version: int) -> bool:
        return base == version

    def is_due(self, given: Mapping[int, int], training: Set[int]) -> bool:
        return bool(given) and training <= given.keys()

    def may_read(self, ahead: int) -> bool:
        return ahead < 1

    def grace_s(self, round_s: float) -> float:
        return 0.0
