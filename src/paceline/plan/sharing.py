"""HOW is a thing shared by those who use it at once? Simulated time, and cores or a link that all users share fairly.

Used by plan/simulate. Pure. A user that is alone is as fast as it can be; when there are more than fit, all are slowed
alike. Kept in virtual time: who comes or goes costs a place in a heap, however many share.
"""

import heapq
import math
from collections.abc import Callable

Call = Callable[[], None]
ROUNDING = 1e-12


class World:
    """The clock and what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._queue: list[tuple[float, int, Call]] = []
        self._number = 0

    def after(self, delay_s: float, call: Call) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._number, call))

    def run_until(self, is_over: Callable[[], bool], most_events: float = math.inf) -> bool:
        """False: nothing more happens, or too much has, though it is not over."""
        while not is_over():
            if not self._queue or self.events >= most_events:
                return False
            self.now, _, call = heapq.heappop(self._queue)
            self.events += 1
            call()
        return True


class Shared:
    """`capacity` units a second in all, at most `cap` for each; `contention`: each is slower when all are in use."""

    def __init__(self, world: World, capacity: float, cap: float, contention: float = 0.0) -> None:
        self._world = world
        self._capacity = capacity
        self._cap = cap
        self._contention = contention if capacity > cap else 0.0
        self._virtual = 0.0
        self._since = 0.0
        self._users: list[tuple[float, int, float, Call]] = []  # virtual end, number, weight, what then
        self._weight = 0.0
        self._number = 0
        self._turn = 0
        self._called_at = math.inf
        self.used = 0.0  # of the capacity, times seconds
        self.short_s = 0.0  # seconds that every user lost because others used it too

    def use(self, work: float, done: Call, weight: float = 1.0) -> None:
        """So much work, `done` when it is through; `weight` users in one (threads)."""
        if work <= 0:
            self._world.after(0.0, done)
            return
        self._advance()
        self._number += 1
        self._weight += weight
        heapq.heappush(self._users, (self._virtual + work, self._number, weight, done))
        self._next()

    def _rate(self) -> float:
        """Virtual time a second: how fast each user is."""
        wanted = self._weight * self._cap
        rate = self._cap if wanted <= self._capacity else self._capacity / self._weight
        if self._contention:
            others = max(0.0, min(wanted, self._capacity) - self._cap) / (self._capacity - self._cap)
            rate /= 1.0 + self._contention * others
        return rate

    def _advance(self) -> None:
        passed, self._since = self._world.now - self._since, self._world.now
        if self._users and passed > 0:
            self._virtual += passed * self._rate()
            wanted = self._weight * self._cap
            self.used += passed * min(wanted, self._capacity)
            self.short_s += passed * (1 - self._capacity / wanted) if wanted > self._capacity else 0.0

    def _next(self) -> None:
        """Be called when the first one is through; a call that comes too early, because others came since, looks
        again, so one that is under way is enough."""
        if not self._users:
            return
        end = self._end()
        if end < self._called_at:
            self._called_at = end
            self._turn += 1
            turn = self._turn
            self._world.after(end - self._world.now, lambda: self._look(turn))

    def _end(self) -> float:
        """When the first one will be through, if nobody comes or goes."""
        return self._world.now + max(0.0, self._users[0][0] - self._virtual) / self._rate()

    def _is_through(self) -> bool:
        """Up to rounding; also when what is left is too short for the clock, which after a long time has few digits
        for it: it would never be over."""
        is_near = self._users[0][0] <= self._virtual * (1 + ROUNDING) + ROUNDING * self._cap
        return is_near or self._end() <= self._world.now

    def _look(self, turn: int) -> None:
        if turn != self._turn:
            return  # an earlier call was needed since
        self._called_at = math.inf
        self._advance()
        while self._users and self._is_through():
            _, _, weight, done = heapq.heappop(self._users)
            self._weight = self._weight - weight if self._users else 0.0
            done()
        self._next()

    def share_used(self, since: float, used_before: float) -> float:
        """Which share of the capacity was in use since then."""
        self._advance()
        most = (self._world.now - since) * self._capacity
        return (self.used - used_before) / most if most > 0 else 0.0
