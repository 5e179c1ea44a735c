"""WHAT would a worker do? worker/requests/client.py and worker/session.py, message for message, as a generator.

The numbers in comments are those of worker/requests/client.py. How it waits and connects again: sim_task.py.
"""

from typing import TYPE_CHECKING

from sim_task import Doing, Link, Task, Voided
from sim_watch import Gradient

from paceline.errors import ConnectionLost, Refused
from paceline.wire import messages as m
from paceline.wire.decisions import Decision
from paceline.wire.frames import SLEEPS, Flag, Frame, Kind, Outcome

if TYPE_CHECKING:
    from sim_run import Cluster

REFRESH_TRIES = 1000


class Worker(Task):
    """A script that trains, pauses, meets the others in barriers and closes; and the client under it."""

    def __init__(self, cluster: "Cluster", index: int, incarnation: int) -> None:
        super().__init__(cluster, index, incarnation)
        self.has_ticket = False
        self.is_void = False
        self.pushed_as = incarnation
        self.flags = 0
        self.rounds: set[int] = set()  # its pushes in a mode with rounds: ps:0 speaks for all
        self.saves_next = False  # the next update will be saved
        self.adopted = 0  # the last epoch that it brought to all shards
        self.take_dial(m.Dial(0, cluster.plan.spec, 0))

    # --- the script -------------------------------------------------------------------------------------------

    def run(self) -> Doing:
        plan = self.cluster.plan
        yield from self.join()
        if plan.total is None:
            for _ in range(plan.steps_of(self.index)):
                yield from self.train_step()
        else:
            while (yield from self.may_go_on(plan.total)):
                self.has_ticket = False
                yield from self.train_step()
        yield self.world.delay() * 4  # a last evaluation
        yield from self.leave()

    def train_step(self) -> Doing:
        world, plan = self.world, self.cluster.plan
        if world.chance(plan.pauses):
            yield from self.pause()
        yield world.delay()
        yield from self.push(is_finite=not world.chance(plan.not_finite))
        yield from self.take()
        if world.chance(plan.pauses / 2):
            yield from self.ask_first(m.Barrier())
            yield from self.pull()

    def may_go_on(self, total: int) -> Doing:
        if self.has_ticket:
            return True
        turn = self.dial.turn
        reply = yield from self.ask_first(m.Steps(total))
        assert isinstance(reply, m.Ticket)
        if self.dial.turn != turn:
            yield from self.pull()
        return reply.is_granted

    def pause(self) -> Doing:
        yield from self.ask_first(m.Pause())
        yield self.world.delay() * 3
        yield from self.ask_first(m.Resume())
        yield from self.pull()

    def leave(self) -> Doing:
        yield from self.pull()  # whoever ends carries ps:0's open decisions to all shards first
        self.is_leaving = True
        for link in self.links[1:]:
            yield from self.close(link)
        closed = yield from self.close(self.links[0])
        if closed is not None and closed.is_last:
            was_alone = self.cluster.is_alone(self)
            yield from self.pull_before_saving()
            yield from self.save(was_alone)

    def close(self, link: Link) -> Doing:
        """Close; that it had closed already is as good."""
        try:
            return (yield from self.request(m.Close(), link))
        except Refused as error:
            if "closed already" in str(error):
                return None
            raise

    def pull_before_saving(self) -> Doing:
        """Its own end may have closed a round with the gradient of one that died."""
        yield from self.pull()

    def save(self, was_alone: bool) -> Doing:
        """What is saved is of one round, unless somebody came after the last one had closed."""
        rounds = []
        for link in self.links:
            reply = yield from self.request(m.Fetch("slots"), link)
            rounds.append(reply.version - link.offset)
        if self.has_rounds and len(set(rounds)) > 1 and was_alone and self.cluster.is_alone(self):
            self.world.faults.append(f"{self.name} saved a checkpoint of rounds {rounds}")

    # --- joining ----------------------------------------------------------------------------------------------

    def join(self) -> Doing:
        for index in [*range(1, self.cluster.plan.num_ps), 0]:  # ps:0 last
            link = Link(self, index)
            self.links.append(link)
            try:
                link.version = (yield from self.join_one(link)).version
            except ConnectionLost:
                if not self.cluster.plan.retries:
                    raise
                yield from self.reconnect(link)
        self.links.sort(key=lambda each: each.index)
        started = yield from self.request(m.Start())
        assert isinstance(started, m.Started)
        self.is_started = True
        yield from self.adopt(started.dial)
        yield from self.carry(started.decisions)
        if started.is_first:
            again = yield from self.request(m.Start(has_values=True))
            assert isinstance(again, m.Started)
            if again.dial.turn != started.dial.turn:
                yield from self.adopt(again.dial)
                yield from self.pull()

    # --- the two verbs ----------------------------------------------------------------------------------------

    def push(self, is_finite: bool) -> Doing:
        self.push_id += 1
        self.is_pending = True
        self.pushed_as = self.incarnation
        flags = 0 if is_finite else Flag.NOT_FINITE
        for link in self.links:
            self.write_slot(link)
        others = self.links[1:]
        if not self.has_rounds:
            self.awaits_others = bool(others)
            for link in others:
                self.post(lambda link=link: self.send_push(link, Kind.PUSH, flags))
        elif others and is_finite:
            try:
                yield from self.stage(others, flags)  # 1
            except Voided:
                self.is_void = True  # take() tells
                return
        if self.has_rounds:
            self.rounds.add(self.push_id)
        self.flags = flags
        if self.cluster.plan.total is not None:
            self.flags |= Flag.WANTS_TICKET
        self.post(lambda: self.send_push(self.links[0], Kind.PUSH, self.flags))  # 2

    def stage(self, others: list[Link], flags: int) -> Doing:
        for link in others:
            self.post(lambda link=link: self.send_push(link, Kind.STAGE, flags))
        for link in others:
            yield from self.answer(link, lambda link=link: self.send_push(link, Kind.STAGE, flags), is_gradient=True)

    def gradient_for(self, link: Link) -> Gradient:
        return self.index, self.incarnation, self.push_id, link.round if self.has_rounds else link.version

    def write_slot(self, link: Link) -> None:
        if link.slot is not None:
            link.slot.content = self.gradient_for(link)

    def send_push(self, link: Link, kind: Kind, flags: int) -> None:
        self.write_slot(link)
        if link.slot is not None and not (self.has_rounds and len(self.links) > 1):
            link.slot.bell[SLEEPS] = self.push_id
        link.send(kind, flags, self.push_id, gradient=self.gradient_for(link))

    def take(self) -> Doing:
        link = self.links[0]
        has_tail = self.has_rounds and len(self.links) > 1
        if self.is_void:
            self.is_void = self.is_pending = False
            yield from self.pull()
            return
        try:
            first = yield from self.answer(link, lambda: self.send_push(link, Kind.PUSH, self.flags), is_push=True)  # 3
        except Voided as void:
            yield from self.give_up_push(void.dial)
            return
        link.outcomes[self.push_id] = Outcome(first.outcome)
        try:
            yield from self.follow(first, has_tail)
        except Voided:  # the run went back meanwhile
            yield from self.give_up_push(None)
        self.is_pending = False
        self.has_ticket = bool(first.flags & Flag.TICKET)
        self.see_to_saving(first.flags)
        if first.flags & Flag.SWITCH:
            yield from self.ask_first(m.Ready())
            yield from self.pull()

    def follow(self, first: Frame, has_tail: bool) -> Doing:
        """Do what the answer of ps:0 asks for."""
        link = self.links[0]
        if first.outcome == Outcome.ADDED:
            yield from self.say_counted()
        else:
            yield from self.read(link)
            if has_tail:
                carried = m.decode(first.tail) if first.tail else m.Carried(())
                assert isinstance(carried, m.Carried)
                yield from self.carry(carried.decisions, first_is_read=True)  # 4
            elif len(self.links) > 1:
                yield from self.take_others(was_held=bool(first.flags & Flag.WAITED))

    def see_to_saving(self, flags: int) -> None:
        """Say where it is after the update that is saved; fetch the next one, if it is to."""
        if self.saves_next:
            where = m.encode(m.Position(self.index, version=self.links[0].version, steps=self.push_id))
            self.post(lambda: self.links[0].send(Kind.COLD, tail=where))
        self.saves_next = bool(flags & Flag.SAVE)
        if flags & Flag.WRITES:
            self.cluster.save(self)

    def give_up_push(self, dial: m.Dial | None) -> Doing:
        self.is_pending = False
        if dial is None:
            self.awaits_others = False
            yield from self.pull()
            return
        self.late_dial = dial
        if self.awaits_others:
            try:
                yield from self.take_others(was_held=False)
            except Voided:
                self.late_dial = None
                yield from self.give_up_push(None)
        else:
            yield from self.adopt_late()

    def say_counted(self) -> Doing:
        for link in self.links[1:]:
            self.post(lambda link=link: link.send(Kind.PULL, Flag.COUNTED, self.push_id))
        for link in self.links[1:]:
            yield from self.answer(link, lambda link=link: link.send(Kind.PULL, Flag.COUNTED, self.push_id))

    def take_others(self, was_held: bool) -> Doing:
        for link in self.links[1:]:
            if self.incarnation != self.pushed_as:
                raise Voided(None)  # it was evicted since, and nobody will answer
            flags = self.flags & ~Flag.WANTS_TICKET
            frame = yield from self.answer(
                link, lambda link=link, f=flags: self.send_push(link, Kind.PUSH, f), is_gradient=True
            )
            link.outcomes[self.push_id] = Outcome(frame.outcome)
            if was_held and not self.cluster.plan.shares_memory:
                yield from self.pull_one(link, ())
            else:
                yield from self.read(link)
        yield from self.adopt_late()

    def adopt_late(self) -> Doing:
        dial, self.awaits_others, self.late_dial = self.late_dial, False, None
        if dial is not None:
            yield from self.adopt(dial)
            yield from self.pull()

    def adopt(self, dial: m.Dial) -> Doing:
        if dial.turn == self.dial.turn:
            self.take_dial(dial)
            return
        for link in self.links[1:]:
            if dial.decisions:
                yield from self.pull_one(link, dial.decisions)
            reply = yield from self.request(m.Align(dial), link)
            assert isinstance(reply, m.Aligned)
            link.offset = reply.offset
        self.take_dial(dial)
        self.adopted = dial.turn
        self.has_ticket = False  # context: a ticket of the mode before is none in the next one

    def take_dial(self, dial: m.Dial) -> None:
        self.dial = dial
        self.has_rounds = self.cluster.has_rounds(dial.spec)

    def carry(self, decisions: tuple[Decision, ...], first_is_read: bool = False) -> Doing:
        for _ in range(REFRESH_TRIES):
            lineage = self.links[0].lineage
            for link in self.links[1:] if first_is_read else self.links:
                is_valid = link.index and self.links[0].lineage == lineage
                yield from self.pull_one(link, decisions if is_valid else ())
            if not self.has_rounds or len({link.round for link in self.links}) == 1:
                return
            first_is_read = False
            reply = yield from self.request(m.AskDecisions())
            decisions = reply.decisions
        self.world.faults.append(f"{self.name}: shards at {[link.round for link in self.links]}")

    def pull(self) -> Doing:
        decisions: tuple[Decision, ...] = ()
        if self.has_rounds and len(self.links) > 1:
            reply = yield from self.request(m.AskDecisions())
            decisions = reply.decisions
        yield from self.carry(decisions)

    def pull_one(self, link: Link, decisions: tuple[Decision, ...]) -> Doing:
        if decisions or not self.cluster.plan.shares_memory:
            tail = m.encode(m.Carried(decisions)) if decisions else b""
            yield from self.ask(link, lambda: link.send(Kind.PULL, 0, self.push_id, tail))
        yield from self.read(link)

    def read(self, link: Link) -> Doing:
        """Shared memory: what is there now; sometimes the ps must copy it, because it was torn too often."""
        if not self.cluster.plan.shares_memory:
            return
        if self.world.chance(0.1):
            frame = yield from self.ask(link, lambda: link.send(Kind.PULL, Flag.INTO_SLOT, self.push_id))
            self.note_version(link, frame.version)
        else:
            self.note_version(link, len(self.cluster.services[link.index].ledger.updates))

    def ask_first(self, message: m.Request) -> Doing:
        """client.ask: to ps:0; what comes back may say that another mode holds."""
        reply = yield from self.request(message)
        if isinstance(reply, m.Dial | m.Ticket):
            yield from self.adopt(reply if isinstance(reply, m.Dial) else reply.dial)
        return reply
