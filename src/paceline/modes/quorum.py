"""sync, k of n: the first K gradients of a round make the update; later ones are discarded and counted.

worker:  loop: pull w of this round; g = gradient(w); push g   (with tokens left: again, into the same round)
ps:      when K are in, and the grace is over (or nobody else can come): w = optimizer(w, mean of those); answer all
"""

from collections.abc import Mapping, Set

from paceline.modes.spec import ModeSpec


class Quorum:
    keeps_clocks = False
    is_lockstep = False
    has_rounds = True

    def __init__(self, spec: ModeSpec, num_workers: int) -> None:
        assert spec.replicas_to_aggregate is not None
        self.spec = spec
        self._wanted = spec.replicas_to_aggregate
        self._tokens = spec.tokens_of(num_workers)
        self.adds_up = self._tokens > 1

    def admits(self, base: int, version: int) -> bool:
        return base == version

    def is_due(self, given: Mapping[int, int], training: Set[int]) -> bool:
        return bool(given) and (sum(given.values()) >= self._wanted or self._is_full(given, training))

    def _is_full(self, given: Mapping[int, int], training: Set[int]) -> bool:
        """Whether nobody who trains may put anything more into the round."""
        return all(given.get(worker, 0) >= self._tokens for worker in training)

    def may_read(self, ahead: int) -> bool:
        return ahead < self._tokens

    def grace_s(self, round_s: float) -> float:
        return self.spec.grace_ms / 1e3 or self.spec.grace_share * round_s
