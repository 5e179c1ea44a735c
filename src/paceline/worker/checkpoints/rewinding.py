"""Restore a ps that lost its memory: bring it the newest checkpoint, or with --reseed this worker's parameters.

Called by worker/requests/joining when a ps that had values has none. The chief brings a checkpoint; if it does not
come, the next worker does after a while. With --reseed each worker tells the empty ps which version it has, and the one
with the newest brings it. Where rounds make versions, all shards go back together; elsewhere only the lost one.
server/control/rewinding has the other side and the steps. It never ends a run that has something to go back to.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.checkpoint.read import Loaded
from paceline.checkpoint.state import State
from paceline.errors import CheckpointError, ClusterError, ConnectionLost, PacelineError, Refused
from paceline.modes import make as make_mode
from paceline.wire import messages as m
from paceline.worker.checkpoints.connection import Connection
from paceline.worker.checkpoints.restoring import Restored
from paceline.worker.requests.identity import Identity
from paceline.worker.requests.link import Link

if TYPE_CHECKING:
    from paceline.worker.step.training_step import TrainingStep

TURN_S = 2.0  # each worker waits so much longer than the one before it
FRESHER_TURNS = 3  # with --reseed: turns in which only the worker with the newest version may bring it


class Rewinder:
    """Restores empty ps for one worker."""

    def __init__(
        self, me: Identity, training_step: "TrainingStep", find: Callable[[], Loaded | None], is_reseeding: bool,
        say: Callable[[str], None], event: Callable[..., None],
    ) -> None:  # fmt: skip
        self._me = me
        self._training_step = training_step
        self._find = find
        self._is_reseeding = is_reseeding
        self._say = say
        self._event = event
        self.has_trained = False  # until then there is nothing in this worker to reseed from

    def on_empty(self, link: Link, joined: m.Joined) -> None:
        """Bring this ps values if it is this worker's turn. Always raise, so that the caller rejoins it until it has
        some."""
        reason = f"ps:{link.index} lost its memory, and nobody has brought it values yet"
        if self._is_its_turn(joined):
            try:
                self._bring(link, joined.trained_in)
                reason = f"ps:{link.index} lost its memory, and has got values now"
            except (ConnectionLost, Refused) as error:  # another worker is quicker, or a ps is still on its way
                reason = f"{reason}: {error}"
            except ClusterError as error:  # what this worker cannot find, the chief may, or one whose turn comes later
                if self._me.is_chief or (joined.is_chief_lost and self._all_had_turns(joined)):
                    raise
                reason = f"{reason}: {error}"
        raise ConnectionLost(reason)

    def offer(self, link: Link) -> int:
        """Return the version of the parameters that this worker could bring to this ps; -1: none."""
        if not (self._is_reseeding and self.has_trained):
            return -1
        return lost_version(self._training_step.client.links, link, self._has_rounds(self._training_step.client.dial))

    def _is_its_turn(self, joined: m.Joined) -> bool:
        if not self._is_reseeding:
            return joined.empty_s >= TURN_S * self._me.worker
        if joined.freshest == self._me.worker:
            return joined.offers == len(self._me.worker_devices) or joined.empty_s >= TURN_S
        return self.has_trained and joined.empty_s >= TURN_S * (FRESHER_TURNS + self._me.worker)

    def _all_had_turns(self, joined: m.Joined) -> bool:
        return joined.empty_s >= TURN_S * len(self._me.worker_devices)

    def _has_rounds(self, dial: m.Dial) -> bool:
        return make_mode(dial.spec, len(self._me.worker_devices)).has_rounds

    def _newest_dial(self, lost: int) -> m.Dial:
        """Return the mode that holds, as a ps knows it that still has its memory: this worker may have been started
        again since the mode was changed."""
        own, witness = self._training_step.client.dial, 0 if lost else 1
        if witness >= self._training_step.plan.num_ps:
            return own
        connection = Connection(self._me, witness)
        try:
            told = connection.described()
        finally:
            connection.close()
        return m.Dial(told.turn, told.spec, told.version) if told.turn > own.turn else own

    def _bring(self, lost: Link, trained_in: int) -> None:
        """Bring values under a new lineage, newer than those that others may have trained in without this worker."""
        client, dial = self._training_step.client, self._newest_dial(lost.index)
        has_rounds = self._has_rounds(dial)
        indices = list(range(self._training_step.plan.num_ps)) if has_rounds else [lost.index]
        restored = None if self._is_reseeding else self._checkpoint(lost.index, dial)
        known = max([trained_in, *(link.lineage for link in client.links), restored.state.lineage if restored else 0])
        if restored is None:
            version = lost_version(client.links, lost, has_rounds)
        else:
            version = saved_version(restored.state, lost.index, self._training_step.plan.num_ps, has_rounds)
        live = self._live() if lost.index else None
        connections: list[Connection] = []
        try:
            for index in sorted(indices, key=lambda each: each != lost.index):  # the lost one first: it says who
                connections.append(Connection(self._me, index))
            found = [each.described().lineage for each in connections]  # a worker that began this may have died
            known = max([known, *found])
            for each in connections:
                each.ask(self._rewind(known + 1, is_fencing=has_rounds, is_lost=each.index == lost.index))
            for each in connections:
                self._fill(each, restored, is_lost=each.index == lost.index)
            for each in sorted(connections, key=lambda each: -each.index):  # ps:0 last: from then on it counts
                each.ask(self._restored(version, dial, restored, live))
        finally:
            for each in connections:
                each.close()
        self._tell(lost.index, version, known + 1, restored)

    def _checkpoint(self, index: int, dial: m.Dial) -> Restored:
        training_step = self._training_step
        try:
            loaded = self._find()
        except CheckpointError as error:
            raise ClusterError(f"ps:{index} lost its memory, and its checkpoint cannot be used: {error}") from error
        if loaded is None:
            raise ClusterError(
                f"ps:{index} lost its memory, and there is no checkpoint to go back to: save more often with "
                "--save-every, or let the ps take what the workers have with --reseed"
            )
        return Restored(
            loaded, training_step.layout, training_step.plan, training_step.spec.name, dial.spec.name == "local"
        )

    def _rewind(self, lineage: int, is_fencing: bool, is_lost: bool) -> m.Rewind:
        me, training_step = self._me, self._training_step
        incarnation = training_step.client.incarnation
        return m.Rewind(me.worker, incarnation, lineage, is_fencing, training_step.layout, training_step.spec, is_lost)

    def _fill(self, to: Connection, restored: Restored | None, is_lost: bool) -> None:
        """Send the values (2). With --reseed a shard that still has its optimizer state keeps it."""
        carried: Sequence[bytes] = ()
        if restored is None:
            block = self._training_step.parameters_of(to.index)
            carried = [self._training_step.carried_block()] if to.index == 0 else ()
        else:
            block = restored.parameters_of(to.index)
            carried = [restored.carried_block()] if to.index == 0 else ()
        to.ask(m.Init(), bulk=[part for part in (block, *carried) if len(part)])
        if restored is not None:
            restored.send_rest([to])
        if restored is not None and to.index == 0:
            restored.send_buffers(to, len(self._me.worker_devices))

    def _live(self) -> list[int] | None:
        """Ask ps:0 which workers take part: a ps without memory would wait for those that have ended."""
        first = Connection(self._me, 0)
        try:
            return first.ask(m.AskStatus(), m.Status).live
        finally:
            first.close()

    def _restored(self, version: int, dial: m.Dial, restored: Restored | None, live: list[int] | None) -> m.Restored:
        seed = restored.state.seed if restored is not None else None
        return m.Restored(version, dial, seed, is_reseeded=restored is None, live=live)

    def _tell(self, index: int, version: int, lineage: int, restored: Restored | None) -> None:
        what = f"the checkpoint {restored.path}" if restored is not None else "this worker's parameters (--reseed)"
        self._say(f"ps:{index} lost its memory: it goes on from {what}, at global step {version}, lineage {lineage}")
        with suppress(PacelineError):
            self._event(
                "restore" if restored is not None else "reseed",
                task=f"ps:{index}", version=version, lineage=lineage,
                folder=str(restored.path) if restored is not None else "",
            )  # fmt: skip


def saved_version(state: State, index: int, num_ps: int, has_rounds: bool) -> int:
    """Return the version of a shard in a checkpoint: in rounds that of all, else its own if it is the same shard."""
    own = [shard.version for shard in state.shards if shard.index == index]
    return own[0] if own and state.num_ps == num_ps and not has_rounds else state.global_step


def lost_version(links: Sequence[Link], lost: Link, has_rounds: bool) -> int:
    """Return the version of this worker's parameters: in rounds the oldest of any shard, else that of the lost one."""
    return min(link.version - link.offset for link in links) if has_rounds else lost.version
