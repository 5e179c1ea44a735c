"""DOES the simulation find anything? Deliberately wrong versions of a ps and of a worker, one rule left out in each."""

from collections.abc import Sequence

import msgspec
from sim_ps import SimService
from sim_task import Doing, Link
from sim_worker import Worker

from paceline.modes.base import Mode
from paceline.server.control.actions import Action
from paceline.server.control.budget import Budget
from paceline.server.control.state import ShardState
from paceline.server.core import Peer, Reply, Sends
from paceline.wire.decisions import Decision, Key
from paceline.wire.frames import Kind
from paceline.wire.messages import Dial

# --- workers ----------------------------------------------------------------------------------------------------------


class VotesBehindStaging(Worker):
    """Trap 5: the vote leaves right behind the staging, without waiting for the acks."""

    def stage(self, others: list[Link], flags: int) -> Doing:
        for link in others:
            self.send_push(link, Kind.STAGE, flags)
        return
        yield

    def take(self) -> Doing:
        late = self.links[1:] if self.last_was_staged() else []
        for link in late:
            yield from self.answer(link, lambda: None)
        yield from super().take()

    def last_was_staged(self) -> bool:
        return not self.flags & 1


class CarriesNothingAtJoin(Worker):
    """A joiner takes the versions it finds, and leaves open decisions to others."""

    def join(self) -> Doing:
        self.is_joining = True
        yield from super().join()
        self.is_joining = False

    def carry(self, decisions: tuple[Decision, ...], first_is_read: bool = False) -> Doing:
        if not self.is_joining:
            yield from super().carry(decisions, first_is_read)


class SavesWithoutCarrying(Worker):
    """The last one saves what it finds."""

    def pull_before_saving(self) -> Doing:
        return
        yield


class SaysNothingOfCounted(Worker):
    """It overwrites its slots for the next gradient, and the other shards do not know that the last one counts."""

    def say_counted(self) -> Doing:
        return
        yield


class LeavesDecisionsBehind(Worker):
    """It brings a new mode to the other shards, and not what was decided before it."""

    def adopt(self, dial: Dial) -> Doing:
        yield from super().adopt(msgspec.structs.replace(dial, decisions=()))


# --- what a ps decides ------------------------------------------------------------------------------------------------


class FreesOnDisconnect(ShardState):
    """Trap 5: what a worker had staged goes with its connection."""

    def left(self, key: Key, now_s: float = 0.0) -> list[Action]:
        self.staged.pop(key, None)
        return super().left(key, now_s)


class KeyedByWorker(ShardState):
    """Trap 5: a successor's staged gradient takes the place of its predecessor's."""

    def stage(self, key: Key, push_id: int, round_: int) -> list[Action]:
        for other in [k for k in self.staged if k[0] == key[0] and k != key]:
            del self.staged[other]
        return super().stage(key, push_id, round_)


class ForgetsPushIds(ShardState):
    """A retry is taken for a new push."""

    def push(
        self, key: Key, push_id: int, base: int, is_finite: bool = True, is_late: bool = False, now_s: float = 0.0
    ) -> list[Action]:
        self.applied.pop(key[0], None)
        return super().push(key, push_id, base, is_finite, is_late, now_s)


class KeepsSlotsOfTheDead(ShardState):
    """Memory grows with every restart."""

    def left(self, key: Key, now_s: float = 0.0) -> list[Action]:
        return [a for a in super().left(key, now_s) if type(a).__name__ != "Free"]


class CountsOldPushes(ShardState):
    """A push that was sent before the mode changed is an update after it, on a shard that obeys ps:0 by now."""

    def push(
        self, key: Key, push_id: int, base: int, is_finite: bool = True, is_late: bool = False, now_s: float = 0.0
    ) -> list[Action]:
        if self.is_coordinator or not self.mode.has_rounds or (key[1], push_id) <= self.applied.get(key[0], (0, 0)):
            return super().push(key, push_id, base, is_finite, is_late, now_s)
        self.applied[key[0]] = key[1], push_id
        actions: list[Action] = []
        outcome = self._count(actions, key, push_id, self.version, is_finite)
        return [*actions, self._answer(key, push_id, outcome)]


class AlignsWithoutOffset(ShardState):
    """Every shard counts rounds as ps:0 does, though it made other updates before."""

    def align(self, mode: Mode, epoch: int, version: int) -> list[Action]:
        actions = super().align(mode, epoch, version)
        self.offset = 0
        return actions


class ForgetsTheJoinersClock(ShardState):
    """A joiner is the slowest, by all the steps that the others made without it."""

    def entered(self, worker: int) -> None:
        pass


class LetsThemRunAhead(ShardState):
    """Nobody waits for the slowest."""

    def _may_go_on(self, worker: int) -> bool:
        return not self.lacks


class GoesOnBelowTheLeast(ShardState):
    """Nobody waits for more workers."""

    @property
    def lacks(self) -> int:
        return 0


class LeavesTheRoundOpen(ShardState):
    """Those who stand still for another mode are waited for, by a round that the switch waits for."""

    def _waits_for_none(self) -> bool:
        return not self.is_switching and super()._waits_for_none()


class CopiesTooEarly(ShardState):
    """A shard that is brought a decision copies itself, and then makes the update that is to be saved."""

    def carry(self, key: Key, push_id: int, decisions: tuple[Decision, ...]) -> list[Action]:
        actions = super().carry(key, push_id, decisions)
        return sorted(actions, key=lambda action: type(action).__name__ != "Copy")


# --- how it serves ----------------------------------------------------------------------------------------------------


class GrantsTooMuch(Budget):
    """Looks only at what is applied, not at what is on its way."""

    def grant(self, worker: int, applied: int) -> bool:
        return applied < self.total


class BuriesTheTicket(Budget):
    """What a lost worker holds is lost with it."""

    def give_back(self, worker: int) -> None:
        pass


class LetsOneFallForAnother(SimService):
    """An answer that finds its worker gone ends the connection that it was sent from."""

    def _reply(self, peer: Peer, reply: Reply) -> None:
        peer.channel.say(reply.message)
        if reply.arenas and peer.channel.shares_memory:
            peer.channel.stream.send_arenas(reply.arenas)


class SendsUnderItsLock(SimService):
    """Who waits is answered by the event that ends its wait, at once."""

    def _perform(self, actions: Sequence[Action], block: bytearray | None = None) -> Sends:
        self._send_all(super()._perform(actions, block))
        return []


class ClosesWhenWoken(SimService):
    """A grace that was over before its time, because everybody came, ends the next round too."""

    def _woken(self) -> None:
        state = self.core.control.state
        if state.rounds.given:
            self._send_all(self.core.perform(state._close(self.world.now)))
