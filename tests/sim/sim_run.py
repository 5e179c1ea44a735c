"""WHAT happens in a run? A plan's tasks, whoever starts them again, and the disasters.

`simulate(plan, seed)` returns the faults found; an empty list is a good run. What must hold: sim_watch.py while it
runs, sim_checks.py at its end.
"""

from collections import Counter

from sim_checks import check
from sim_network import Connection, World, clock_of
from sim_plan import Plan
from sim_ps import SimService
from sim_saver import Saver
from sim_worker import Worker

from paceline.cluster.membership import Phase, first_incarnation
from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec
from paceline.server.core import Peer
from paceline.transport.security import Role
from paceline.wire import messages as m
from paceline.wire.frames import Frame, Kind

MAX_EVENTS = 60_000
NO_FRAME = Frame(Kind.COLD, 0, 0, 0, 0, 0, 0, 0, 0)


class Switcher:
    """Whoever asks for another mode, on a connection of its own; it may be gone before the answer."""

    def __init__(self, cluster: "Cluster", spec: ModeSpec, waits: bool) -> None:
        self.spec = spec
        self.waits = waits
        self.reply: object = None
        self.connection = Connection(
            cluster.world, cluster.services[0], False, self._told, lambda: self.connection.cut()
        )
        tail = m.encode(m.SwitchMode(spec, waits))
        self.connection.say_up(NO_FRAME._replace(tail_bytes=len(tail), tail=tail))

    def _told(self, frame: Frame) -> None:
        self.reply = m.decode(frame.tail)
        self.connection.cut()


class Deaf:
    """The connection of one that does not wait for an answer."""

    role = Role.LAUNCHER

    def say(self, message: object) -> None:
        pass


class Cluster:
    """The tasks of one run, and whoever starts them again."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.world = World(seed)
        self.services = [plan.service(self.world, i, plan) for i in range(plan.num_ps)]
        self.processes: list[Worker] = []
        self.switchers: list[Switcher] = []
        self.savers: list[Saver] = []
        self.lost: set[int] = set()
        self.fired: Counter[str] = Counter()
        self._incarnations = Counter[int]()
        self._to_start = 0
        self._start_all()
        for disaster, count in (
            (self.kill, plan.deaths),
            (self.evict, plan.evictions),
            (self.cut, plan.cuts),
            (self.duplicate, plan.zombies),
            (self.switch, plan.switches),
            (self.restart_ps, plan.ps_restarts),
            (self.replace_ps, plan.rebirths),
            (self.lose_ps, plan.losses),
        ):
            for _ in range(count):
                self.world.at(self.world.random.uniform(0, plan.span), disaster)

    def has_rounds(self, spec: ModeSpec) -> bool:
        return make_mode(spec, self.plan.num_workers).has_rounds

    def is_alone(self, process: Worker) -> bool:
        """Whether nobody else trains or will train."""
        return not self._to_start and not any(p.is_alive for p in self.processes if p is not process)

    def _start_all(self) -> None:
        for index in range(self.plan.num_workers):
            after = self.world.delay()
            if index >= self.plan.expected:
                if self.world.chance(0.2):
                    continue  # it never comes
                after = self.world.random.uniform(0, self.plan.span)
            self._to_start += 1
            self.world.after(after, self.start, index)

    def start(self, index: int) -> None:
        self._to_start -= 1
        self._incarnations[index] += 1
        process = self.plan.worker(self, index, first_incarnation(self._incarnations[index]))
        self.processes.append(process)
        process.wake()

    def save(self, process: Worker) -> None:
        """A worker was told to write a checkpoint."""
        saver = Saver(self, process.index, process.incarnation)
        self.savers.append(saver)
        saver.wake()

    # --- disasters --------------------------------------------------------------------------------------------

    def _pick(self) -> Worker | None:
        alive = [p for p in self.processes if p.is_alive]
        return self.world.random.choice(alive) if alive else None

    def kill(self) -> None:
        if process := self._pick():
            self.fired["deaths"] += 1
            process.die()

    def evict(self) -> None:
        """Its lease ran out at ps:0, though it lives."""
        process, first = self._pick(), self.services[0]
        if process and (key := (process.index, process.incarnation)) in first.core.control.at:
            self.fired["evictions"] += 1
            first.core.control.members.pulses[process.index].heard_s = 0.0
            first.core.control.beats = {-1: key}
            first.happens(f"while it gave up {key}", first._expire)
            first.core.control.beats = {}

    def cut(self) -> None:
        """One connection breaks; both ends live."""
        process = self._pick()
        if process and process.is_started:
            self.fired["cuts"] += 1
            self.world.random.choice(process.links).connection.cut()

    def duplicate(self) -> None:
        """A successor is started while its predecessor still runs."""
        if process := self._pick():
            self.fired["zombies"] += 1
            self._to_start += 1
            self.start(process.index)

    def switch(self) -> None:
        """Somebody asks for another mode; it may die before the answer."""
        self.fired["switches"] += 1
        random = self.world.random
        switcher = Switcher(self, random.choice(self.plan.other_modes), waits=random.random() < 0.7)
        self.switchers.append(switcher)
        if random.random() < 0.2:
            self.world.after(self.world.delay(), switcher.connection.cut)

    def restart_ps(self) -> None:
        """All connections of one ps end at once; what it knows survives, as with a supervised restart."""
        self.fired["ps_restarts"] += 1
        service = self.world.random.choice(self.services)
        is_seen_at_once = self.world.chance(0.5)
        for connection in [c for c in service.connections if not c.up.is_ended]:
            connection.up.end(keep=0)
            connection.down.end()
            if is_seen_at_once:
                service.ended(connection)

    def replace_ps(self) -> None:
        """One ps is killed; another process takes up what it had written down, and its workers find it there."""
        self.fired["rebirths"] += 1
        service = self.world.random.choice(self.services)
        for connection in [c for c in service.connections if not c.up.is_ended]:
            connection.up.end(keep=0)
            connection.down.end()
        service.be_reborn()

    def lose_ps(self) -> None:
        """One ps is lost with its host, and started elsewhere; a worker brings values."""
        if not self.services[0].core.control.is_started:
            return  # the run has not begun
        self.fired["losses"] += 1
        service = self.world.random.choice(self.services)
        for connection in [c for c in service.connections if not c.up.is_ended]:
            connection.up.end(keep=0)
            connection.down.end()
        service.lose_memory()

    # --- the supervisor ---------------------------------------------------------------------------------------

    def process_ended(self, process: Worker) -> None:
        """Start it again, or tell every ps that it will not come back."""
        if process.is_done or process.incarnations[0] != first_incarnation(self._incarnations[process.index]):
            return
        if self.has_closed(process):
            return
        if self.world.chance(self.plan.restarts):
            self._to_start += 1
            self.world.after(self.world.delay() * 3, self.start, process.index)
        else:
            self.lost.add(process.index)
            for service in self.services:
                self.world.after(self.world.delay() * 3, self.tell_lost, service, process)

    def has_closed(self, process: Worker) -> bool:
        """Whether it ended because its predecessor had done everything, as ps:0 knows."""
        return (
            "closed already" in str(process.error)
            and self.services[0].core.control.members[process.index].phase is Phase.CLOSED
        )

    def tell_lost(self, service: SimService, process: Worker) -> None:
        lost, peer = m.Lost(process.index, process.incarnations[0]), Peer(Deaf())  # type: ignore[arg-type]
        service.happens("over a lost worker", lambda: service._send_all(service.requests.handle(peer, lost, NO_FRAME)))

    def run(self) -> list[str]:
        with clock_of(self.world):
            self.world.run(MAX_EVENTS)
            if not self.world.faults:
                check(self)
        return self.world.faults


def simulate(plan: Plan, seed: int) -> list[str]:
    """The faults of one run.

    >>> simulate(Plan(num_ps=1, num_workers=1), 1)
    []
    """
    return Cluster(plan, seed).run()
