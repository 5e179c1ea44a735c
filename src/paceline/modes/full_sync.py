"""sync: one update from one gradient of every worker that trains; each waits for its round.

worker:  loop: pull w of this round; g = gradient(w); push g
ps:      when all training workers are in: w = optimizer(w, (g0 + g1 + …) / n); answer all
"""

from collections.abc import Set


class FullSync:
    name = "sync"
    is_lockstep = True
    has_rounds = True

    def admits(self, base: int, version: int) -> bool:
        return base == version

    def is_due(self, waiting: Set[int], training: Set[int]) -> bool:
        return bool(waiting) and training <= waiting

    def may_read(self, base: int, version: int) -> bool:
        return version > base
