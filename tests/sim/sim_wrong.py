"""DOES the simulation find anything? Deliberately wrong versions of a ps and of a worker, one rule left out in each."""

from sim_network import World
from sim_ps import SimService
from sim_worker import Doing, Link, Worker

from paceline.server.budget import Budget
from paceline.server.state import Action, ShardState
from paceline.wire.decisions import Decision, Key
from paceline.wire.frames import Kind


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


class FreesOnDisconnect(ShardState):
    """Trap 5: what a worker had staged goes with its connection."""

    def left(self, key: Key) -> list[Action]:
        self.staged.pop(key, None)
        return super().left(key)


class KeyedByWorker(ShardState):
    """Trap 5: a successor's staged gradient takes the place of its predecessor's."""

    def stage(self, key: Key, push_id: int, round_: int) -> list[Action]:
        for other in [k for k in self.staged if k[0] == key[0] and k != key]:
            del self.staged[other]
        return super().stage(key, push_id, round_)


class ForgetsPushIds(ShardState):
    """A retry is taken for a new push."""

    def push(self, key: Key, push_id: int, base: int, is_finite: bool = True, is_late: bool = False) -> list[Action]:
        self.applied.pop(key[0], None)
        return super().push(key, push_id, base, is_finite, is_late)


class KeepsSlotsOfTheDead(ShardState):
    """Memory grows with every restart."""

    def left(self, key: Key) -> list[Action]:
        return [a for a in super().left(key) if type(a).__name__ != "Free"]


class GrantsTooMuch(Budget):
    """Looks only at what is applied, not at what is on its way."""

    def grant(self, worker: int, applied: int) -> bool:
        return applied < self.total


class LetsOneFallForAnother(SimService):
    """An answer that finds its worker gone ends the connection that it was sent from."""

    def __init__(self, world: World, *args: object) -> None:
        super().__init__(world, *args)  # type: ignore[arg-type]
        self.core.tell = lambda peer, message: peer.channel.say(message)  # type: ignore[method-assign]
