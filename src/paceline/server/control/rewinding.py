"""Bringing values to a shard that lost its memory with its host: from a checkpoint, or what a worker has.

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
from paceline.server.control.actions import Action, Free, Restored, SetVersion
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
    _restorer: int | None = None
    _lineage: int = 0
    _until_s: float | None = None  # until then no round closes without those who were in
    _offers: dict[int, int] = field(default_factory=dict)  # by worker: the version of what it has
    _empty_since_s: float | None = None

    def is_by(self, connection: int) -> bool:
        """Return whether this connection brings the values."""
        return self._restorer == connection

    def left(self, connection: int) -> None:
        """A connection ended."""
        if self._restorer == connection:
            self._restorer = None

    def offered(self, worker: int, version: int) -> tuple[int, int]:
        """Note that a worker comes to the empty shard; return how many have offered what they have, and who has the
        newest.

        >>> empty = Rewinding()
        >>> empty.offered(0, 7), empty.offered(2, 9), empty.offered(1, 9), empty.offered(3, -1)
        ((1, 0), (2, 2), (3, 1), (3, 1))
        """
        if version >= 0:
            self._offers[worker] = version
        freshest = max(self._offers, key=lambda each: (self._offers[each], -each), default=-1)
        return len(self._offers), freshest

    def asked(self, control: "Control", join: m.Join, reply: m.Joined, now_s: float) -> m.Joined:
        """Return what a worker that joins the empty shard has to know before it brings values."""
        if self._empty_since_s is None:
            self._empty_since_s = now_s
        offers, freshest = self.offered(join.worker, join.offer)
        return msgspec.structs.replace(
            reply, offers=offers, freshest=freshest, trained_in=control.trained_in,
            is_chief_lost=control.members[0].phase is Phase.LOST, empty_s=now_s - self._empty_since_s,
        )  # fmt: skip

    def check(self, control: "Control", connection: int, message: m.Rewind) -> None:
        """Refuse a worker that may not begin."""
        key, index = (message.worker, message.incarnation), control.config.index
        if control.keys.get(connection) not in (None, key) or not control.members.may_come(*key):
            raise Refused(f"worker:{message.worker} is another one by now, or none: it has no values to bring")
        if self._restorer not in (None, connection):
            raise Refused(f"another worker brings values to ps:{index} already")
        if message.is_lost and control.is_initialised:
            raise Refused(f"ps:{index} has got values meanwhile")
        if message.lineage <= (known := max(control.lineage, control.trained_in)):
            raise Refused(f"ps:{index} is of lineage {known} already")

    def begin(self, control: "Control", connection: int, message: m.Rewind, now_s: float) -> None:
        """1."""
        self._restorer, self._lineage = connection, message.lineage
        self.over_s = now_s + BRING_S
        if control.is_initialised:
            self._empty_since_s, control.is_initialised = None, False
        if not message.is_fencing:
            return
        if control.config.index == 0:
            live = len(control.members.live)
            control.state.min_workers = live if control.is_started else control.config.num_workers
        fence_all(control, now_s)

    def waited(self, control: "Control", now_s: float) -> None:
        """Let rounds close again once all who were in are back, or had their time: until then none trains ahead
        alone."""
        if self._until_s is None or (now_s < self._until_s and control.state.lacks):
            return
        self._until_s, control.state.min_workers = None, control.config.min_workers
        control.do(control.state.look_again(now_s), now_s)

    def end(self, control: "Control", connection: int, message: m.Restored, now_s: float) -> None:
        """3."""
        if self._restorer != connection or control.model is None:
            raise Refused("this worker has not begun to bring values, or took too long")
        config, state = control.config, control.state
        self._restorer = None
        self._offers.clear()
        self._empty_since_s = None
        self.over_s = now_s + max(BACK_S, config.lease_s)
        control.lineage, state.version, state.offset = self._lineage, message.version, 0
        control.out.append(SetVersion(message.version))
        control.is_initialised = True
        if config.index == 0 and not control.is_started:
            control.is_started = True
            control.members.expected = 0  # which workers are done is not known: all that live come by themselves
        if message.live is not None and config.index != 0:
            for worker in set(control.members.missing) - set(message.live):
                control.members.close(worker)  # it was done before this ps was empty; if not, it may join all the same
        if state.min_workers != config.min_workers:
            self._until_s = now_s + max(ROUNDS_WAIT_S, config.lease_s)
        if message.dial is not None and message.dial.turn > state.turn:
            state.mode, state.turn = make_mode(message.dial.spec, config.num_workers), message.dial.turn
            control.dial = m.Dial(message.dial.turn, message.dial.spec, message.version)
        if message.seed is not None:
            control.seed = message.seed
        source = FROM_WORKER if message.is_reseeded else FROM_CHECKPOINT
        control.out.append(Restored(message.version, self._lineage, source))


def fence_all(control: "Control", now_s: float) -> None:
    """Make void what was staged, voted for or waited for; every worker comes back as a newer incarnation."""
    control.out += [Free(key) for key in control.state.staged]
    control.state.begin_anew()
    control.saving.forget(control)
    for worker in control.members.live:
        key = (worker, control.members[worker].incarnation)
        leaving.drop(control, key, now_s)
        control.members.fence(*key)


# --- events -----------------------------------------------------------------------------------------------------------


def rewind(control: "Control", connection: int, message: m.Rewind, now_s: float) -> list[Action]:
    """From a worker that has joined the ps without memory; this one may know it as one that was fenced, or not yet,
    but as no newer one."""
    control.rewinding.check(control, connection, message)
    control.take_model(message.layout, message.optimizer)
    control.rewinding.begin(control, connection, message, now_s)
    return control.done(connection)


def restored(control: "Control", connection: int, message: m.Restored, now_s: float) -> list[Action]:
    """The values are there."""
    control.rewinding.end(control, connection, message, now_s)
    control.say(connection, m.Done())
    starting.release_starters(control, now_s)
    return control.take()
