"""A simulated saver: worker/checkpoints/saver.py, message for message, on connections of its own beside a worker's.

It fetches no numbers; what must be true of a copy is looked at when it is made (sim_ps) and when all are there.
"""

from typing import TYPE_CHECKING

from sim_task import Doing, Link, Task

from paceline.wire import messages as m

if TYPE_CHECKING:
    from sim_run import Cluster

TRIES = 60  # then it writes without the positions that are still to come, or gives up


class Saver(Task):
    """One announced update, saved by the worker that was told to."""

    def __init__(self, cluster: "Cluster", index: int, incarnation: int) -> None:
        super().__init__(cluster, index, incarnation)
        self.copies: list[m.Copied] = []  # of every shard, if it came to its end

    def die(self) -> None:
        """It ends; no task is started again for it."""
        self.is_alive = False
        for link in self.links:
            link.connection.cut()

    def run(self) -> Doing:
        self.links = [Link(self, 0)]
        first = yield from self._copy_of_first()
        if first is None:
            return
        copies = [first]
        for index in range(1, self.cluster.plan.num_ps):
            self.links.append(Link(self, index))
            copies.append((yield from self._copy_like(self.links[-1], first)))
        if None not in copies:
            self.copies = copies
        for link in reversed(self.links):  # ps:0 last: it announces the next one
            yield from self.tell(link, m.FreeCopy(self.index, self.incarnation))

    def _copy_of_first(self) -> Doing:
        for number in range(TRIES):
            copy = yield from self.tell(self.links[0], m.Copy(self.index, self.incarnation))
            if not copy.is_wanted:
                return None
            if copy.is_taken and (not copy.awaited or number > TRIES // 2):
                return copy
            yield self.world.delay()
        return None

    def _copy_like(self, link: Link, first: m.Copied) -> Doing:
        for _ in range(TRIES):
            copy = yield from self.tell(link, m.Copy(self.index, self.incarnation, is_now=not first.has_rounds))
            if not first.has_rounds or (copy.is_taken and copy.round == first.round):
                return copy
            yield self.world.delay()
        return None
