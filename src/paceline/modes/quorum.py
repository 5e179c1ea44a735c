"""sync, k of n: the first K gradients of a round make the update; later ones are discarded and counted.

worker:  loop: pull w of this round; g = gradient(w); push g
ps:      when K are in (or nobody else can come): w = optimizer(w, mean of those); answer all
"""

from collections.abc import Set


class Quorum:
    name = "sync"
    is_lockstep = False
    has_rounds = True

    def __init__(self, replicas_to_aggregate: int) -> None:
        self.replicas_to_aggregate = replicas_to_aggregate

    def admits(self, base: int, version: int) -> bool:
        return base == version

    def is_due(self, waiting: Set[int], training: Set[int]) -> bool:
        return bool(waiting) and (len(waiting) >= self.replicas_to_aggregate or training <= waiting)

    def may_read(self, base: int, version: int) -> bool:
        return version > base
