"""Restore a shard that lost its memory with its host: from a checkpoint, or from the values that a worker has.

ps of the same run may go back with it: in modes with rounds all of them do, because a round is the same on all shards.
The worker (worker/checkpoints/rewinding has the other side) does it on a connection of its own:

1. Rewind: this shard is its own from now on. All workers that train here are fenced: each comes back as a newer
   incarnation, and what it pushed last is void. Until 3 the shard counts as not initialised.
2. Init and Assign: the values, as a chief would bring them.
3. Restored: under the new lineage all workers may go on.

If the worker's connection ends before 3, another one may begin.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from paceline.cluster.membership import Phase
from paceline.errors import Refused
from paceline.modes import make as make_mode
from paceline.server.control import leaving, starting
from paceline.server.control.actions import Action, Free, ModeHolds, Restored, SetVersion
from paceline.telemetry.ledger import FROM_CHECKPOINT, FROM_WORKER
from paceline.wire import messages as m

if TYPE_CHECKING:
    from paceline.server.control.control import Control

BRING_S = 300.0  # how long bringing the values may take, another worker's try included
BACK_S = 15.0  # after that, how long an empty ps waits for a worker to come back
ROUNDS_WAIT_S = 5.0  # how long rounds wait for all who were in


@dataclass(slots=True)
class Rewinding:
    """Which connection brings values to this shard now."""

    over_s: float = 0.0  # until then workers may come, though none is in
    restorer: int | None = None
    lineage: int = 0
    until_s: float | None = None  # until then no round closes without those who were in
    offers: dict[int, int] = field(default_factory=dict)  # by worker: the version of what it has
    empty_since_s: float | None = None

    def is_by(self, connection: int) -> bool:
        """Return whether this connection brings the values."""
        return self.restorer == connection

    def left(self, connection: int) -> None:
        """Let another worker begin, if the connection that ended brought the values."""
        if self.restorer == connection:
            self.restorer = None

    def offered(self, worker: int, version: int) -> tuple[int, int]:
        """Note that a worker comes to the empty shard; return how many have offered what they have, and who has the
        newest.

        >>> empty = Rewinding()
        >>> empty.offered(0, 7), empty.offered(2, 9), empty.offered(1, 9), empty.offered(3, -1)
        ((1, 0), (2, 2), (3, 1), (3, 1))
        """
        if version >= 0:
            self.offers[worker] = version
        freshest = max(self.offers, key=lambda each: (self.offers[each], -each), default=-1)
        return len(self.offers), freshest

    def asked(self, control: "Control", join: m.Join, reply: m.Joined, now_s: float) -> m.Joined:
        """Return what a worker that joins the empty shard has to know before it brings values."""
        if self.empty_since_s is None:
            self.empty_since_s = now_s
        offers, freshest = self.offered(join.worker, join.offer)
        return msgspec.structs.replace(
            reply, offers=offers, freshest=freshest, trained_in=control.trained_in,
            is_chief_lost=control.members[0].phase is Phase.LOST, empty_s=now_s - self.empty_since_s,
        )  # fmt: skip

    def waited(self, control: "Control", now_s: float) -> None:
        """Let rounds close again once all who were in are back, or had their time: until then none trains ahead
        alone."""
        if self.until_s is None or (now_s < self.until_s and control.state.lacks):
            return
        self.until_s, control.state.min_workers = None, control.config.min_workers
        control.do(control.state.look_again(now_s), now_s)


# --- events -----------------------------------------------------------------------------------------------------------


def check_rewind(control: "Control", connection: int, message: m.Rewind) -> None:
    """Refuse a worker that may not begin."""
    key, index, rewinding = (message.worker, message.incarnation), control.config.index, control.rewinding
    if control.keys.get(connection) not in (None, key) or not control.members.may_come(*key):
        raise Refused(f"worker:{message.worker} is another one by now, or none: it has no values to bring")
    if rewinding.restorer not in (None, connection):
        raise Refused(f"another worker brings values to ps:{index} already")
    if message.is_lost and control.is_initialised:
        raise Refused(f"ps:{index} has got values meanwhile")
    if message.lineage <= (known := max(control.lineage, control.trained_in)):
        raise Refused(f"ps:{index} is of lineage {known} already")


def rewind(control: "Control", connection: int, message: m.Rewind, now_s: float) -> list[Action]:
    """1. Let a worker begin, after `check_rewind`. It has joined the ps without memory; this one may know it as one
    that was fenced, or not yet, but as no newer one."""
    rewinding = control.rewinding
    control.take_model(message.layout, message.optimizer)
    rewinding.restorer, rewinding.lineage = connection, message.lineage
    rewinding.over_s = now_s + BRING_S
    if control.is_initialised:
        rewinding.empty_since_s, control.is_initialised = None, False
    if message.is_fencing:
        if control.config.index == 0:
            live = len(control.members.live)
            control.state.min_workers = live if control.is_started else control.config.num_workers
        _fence_all(control, now_s)
    return control.done(connection)


def restored(control: "Control", connection: int, message: m.Restored, now_s: float) -> list[Action]:
    """3. Let all workers go on with the values, which are there."""
    config, state, rewinding = control.config, control.state, control.rewinding
    if not rewinding.is_by(connection) or control.model is None:
        raise Refused("this worker has not begun to bring values, or took too long")
    rewinding.restorer, rewinding.empty_since_s = None, None
    rewinding.offers.clear()
    rewinding.over_s = now_s + max(BACK_S, config.lease_s)
    control.lineage, state.version, state.offset = rewinding.lineage, message.version, 0
    source = FROM_WORKER if message.is_reseeded else FROM_CHECKPOINT
    control.out += [SetVersion(state.version), Restored(state.version, control.lineage, source)]
    control.is_initialised = True
    if config.index == 0 and not control.is_started:
        control.is_started = True
        control.members.expected = 0  # which workers are done is not known: all that live come by themselves
    if message.live is not None and config.index != 0:
        for worker in set(control.members.missing) - set(message.live):
            control.members.close(worker)  # it was done before this ps was empty; if not, it may join all the same
    if state.min_workers != config.min_workers:
        rewinding.until_s = now_s + max(ROUNDS_WAIT_S, config.lease_s)
    if message.dial is not None and message.dial.turn > state.turn:
        state.mode, state.turn = make_mode(message.dial.spec, config.num_workers), message.dial.turn
        control.dial = m.Dial(message.dial.turn, message.dial.spec, message.version)
        control.out.append(ModeHolds(state.mode, state.turn, state.version))
    if message.seed is not None:
        control.seed = message.seed
    starting.release_starters(control, now_s)
    return control.done(connection)


def _fence_all(control: "Control", now_s: float) -> None:
    """Make void what was staged, voted for or waited for; every worker comes back as a newer incarnation."""
    control.out += [Free(key) for key in control.state.staged]
    control.state.begin_anew()
    control.saving.forget(control)
    for worker in control.members.live:
        key = (worker, control.members[worker].incarnation)
        leaving.drop(control, key, now_s)
        control.members.fence(*key)
