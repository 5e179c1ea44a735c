"""WHAT would a worker do? worker/client.py and worker/context.py, message for message, as a generator.

`yield link` waits for a frame of that ps, `yield seconds` computes. The numbers in comments are those of
worker/client.py. Beyond it: a worker that `retries` connects again with its incarnation after a lost connection and
sends its last request once more, with the same push id.
"""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim_network import Connection
from sim_ps import Gradient, join_of

from paceline.errors import ConnectionLost, PacelineError, ProtocolError, Refused
from paceline.wire import messages as m
from paceline.wire.decisions import Decision
from paceline.wire.frames import Flag, Frame, Kind, Outcome

if TYPE_CHECKING:
    from sim_run import Cluster

Doing = Generator[Any, Any, Any]
REFRESH_TRIES = 1000


class Link:
    """One ps as this worker sees it."""

    def __init__(self, worker: "Worker", index: int) -> None:
        self.index = index
        self.version = -1
        self.inbox: deque[Frame] = deque()
        self.is_lost = False
        self.slot: Any = None
        self._worker = worker
        self.connect()

    def connect(self) -> None:
        self.inbox = deque()
        self.is_lost = False
        inbox = self.inbox
        cluster = self._worker.cluster
        self.connection = Connection(
            cluster.world,
            cluster.services[self.index],
            cluster.plan.shares_memory,
            lambda frame: self._arrived(inbox, frame),
            lambda: self._ended(inbox),
        )

    def _arrived(self, inbox: deque[Frame], frame: Frame) -> None:
        inbox.append(frame)
        if inbox is self.inbox:
            self._worker.wake(self)

    def _ended(self, inbox: deque[Frame]) -> None:
        if inbox is self.inbox:
            self.is_lost = True
            self._worker.wake(self)

    def send(self, kind: int, flags: int = 0, push_id: int = 0, tail: bytes = b"", gradient: Any = None) -> None:
        w = self._worker
        version = max(self.version, 0)
        frame = Frame(kind, flags, w.index, w.incarnation, 0, 0, len(tail), push_id, version, 0, tail=tail)
        self.connection.say_up(frame, gradient)


@dataclass
class Taken:
    outcome: Outcome
    has_ticket: bool


class Worker:
    """One process: one incarnation of one worker."""

    def __init__(self, cluster: "Cluster", index: int, incarnation: int) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.index = index
        self.incarnation = incarnation
        self.links: list[Link] = []
        self.push_id = 0
        self.has_ticket = False
        self.is_alive = True
        self.is_done = False
        self.is_started = False
        self.error: PacelineError | None = None
        self.outcomes: dict[int, Outcome] = {}
        self._gradient: Gradient | None = None
        self._doing = self.run()
        self._waits_for: Link | None = None

    @property
    def name(self) -> str:
        return f"worker:{self.index}/{self.incarnation}"

    # --- being run --------------------------------------------------------------------------------------------

    def wake(self, link: Link | None = None) -> None:
        """Go on, if this is what was waited for."""
        if not self.is_alive or self._waits_for is not link:
            return
        try:
            wanted = self._advance(link)
            while isinstance(wanted, Link) and (wanted.inbox or wanted.is_lost):
                wanted = self._advance(wanted)
        except StopIteration:
            self.is_done = True
            self.die()
            return
        except PacelineError as error:
            self.error = error
            self.die()
            return
        if isinstance(wanted, Link):
            self._waits_for = wanted
        else:
            self._waits_for = None
            self.world.after(wanted, self.wake)

    def _advance(self, link: Link | None) -> Any:
        if link is None:
            return self._doing.send(None)
        if link.inbox:
            return self._doing.send(link.inbox.popleft())
        return self._doing.throw(ConnectionLost(f"ps:{link.index}"))

    def die(self) -> None:
        """The process is gone: every connection ends at its own point."""
        if self.is_alive:
            self.is_alive = False
            for link in self.links:
                link.connection.cut()
            self.cluster.process_ended(self)

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
            yield from self.request(m.Barrier())
            yield from self.pull()

    def may_go_on(self, total: int) -> Doing:
        if self.has_ticket:
            return True
        reply = yield from self.request(m.Steps(total))
        assert isinstance(reply, m.Ticket)
        return reply.is_granted

    def pause(self) -> Doing:
        yield from self.request(m.Pause())
        yield self.world.delay() * 3
        yield from self.request(m.Resume())
        yield from self.pull()

    def leave(self) -> Doing:
        yield from self.pull()  # whoever ends carries ps:0's open decisions to all shards first
        for link in self.links[1:]:
            yield from self.close(link)
        closed = yield from self.close(self.links[0])
        if closed is not None and closed.is_last:
            yield from self.pull_before_saving()
            yield from self.save()

    def pull_before_saving(self) -> Doing:
        """Its own end may have closed a round with the gradient of one that died."""
        yield from self.pull()

    def save(self) -> Doing:
        versions = []
        for link in self.links:
            reply = yield from self.request(m.Fetch("slots"), link)
            versions.append(reply.version)
        if self.cluster.has_rounds and len(set(versions)) > 1 and self.cluster.is_alone(self):
            self.world.faults.append(f"{self.name} saved a checkpoint of versions {versions}")

    # --- joining ----------------------------------------------------------------------------------------------

    def join(self) -> Doing:
        for index in [*range(1, self.cluster.plan.num_ps), 0]:  # ps:0 last
            link = Link(self, index)
            self.links.append(link)
            link.version = (yield from self.join_one(link)).version
        self.links.sort(key=lambda each: each.index)
        started = yield from self.request(m.Start())
        assert isinstance(started, m.Started)
        self.is_started = True
        yield from self.carry(started.decisions)

    def join_one(self, link: Link) -> Doing:
        plan = self.cluster.plan
        message = join_of(self.index, self.incarnation, plan.make_mode().name, plan.num_ps)
        link.send(Kind.COLD, tail=m.encode(message))
        joined = self.reply_in((yield link))
        assert isinstance(joined, m.Joined)
        link.slot = link.connection.arenas[1] if link.connection.arenas else None
        return joined

    # --- the two verbs ----------------------------------------------------------------------------------------

    def push(self, is_finite: bool) -> Doing:
        self.push_id += 1
        flags = 0 if is_finite else Flag.NOT_FINITE
        self._gradient = (self.index, self.incarnation, self.push_id, self.links[0].version)
        for link in self.links:
            self.write_slot(link)
        others = self.links[1:]
        if not self.cluster.has_rounds:
            for link in others:
                self.post(lambda link=link: self.send_push(link, Kind.PUSH, flags))
        elif others and is_finite:
            yield from self.stage(others, flags)  # 1
        self.flags = flags
        if self.cluster.plan.total is not None:
            self.flags |= Flag.WANTS_TICKET
        self.post(lambda: self.send_push(self.links[0], Kind.PUSH, self.flags))  # 2

    def stage(self, others: list[Link], flags: int) -> Doing:
        for link in others:
            self.post(lambda link=link: self.send_push(link, Kind.STAGE, flags))
        for link in others:
            yield from self.answer(link, lambda link=link: self.send_push(link, Kind.STAGE, flags))

    def write_slot(self, link: Link) -> None:
        if link.slot is not None:
            link.slot.content = self._gradient

    def send_push(self, link: Link, kind: Kind, flags: int) -> None:
        self.write_slot(link)
        if link.slot is not None and not (self.cluster.has_rounds and len(self.links) > 1):
            link.slot.bell.sleeps_for = self.push_id
        link.send(kind, flags, self.push_id, gradient=self._gradient)

    def take(self) -> Doing:
        first_link = self.links[0]
        first = yield from self.answer(first_link, lambda: self.send_push(first_link, Kind.PUSH, self.flags))  # 3
        self.outcomes[self.push_id] = Outcome(first.outcome)
        yield from self.read(first_link)
        if self.cluster.has_rounds:
            if len(self.links) > 1:
                carried = m.decode(first.tail) if first.tail else m.Carried(())
                assert isinstance(carried, m.Carried)
                yield from self.carry(carried.decisions, first_is_read=True)  # 4
        else:
            for link in self.links[1:]:
                flags = self.flags & ~Flag.WANTS_TICKET
                yield from self.answer(link, lambda link=link, f=flags: self.send_push(link, Kind.PUSH, f))
                yield from self.read(link)
        self.has_ticket = bool(first.flags & Flag.TICKET)

    def carry(self, decisions: tuple[Decision, ...], first_is_read: bool = False) -> Doing:
        for _ in range(REFRESH_TRIES):
            for link in self.links[1:] if first_is_read else self.links:
                yield from self.pull_one(link, decisions if link.index else ())
            if not self.cluster.has_rounds or len({link.version for link in self.links}) == 1:
                return
            first_is_read = False
            reply = yield from self.request(m.AskDecisions())
            decisions = reply.decisions
        self.world.faults.append(f"{self.name}: shards at {[link.version for link in self.links]}")

    def pull(self) -> Doing:
        decisions: tuple[Decision, ...] = ()
        if self.cluster.has_rounds and len(self.links) > 1:
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

    # --- frames -----------------------------------------------------------------------------------------------

    def note_version(self, link: Link, version: int) -> None:
        if version < link.version:
            self.world.faults.append(f"{self.name} saw ps:{link.index} go back from {link.version} to {version}")
        link.version = version

    def post(self, send: Callable[[], None]) -> None:
        """Send now; a worker that retries learns of a lost connection when it waits for the answer."""
        try:
            send()
        except ConnectionLost:
            if not self.cluster.plan.retries:
                raise

    def ask(self, link: Link, send: Callable[[], None]) -> Doing:
        self.post(send)
        return (yield from self.answer(link, send))

    def answer(self, link: Link, send: Callable[[], None]) -> Doing:
        frame = yield from self.received(link, send)
        if frame.kind != Kind.ANSWER or frame.push_id != self.push_id:
            raise ProtocolError(f"ps:{link.index} sent kind {frame.kind} for push {frame.push_id}, not {self.push_id}")
        if frame.outcome == Outcome.FENCED:
            raise Refused(f"{self.name} is fenced")
        if not self.cluster.plan.shares_memory and frame.outcome != Outcome.STAGED:
            self.note_version(link, frame.version)
        return frame

    def received(self, link: Link, send: Callable[[], None]) -> Doing:
        while True:
            try:
                return (yield link)
            except ConnectionLost:
                if not self.cluster.plan.retries:
                    raise
                yield from self.reconnect(link)
                self.post(send)

    def reconnect(self, link: Link) -> Doing:
        while True:
            link.connection.cut()
            link.connect()
            try:
                yield from self.join_one(link)
                return
            except ConnectionLost:
                continue

    def request(self, message: m.Request, link: Link | None = None) -> Doing:
        """A cold request; to ps:0 unless said otherwise."""
        to = link or self.links[0]
        tail = m.encode(message)
        self.post(lambda: to.send(Kind.COLD, tail=tail))
        frame = yield from self.received(to, lambda: to.send(Kind.COLD, tail=tail))
        return self.reply_in(frame)

    def close(self, link: Link) -> Doing:
        """Close; that it had closed already is as good."""
        try:
            return (yield from self.request(m.Close(), link))
        except Refused as error:
            if "closed already" in str(error):
                return None
            raise

    def reply_in(self, frame: Frame) -> m.Reply:
        if frame.kind != Kind.COLD:
            raise ProtocolError(f"{self.name} got kind {frame.kind} instead of a reply")
        reply = m.decode(frame.tail)
        if isinstance(reply, m.Failed):
            raise Refused(reply.reason)
        return reply  # type: ignore[return-value]
