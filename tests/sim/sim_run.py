"""WHAT must hold, whatever happens? One simulated run: a plan, its disasters, and the checks at its end.

`simulate(plan, seed)` returns the faults found; an empty list is a good run.
"""

from collections import Counter
from dataclasses import dataclass

from sim_network import World
from sim_ps import SimService
from sim_worker import Worker

from paceline.cluster.membership import Phase
from paceline.errors import ConnectionLost
from paceline.modes.base import Mode
from paceline.modes.each_push import EachPush
from paceline.modes.full_sync import FullSync
from paceline.modes.quorum import Quorum
from paceline.server.state import ShardState
from paceline.wire.frames import Outcome

MAX_EVENTS = 60_000
SPAN = 60.0  # disasters happen within this time; a run of the sizes below takes about as long


@dataclass(frozen=True)
class Plan:
    """One cluster and what happens to it; rates are per run or per step."""

    num_ps: int = 2
    num_workers: int = 3
    mode: str = "sync"  # async, sync, or the K of k of n
    shares_memory: bool = True
    steps: int = 6
    total: int | None = None  # ctx.steps(total) instead of `steps` each
    deaths: int = 0
    restarts: float = 0.8  # how likely a worker that ended badly is started again
    evictions: int = 0
    cuts: int = 0
    zombies: int = 0
    pauses: float = 0.0
    not_finite: float = 0.0
    retries: bool = False
    state: type = ShardState
    worker: type = Worker
    service: type = SimService

    def parts(self) -> tuple[type, ...]:
        """The classes that a wrong version replaces."""
        return self.state, self.worker, self.service

    def steps_of(self, worker: int) -> int:
        """Workers end at different times."""
        return self.steps + worker % 3

    def make_mode(self) -> Mode:
        if self.mode == "async":
            return EachPush()
        return FullSync() if self.mode == "sync" else Quorum(int(self.mode))


class Cluster:
    """The tasks of one run, and whoever starts them again."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan = plan
        self.world = World(seed)
        self.has_rounds = plan.make_mode().has_rounds
        self.services = [
            plan.service(self.world, i, plan.num_ps, plan.num_workers, plan.make_mode(), plan.state)
            for i in range(plan.num_ps)
        ]
        self.processes: list[Worker] = []
        self._incarnations = Counter[int]()
        self.lost: set[int] = set()
        self.fired: Counter[str] = Counter()
        for index in range(plan.num_workers):
            self.world.after(self.world.delay(), self.start, index)
        self._to_start = plan.num_workers
        for disaster, count in (
            (self.kill, plan.deaths),
            (self.evict, plan.evictions),
            (self.cut, plan.cuts),
            (self.duplicate, plan.zombies),
        ):
            for _ in range(count):
                self.world.at(self.world.random.uniform(0, SPAN), disaster)

    def is_alone(self, process: Worker) -> bool:
        """Whether nobody else trains or will train."""
        return not self._to_start and not any(p.is_alive for p in self.processes if p is not process)

    def start(self, index: int) -> None:
        self._to_start -= 1
        self._incarnations[index] += 1
        process = self.plan.worker(self, index, self._incarnations[index])
        self.processes.append(process)
        process.wake()

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
        process = self._pick()
        core = self.services[0].core
        if process and (key := (process.index, process.incarnation)) in core.peers:
            self.fired["evictions"] += 1
            try:
                self.services[0]._answer(core.drop(key), None)
            except ConnectionLost as error:
                self.world.faults.append(f"ps:0 broke while it gave up {key}: {error}")

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

    def process_ended(self, process: Worker) -> None:
        """The supervisor: start it again, or tell every ps that it will not come back."""
        if process.is_done or process.incarnation != self._incarnations[process.index]:
            return
        if self.has_closed(process):
            return
        if self.world.chance(self.plan.restarts):
            self._to_start += 1
            self.world.after(self.world.delay() * 3, self.start, process.index)
        else:
            self.lost.add(process.index)
            for service in self.services:
                self.world.after(self.world.delay() * 3, self.tell_lost, service, process.index)

    def has_closed(self, process: Worker) -> bool:
        """Whether it ended because its predecessor had done everything, as ps:0 knows."""
        return (
            "closed already" in str(process.error)
            and self.services[0].core.members[process.index].phase is Phase.CLOSED
        )

    def tell_lost(self, service: SimService, index: int) -> None:
        core = service.core
        try:
            member = core.members[index]
            answers = []
            if member.phase in (Phase.TRAINING, Phase.PAUSED):
                answers = core.drop((index, member.incarnation))
            core.members.lose(index)
            answers += core.perform(core.state.changed())
            core.release_barrier()
            service.desk.release_starters()
            service._answer(answers, None)
        except ConnectionLost as error:
            self.world.faults.append(f"{service.name} broke over a lost worker: {error}")

    # --- what must hold ---------------------------------------------------------------------------------------

    def run(self) -> list[str]:
        self.world.run(MAX_EVENTS)
        if not self.world.faults:
            self.check_everybody_ended()
            self.check_once()
        if not self.world.faults:
            self.check_acknowledged()
            self.check_counts()
            self.check_slots()
            if self.has_rounds:
                self.check_rounds()
        return self.world.faults

    def fault(self, text: str) -> None:
        self.world.faults.append(text)

    def check_everybody_ended(self) -> None:
        for process in self.processes:
            if process.is_alive:
                waits = process._waits_for.index if process._waits_for else None
                self.fault(f"{process.name} is stuck at push {process.push_id}, waiting for ps:{waits}")
            if process.error is not None and not self.may_fail(process):
                self.fault(f"{process.name} failed: {process.error!r}")

    def may_fail(self, process: Worker) -> bool:
        if self.has_closed(process):
            return True
        plan = self.plan
        return bool(plan.evictions or plan.zombies or (plan.cuts and not plan.retries))

    def check_once(self) -> None:
        """I2: each (worker, incarnation, push id) is applied at most once on a shard, and is what was pushed."""
        for service in self.services:
            seen: set[object] = set()
            for gradient in (g for update in service.ledger.updates for g in update):
                if not isinstance(gradient, tuple):
                    self.fault(f"{service.name} applied {gradient} as a gradient")
                elif gradient in seen:
                    self.fault(f"{service.name} applied {gradient} twice")
                seen.add(gradient)

    def check_acknowledged(self) -> None:
        """What a worker was told is what happened, on every shard (dead ones: on ps:0)."""
        for process in self.processes:
            for service in self.services if process.is_done else self.services[:1]:
                ids = {g[2] for u in service.ledger.updates for g in u if g[:2] == (process.index, process.incarnation)}
                for push_id, outcome in process.outcomes.items():
                    is_wrong = (outcome is Outcome.APPLIED) != (push_id in ids)
                    if is_wrong and outcome is not Outcome.DUPLICATE:
                        self.fault(f"{process.name} was told {outcome.name} of {push_id}; {service.name} applied {ids}")

    def check_rounds(self) -> None:
        """I1: a round has one contributor set on all shards, made of gradients of that round."""
        first = self.services[0].ledger.updates
        for service in self.services[1:]:
            mine = service.ledger.updates
            if mine != first[: len(mine)]:
                self.fault(f"{service.name} applied {mine}, ps:0 {first}")
        for round_, update in enumerate(first):
            if any(g[3] != round_ for g in update) or len({g[0] for g in update}) != len(update):
                self.fault(f"round {round_} was made of {update}")

    def check_counts(self) -> None:
        plan, versions = self.plan, [s.core.state.version for s in self.services]
        if versions != [len(s.ledger.updates) for s in self.services]:
            self.fault(f"versions {versions} are not what was applied")
        is_calm = not (plan.deaths or plan.evictions or plan.zombies or (plan.cuts and not plan.retries))
        if is_calm and len(set(versions)) > 1:
            self.fault(f"the shards made {versions} updates")
        if is_calm and plan.mode == "async" and plan.total is None and not plan.not_finite:
            expected = sum(map(plan.steps_of, range(plan.num_workers)))
            if versions[0] != expected:
                self.fault(f"{versions[0]} updates, not {expected}")
        if plan.total is not None and any(p.is_done for p in self.processes) and versions[0] != plan.total:
            self.fault(f"{versions[0]} updates, not exactly {plan.total}")

    def check_slots(self) -> None:
        """Memory: a ps keeps one slot per live worker, and those that an open round may still need."""
        for service in self.services:
            core = service.core
            kept = [k for k in core.slots if k not in core.state.staged and not core.members.is_current(*k)]
            if kept:
                self.fault(f"{service.name} never freed the slots of {kept}")
            known = [id(slot) for slot in core.slots.values()]
            if any(slot.arena.is_open and id(slot) not in known for slot in service.ledger.made):
                self.fault(f"{service.name} made a slot and lost it")


def simulate(plan: Plan, seed: int) -> list[str]:
    """The faults of one run.

    >>> simulate(Plan(num_ps=1, num_workers=1), 1)
    []
    """
    return Cluster(plan, seed).run()
