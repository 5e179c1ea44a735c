"""HOW does a simulated worker wait? A generator that is woken by frames, and connections that it may make again.

Base of sim_worker. `yield link` waits for a frame of that ps, `yield seconds` computes. Beyond
worker/requests/client.py: a worker that `retries` connects again with its incarnation after a lost connection and sends
its last request once more, with the same push id. From ps:0 it first hears which mode holds; if that is another one,
its last push is void, because nobody can say whether it counted before the change or never will. One that was evicted
comes back to every ps as a newer incarnation, and what it pushed last is void too.
"""

from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from sim_network import Connection
from sim_ps import LAYOUT, OPTIMIZER, join_of

from paceline.errors import ConnectionLost, PacelineError, ProtocolError, Refused
from paceline.wire import messages as m
from paceline.wire.decisions import Decision
from paceline.wire.frames import WITHOUT_PARAMETERS, Frame, Kind, Outcome

if TYPE_CHECKING:
    from sim_run import Cluster

Doing = Generator[Any, Any, Any]


class Voided(Exception):
    """The mode has changed since this push was sent, and nobody waited for its worker; None: it was evicted."""

    def __init__(self, dial: m.Dial | None) -> None:
        self.dial = dial


class FencedOff(Exception):
    """This incarnation was evicted; the newest that the ps knows is `incarnation`."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation


class Link:
    """One ps as this worker sees it."""

    def __init__(self, task: "Task", index: int) -> None:
        self.index = index
        self.version = -1
        self.lineage = 0
        self.offset = 0
        self.inbox: deque[Frame] = deque()
        self.is_lost = False
        self.slot: Any = None
        self.outcomes: dict[int, Outcome] = {}  # what this ps said of each push
        self._task = task
        self.connect()

    def connect(self) -> None:
        self.inbox = deque()
        self.is_lost = False
        inbox = self.inbox
        cluster = self._task.cluster
        self.connection = Connection(
            cluster.world,
            cluster.services[self.index],
            cluster.plan.shares_memory,
            lambda frame: self._arrived(inbox, frame),
            lambda: self._ended(inbox),
        )

    @property
    def round(self) -> int:
        """Its version, as ps:0 counts rounds."""
        return self.version - self.offset

    def _arrived(self, inbox: deque[Frame], frame: Frame) -> None:
        inbox.append(frame)
        if inbox is self.inbox:
            self._task.wake(self)

    def _ended(self, inbox: deque[Frame]) -> None:
        if inbox is self.inbox:
            self.is_lost = True
            self._task.wake(self)

    def send(self, kind: int, flags: int = 0, push_id: int = 0, tail: bytes = b"", gradient: Any = None) -> None:
        t = self._task
        version = max(self.version, 0)
        frame = Frame(kind, 0, flags, t.index, t.incarnation, len(tail), push_id, version, 0, tail=tail)
        self.connection.say_up(frame, gradient)


class Task:
    """One process: one incarnation of one worker."""

    dial: m.Dial
    has_rounds: bool

    def __init__(self, cluster: "Cluster", index: int, incarnation: int) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.index = index
        self.incarnations = [incarnation]  # the last one is what it is in as
        self.links: list[Link] = []
        self.push_id = 0
        self.is_alive = True
        self.is_done = False
        self.is_started = False
        self.is_leaving = False
        self.is_pending = False  # a push is on its way, or what follows from its answer is
        self.error: PacelineError | None = None
        self.awaits_others = False  # every push is an update, and ps:1..n are still to answer this one
        self.late_dial: m.Dial | None = None  # so another mode is taken up after that
        self._doing = self.run()
        self._waits_for: Link | None = None

    def run(self) -> Doing:
        raise NotImplementedError

    def adopt(self, dial: m.Dial) -> Doing:
        raise NotImplementedError

    def carry(self, decisions: tuple[Decision, ...]) -> Doing:
        raise NotImplementedError

    def pull(self) -> Doing:
        raise NotImplementedError

    @property
    def incarnation(self) -> int:
        return self.incarnations[-1]

    @property
    def name(self) -> str:
        return f"worker:{self.index}/{self.incarnation}"

    @property
    def awaited(self) -> str:
        return f"ps:{self._waits_for.index}" if self._waits_for else "itself"

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

    # --- frames -----------------------------------------------------------------------------------------------

    def note_version(self, link: Link, version: int) -> None:
        service = self.cluster.services[link.index]
        is_known = link.lineage == service.core.control.lineage and service.core.control.is_initialised
        if version < link.version and is_known:
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

    def answer(self, link: Link, send: Callable[[], None], is_push: bool = False, is_gradient: bool = False) -> Doing:
        frame = yield from self.received(link, send, is_push, is_gradient, is_hot=True)
        if frame.kind != Kind.ANSWER or frame.push_id != self.push_id:
            raise ProtocolError(f"ps:{link.index} sent kind {frame.kind} for push {frame.push_id}, not {self.push_id}")
        if frame.outcome == Outcome.FENCED:
            raise Refused(f"{self.name} is fenced")
        if not self.cluster.plan.shares_memory and frame.outcome not in WITHOUT_PARAMETERS:
            self.note_version(link, frame.version)
        return frame

    def received(
        self,
        link: Link,
        send: Callable[[], None],
        is_push: bool = False,
        is_gradient: bool = False,
        is_hot: bool = False,
    ) -> Doing:
        while True:
            try:
                return (yield link)
            except ConnectionLost:
                if not self.cluster.plan.retries:
                    raise
                was, lineage = self.incarnation, link.lineage
                dial = yield from self.reconnect(link)
                if link.lineage != lineage and is_hot and self.is_pending and not (is_gradient or is_push):
                    raise Voided(None) from None
                if link.lineage != lineage and is_hot:  # what was decided or pushed before is void
                    send = lambda: link.send(Kind.PULL, 0, self.push_id)  # noqa: E731
                if self.incarnation != was:
                    if is_gradient or is_push:
                        raise Voided(None) from None
                    yield from self.pull()
                elif dial is not None and dial.turn != self.dial.turn:
                    if is_push:
                        raise Voided(dial) from None
                    if self.awaits_others:
                        self.late_dial = dial
                    else:
                        yield from self.rejoin_others()
                        yield from self.adopt(dial)
                        yield from self.pull()
                self.post(send)

    def reconnect(self, link: Link) -> Doing:
        """Join once more; from ps:0 the mode that holds comes back."""
        while True:
            try:
                started = yield from self.join_again(link)
                return started and started.dial
            except ConnectionLost:
                continue
            except FencedOff as fenced:
                yield from self.come_back(fenced.incarnation)
                return None

    def join_again(self, link: Link) -> Doing:
        link.connection.cut()
        link.connect()
        yield from self.join_one(link)
        if link.index or not self.is_started:
            return None
        link.send(Kind.COLD, tail=m.encode(m.Start()))
        return self.reply_in((yield link))

    def come_back(self, known: int) -> Doing:
        """To every ps, ps:0 last; it carries what is open there before anything else."""
        self.awaits_others, self.late_dial = False, None  # whatever was on its way is void
        while True:
            self.incarnations.append(known + 1)
            try:
                started = None
                for link in sorted(self.links, key=lambda each: -each.index):
                    started = yield from self.in_at_last(link)
                break
            except FencedOff as fenced:
                known = fenced.incarnation
        if started is not None:
            yield from self.adopt(started.dial)
            yield from self.carry(started.decisions)

    def in_at_last(self, link: Link) -> Doing:
        while True:
            try:
                return (yield from self.join_again(link))
            except ConnectionLost:
                continue

    def rejoin_others(self) -> Doing:
        """It has said goodbye to ps:1..n, and has to tell them of another mode."""
        if self.is_leaving:
            for link in self.links[1:]:
                yield from self.reconnect(link)

    def join_one(self, link: Link) -> Doing:
        offer, trained_in = (self.offer(link), link.lineage) if self.is_started else (-1, -1)
        join = join_of(self.index, self.incarnation, self.cluster.plan, offer, trained_in)
        link.send(Kind.COLD, tail=m.encode(join))
        joined = self.reply_in((yield link))
        if isinstance(joined, m.Fenced):
            if joined.is_taken or not self.cluster.plan.retries:
                raise Refused(joined.reason)
            raise FencedOff(joined.incarnation)
        if isinstance(joined, m.Closed):
            raise Refused("closed already: it did not hear the answer")
        assert isinstance(joined, m.Joined)
        if not joined.is_initialised:
            yield from self.bring(link, joined)
        if joined.lineage > link.lineage:
            link.lineage, link.version, link.offset = joined.lineage, joined.version, 0
        link.slot = link.connection.arenas[1] if link.connection.arenas else None
        return joined

    def bring(self, lost: Link, joined: m.Joined) -> Doing:
        """worker/checkpoints/rewinding, with --reseed: what this worker has is what the run goes on from. One that has
        nothing goes back to the beginning, when nobody else has come. Always fails: it joins again."""
        has_all = joined.offers == self.cluster.plan.num_workers
        is_mine = joined.freshest == self.index and (has_all or joined.empty_s > 5)
        if is_mine or joined.empty_s > (5 * (2 + self.index) if self.is_started else 60):
            indices = range(self.cluster.plan.num_ps) if self.has_rounds else [lost.index]
            links = [Link(self, index) for index in sorted(indices, key=lambda each: each != lost.index)]
            version = self.offer(lost) if self.is_started else 0
            known = max([joined.trained_in, *(link.lineage for link in self.links)])
            try:
                for link in links:
                    described = yield from self.tell(link, m.Describe())
                    known = max(known, described.lineage)
                live = None
                if lost.index:
                    first = Link(self, 0)
                    live = (yield from self.tell(first, m.AskStatus())).live
                    first.connection.cut()
                for link in links:
                    is_lost = link.index == lost.index
                    rewind = m.Rewind(
                        self.index, self.incarnation, known + 1, self.has_rounds, LAYOUT, OPTIMIZER, is_lost
                    )
                    yield from self.tell(link, rewind)
                for link in links:
                    yield from self.tell(link, m.Init())
                for link in sorted(links, key=lambda each: -each.index):
                    yield from self.tell(link, m.Restored(version, self.dial, None, is_reseeded=True, live=live))
                self.cluster.fired["brought"] += 1
            except Refused:
                pass  # another worker is quicker
            finally:
                for link in links:
                    link.connection.cut()
        raise ConnectionLost(f"ps:{lost.index} lost its memory")

    def offer(self, lost: Link) -> int:
        """The version of what this worker has: in rounds the oldest of any shard."""
        return min(link.version - link.offset for link in self.links) if self.has_rounds else lost.version

    def tell(self, link: Link, message: m.Request) -> Doing:
        link.send(Kind.COLD, tail=m.encode(message))
        return self.reply_in((yield link))

    def request(self, message: m.Request, link: Link | None = None) -> Doing:
        """A cold request; to ps:0 unless said otherwise."""
        to = link or self.links[0]
        tail = m.encode(message)
        self.post(lambda: to.send(Kind.COLD, tail=tail))
        frame = yield from self.received(to, lambda: to.send(Kind.COLD, tail=tail))
        return self.reply_in(frame)

    def reply_in(self, frame: Frame) -> m.Reply:
        if frame.kind != Kind.COLD:
            raise ProtocolError(f"{self.name} got kind {frame.kind} instead of a reply")
        reply = m.decode(frame.tail)
        if isinstance(reply, m.Failed):
            raise Refused(reply.reason)
        return reply  # type: ignore[return-value]
