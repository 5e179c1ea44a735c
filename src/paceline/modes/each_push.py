"""async: every gradient is an update, at once; nobody waits.

worker:  loop: pull w; g = gradient(w); push g
ps:      on push g: w = optimizer(w, g); answer w
"""

from collections.abc import Set


class EachPush:
    name = "async"
    is_lockstep = False
    has_rounds = False

    def admits(self, base: int, version: int) -> bool:
        return True

    def is_due(self, waiting: Set[int], training: Set[int]) -> bool:
        return bool(waiting)

    def may_read(self, base: int, version: int) -> bool:
        return True
