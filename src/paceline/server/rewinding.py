"""HOW does a shard go back? A ps lost its memory with its host, and a worker brings what was saved, or what it has.

Used by server/desk. ps of the same run may go back with it: in modes with rounds all of them do, because a round is the
same on all shards. The worker (worker/rewinding has the other side) does it on a connection of its own:

1. Rewind: this shard is its own from now on. Whoever trains here is fenced: it comes back as a newer incarnation, and
   what it pushed last is void. Until 3 nobody finds the shard initialised.
2. Init and Assign: the values, as a chief would bring them.
3. Restored: under the new lineage everybody may go on.

If the worker's connection ends before 3, another one may begin. Every method wants the core's lock held.
"""

import time
from typing import TYPE_CHECKING

import msgspec

from paceline.cluster.membership import Phase
from paceline.errors import Refused
from paceline.modes import make as make_mode
from paceline.server.control.actions import Answer
from paceline.server.control.rounds import Rounds
from paceline.telemetry.ledger import FROM_CHECKPOINT, FROM_WORKER
from paceline.wire import messages as m

if TYPE_CHECKING:
    from paceline.server.core import Core, Peer

BRING_S = 300.0  # how long bringing the values may take, another worker's try included
BACK_S = 15.0  # after that, how long an empty ps waits for somebody to come back
ROUNDS_WAIT_S = 5.0  # how long rounds wait for all who were in


class Rewinding:
    """Who brings values to this shard now."""

    def __init__(self) -> None:
        self._restorer: Peer | None = None
        self._lineage = 0
        self._until_s: float | None = None  # so long no round closes without those who were in
        self._over_s = 0.0  # so long somebody may come, though nobody is in
        self._offers: dict[int, int] = {}  # by worker: the version of what it has
        self._empty_since_s: float | None = None

    def is_under_way(self, now_s: float) -> bool:
        """Whether those who were fenced are still to come back."""
        return now_s < self._over_s

    def is_by(self, peer: "Peer") -> bool:
        return self._restorer is peer

    def left(self, peer: "Peer") -> None:
        """A connection ended."""
        if self._restorer is peer:
            self._restorer = None

    def offered(self, worker: int, version: int) -> tuple[int, int]:
        """A worker comes to the empty shard: how many have offered what they have, and who has the newest.

        >>> empty = Rewinding()
        >>> empty.offered(0, 7), empty.offered(2, 9), empty.offered(1, 9), empty.offered(3, -1)
        ((1, 0), (2, 2), (3, 1), (3, 1))
        """
        if version >= 0:
            self._offers[worker] = version
        freshest = max(self._offers, key=lambda each: (self._offers[each], -each), default=-1)
        return len(self._offers), freshest

    def asked(self, core: "Core", join: m.Join, reply: m.Joined, now_s: float) -> m.Joined:
        """What a worker that joins the empty shard has to know before it brings values."""
        if self._empty_since_s is None:
            self._empty_since_s = now_s
        offers, freshest = self.offered(join.worker, join.offer)
        return msgspec.structs.replace(
            reply, offers=offers, freshest=freshest, trained_in=core.trained_in,
            is_chief_lost=core.members[0].phase is Phase.LOST, empty_s=now_s - self._empty_since_s,
        )  # fmt: skip

    def begin(self, core: "Core", peer: "Peer", message: m.Rewind) -> "list[tuple[Peer, Answer]]":
        """1."""
        if self._restorer is not None and self._restorer is not peer:
            raise Refused(f"another worker brings values to ps:{core.config.index} already")
        if message.is_lost and core.is_initialised:
            raise Refused(f"ps:{core.config.index} has got values meanwhile")
        if message.lineage <= (known := max(core.lineage, core.trained_in)):
            raise Refused(f"ps:{core.config.index} is of lineage {known} already")
        self._restorer, self._lineage = peer, message.lineage
        self._over_s = time.monotonic() + BRING_S
        if core.shard is None:
            core.make_shard(message.layout, message.optimizer)
            if core.durable is not None:
                core.durable.model(message.layout, message.optimizer)
        if core.is_initialised:
            self._empty_since_s, core.is_initialised = None, False
        if not message.is_fencing:
            return []
        if core.config.index == 0:
            core.state.min_workers = len(core.members.live) if core.is_started else core.config.num_workers
        return fence_all(core)

    def waited(self, core: "Core", now_s: float) -> "list[tuple[Peer, Answer]]":
        """Whoever was in comes back within a moment, each at its own: nobody trains ahead alone meanwhile. Asked now
        and then."""
        if self._until_s is None or (now_s < self._until_s and core.state.lacks):
            return []
        self._until_s, core.state.min_workers = None, core.config.min_workers
        return core.perform(core.state.look_again(now_s))

    def end(self, core: "Core", peer: "Peer", message: m.Restored) -> None:
        """3."""
        if self._restorer is not peer or core.shard is None:
            raise Refused("this worker has not begun to bring values, or took too long")
        self._restorer = None
        self._offers.clear()
        self._empty_since_s = None
        self._over_s = time.monotonic() + max(BACK_S, core.config.lease_s)
        core.lineage, core.updates, core.state.version = self._lineage, message.version, message.version
        core.shard.set_version(message.version)
        core.state.offset = 0
        core.is_initialised = True
        if core.config.index == 0 and not core.is_started:
            core.is_started = True
            core.members.expected = 0  # who is done by now, nobody can tell: whoever lives comes by itself
        if message.live is not None and core.config.index != 0:
            for worker in set(core.members.missing) - set(message.live):
                core.members.close(worker)  # it was done before this ps was empty; if not, it may join all the same
        if core.state.min_workers != core.config.min_workers:
            self._until_s = time.monotonic() + max(ROUNDS_WAIT_S, core.config.lease_s)
        if message.dial is not None and message.dial.turn > core.state.turn:
            core.state.mode, core.state.turn = make_mode(message.dial.spec, core.config.num_workers), message.dial.turn
            core.dial = m.Dial(message.dial.turn, message.dial.spec, message.version)
        if message.seed is not None:
            core.seed = message.seed
        if core.ledger is not None:
            source = FROM_WORKER if message.is_reseeded else FROM_CHECKPOINT
            core.ledger.restored(message.version, self._lineage, source)


def fence_all(core: "Core") -> "list[tuple[Peer, Answer]]":
    """Nothing that was staged, voted for or waited for counts any more; whoever is in comes back as a newer one."""
    state = core.state
    state.rounds = Rounds()
    state.staged.clear()
    state.waiting.clear()
    state.clocks.clear()
    state.floor, state.due_s, state.closed_s, state.copy_at = 0, None, None, None
    core.snapshots.forget(core)
    answers: list[tuple[Peer, Answer]] = []
    for worker in core.members.live:
        key = (worker, core.members[worker].incarnation)
        answers += core.drop(key)
        core.members.fence(*key)
    for key in list(core.slots):
        core.slots.pop(key).free()
    return answers
