"""Tickets for `ctx.steps(total)`: the cluster makes exactly that many updates, at any speed.

Used by control.py on ps:0. A ticket is leave to compute one more gradient; it comes back when its push is
dealt with, or when its worker leaves.
"""

from dataclasses import dataclass, field

from paceline.server.control.kept import KNOWN


@dataclass(slots=True)
class Budget:
    """The steps of the cluster; `total` is None until a worker has said how many they are.

    >>> budget = Budget(total=2)
    >>> [budget.grant(worker, applied=0) for worker in (0, 1, 2)]
    [True, True, False]
    """

    total: int | None = field(default=None, metadata=KNOWN)
    _granted: set[int] = field(default_factory=set)

    def grant(self, worker: int, applied: int) -> bool:
        """Grant a worker its one ticket, while what is applied and what is granted stay within the total."""
        self._granted.discard(worker)
        assert self.total is not None
        if applied + len(self._granted) < self.total:
            self._granted.add(worker)
            return True
        return False

    def give_back(self, worker: int) -> None:
        """Take back the ticket of a worker, if it has one."""
        self._granted.discard(worker)

    def grant_round(self, applied: int) -> bool:
        """Grant a ticket for a round, whose one update is shared by all its workers."""
        return self.total is not None and applied < self.total

    def is_spent(self, applied: int) -> bool:
        return self.total is not None and applied >= self.total
