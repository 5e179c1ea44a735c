"""HOW many steps are left for the cluster? Tickets for `ctx.steps(total)`: exactly that many updates, at any speed.

Asked by server/service on ps:0. Pure. A ticket is leave to compute one more gradient; it comes back when its push is
dealt with, or when its worker leaves.
"""


class Budget:
    """
    >>> budget = Budget(total=2)
    >>> [budget.grant(worker, applied=0) for worker in (0, 1, 2)]
    [True, True, False]
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._granted: set[int] = set()

    def grant(self, worker: int, applied: int) -> bool:
        """One ticket a worker at a time: while what is applied and what is granted stay within the total."""
        self._granted.discard(worker)
        if applied + len(self._granted) < self.total:
            self._granted.add(worker)
            return True
        return False

    def give_back(self, worker: int) -> None:
        self._granted.discard(worker)

    def grant_round(self, applied: int) -> bool:
        """In modes with rounds every worker of a round shares its one update."""
        return applied < self.total

    def is_spent(self, applied: int) -> bool:
        return applied >= self.total
