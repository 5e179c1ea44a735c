"""HOW would this topology run? A seeded simulation of all its tasks until the rate is steady.

Called by plan/planning with costs and topologies. Pure: the dice come in, nothing is measured here. The modes, the
rounds, what is discarded and who waits are decided by `modes` and `server/control/state`; only time is modelled:

- every host has cores; computing, copying and each message need one; more users than cores are all slowed alike,
- a ps deals with one message at a time,
- every host has its link, shared by its transfers in each direction; of sending, carrying and taking in, which go on
  at once, the slowest counts.
"""

import math
from collections import Counter
from typing import Protocol

import msgspec

from paceline.cluster.membership import Membership
from paceline.errors import UsageError
from paceline.modes import make
from paceline.plan.costs import Costs
from paceline.plan.sharing import Call, Shared, World
from paceline.plan.tasks import Message, Ps, Worker
from paceline.plan.topology import Topology
from paceline.server.control.actions import Answer
from paceline.telemetry.limit import Limit
from paceline.telemetry.staleness import spread, together
from paceline.wire.frames import WITHOUT_PARAMETERS

STEADY = 0.01  # two chunks whose rates differ by less
LEAST_STEPS, MOST_CHUNKS = 160, 6  # of a chunk, and of a simulation
MOST_EVENTS = 10_000_000  # a minute or so: more is refused
LARGE = 48  # with more workers than that, luck evens out: few steps of each are enough
WAITS, FULL, NEARLY = 0.15, 0.97, 0.9  # a share of the time: waits a lot; a machine, and a ps or a link, that is full
NEARLY_IN_TURN = 0.75  # a link that is full in rounds, where everybody computes in between
NEARLY_BOTH_WAYS = 0.8  # and elsewhere, where those who send and those who receive are never quite balanced


class Dice(Protocol):
    """random.Random, seeded by the caller."""

    def random(self) -> float: ...

    def gauss(self, mu: float, sigma: float) -> float: ...


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a topology would do. Shares are of the time after the warm-up."""

    topology: Topology
    step_ms: float  # from one step of a worker to its next, mean over the workers
    steps_per_s: float  # of all workers, also those whose gradient is discarded
    samples_per_s: float  # of those whose gradient counts
    staleness_mean: float
    staleness_p95: float
    discarded: float  # share of the pushes
    waiting: float  # share of a worker's time
    ps_busy: float
    cores_busy: float  # of the host that is busiest
    link_busy: float  # of a ps' host
    worker_link_busy: float
    limit: str  # a telemetry.limit.Limit
    events: int
    is_extended: bool = False  # not simulated: a ps is full before, so nothing but the queue grows
    efficiency: float | None = None  # samples/s over workers times those of one
    cost: float | None = None  # of a million samples


def extended(last: Prediction, topology: Topology) -> Prediction:
    """The same with more workers, where a ps or its link was full already: the rate stays, everybody waits longer."""
    more = topology.num_workers / last.topology.num_workers
    others = (topology.num_workers - 1) / (last.topology.num_workers - 1)
    return msgspec.structs.replace(
        last,
        topology=topology,
        step_ms=last.step_ms * more,
        staleness_mean=last.staleness_mean * others,
        staleness_p95=round(last.staleness_p95 * others),
        waiting=1 - (1 - last.waiting) / more,
        is_extended=True,
        events=0,
    )


class Host:
    """One machine."""

    def __init__(self, world: World, topology: Topology, contention: float) -> None:
        self.cpu = Shared(world, float(topology.cores), 1.0, contention)
        speed = topology.link.bytes_per_s if topology.link else 0.0
        self.up, self.down = Shared(world, speed, speed), Shared(world, speed, speed)


class Simulation:
    """One cluster at work."""

    def __init__(self, topology: Topology, costs: Costs, dice: Dice) -> None:
        self.topology, self.costs = topology, costs
        self.world = World()
        self.mode = make(topology.mode, topology.num_workers)
        self.members = Membership(topology.num_workers)
        self._dice = dice
        self._steps = 0
        self._set_costs()
        one = None if topology.link else Host(self.world, topology, costs.contention)
        for worker in range(topology.num_workers):
            self.members.join(worker, 1, 0.0)
        # On hosts of their own, all ps but the first see the same messages at the same time: one stands for them.
        kinds = [1, topology.num_ps - 1] if topology.link and topology.num_ps > 2 else [1] * topology.num_ps
        self.ps = [Ps(self, i, one or self._host(), kind) for i, kind in enumerate(kinds)]
        factors = dict(topology.slow)
        self.workers = [Worker(self, i, one or self._host(), factors.get(i, 1.0)) for i in range(topology.num_workers)]

    def _host(self) -> Host:
        return Host(self.world, self.topology, self.costs.contention)

    def _set_costs(self) -> None:
        topology, costs = self.topology, self.costs
        lane = costs.lanes[topology.lane]
        num_ps, spec = topology.num_ps, topology.mode
        self.shares_memory = topology.lane == "shm"
        self.local_steps = spec.local_steps if spec.name == "local" else 1
        self.shard_bytes = costs.size_bytes / num_ps
        self.message_s = lane.message_ms / 1e3
        self.bulk_s = lane.bulk_ms / 1e3 / num_ps
        self.wake_s = lane.wake_ms / 1e3
        self._rest_ms = lane.rest_ms
        is_shared = topology.link is None and topology.num_workers > 1
        self._spread = max(costs.spread, costs.shared_spread) if is_shared else costs.spread
        self._delay_s = topology.link.latency_s if topology.link else 0.0
        more_s = self.message_s * (num_ps - 1)  # a message to each further ps, and its answer
        self.push_s = lane.push_ms / 1e3 + more_s / 2
        self.read_s = lane.read_ms / 1e3 + more_s / 2
        self.copy_s = costs.copy_ms / 1e3 / num_ps
        self.add_s = costs.add_ms / 1e3 / num_ps
        self.own_s = costs.own_ms / 1e3

    # --- asked by the tasks -------------------------------------------------------------------------------------

    def start_s(self) -> float:
        """Where rounds do not bring them together, workers are spread over a step, as long as it will be at least:
        what is full then is full from the beginning."""
        if self.mode.has_rounds:
            return 0.0
        link, many = self.topology.link, self.topology.num_workers
        least_s = self.own_s * self.local_steps
        if link is not None:
            carried_s = self.shard_bytes / link.bytes_per_s
            least_s = max(least_s + 2 * carried_s * self.topology.num_ps, many * carried_s)
        served_s = self.message_s + self.apply_s(1) + self.copy_s * bool(self.bulk_s)
        return self._dice.random() * max(least_s, many * served_s)

    def compute_s(self) -> tuple[float, float]:
        """(beside the cores, on them) of a worker's next push."""
        costs, count = self.costs, self.local_steps
        sigma = self._spread / math.sqrt(count)
        luck = math.exp(self._dice.gauss(-sigma * sigma / 2, sigma)) if sigma else 1.0
        own_ms = costs.apply_ms * (count - 1) if count > 1 else 0.0
        compute_ms = max(0.0, costs.compute_ms + self._rest_ms) * count * luck
        return costs.device_ms * count * luck / 1e3, (compute_ms + own_ms) / 1e3

    def woken(self, call: Call) -> None:
        """Somebody waits for what is there now: its process runs a little later."""
        if self.wake_s:
            self.world.after(self.wake_s, call)
        else:
            call()

    def apply_s(self, gradients: int) -> float:
        return self.costs.apply_share_ms(self.topology.num_ps, gradients) / 1e3

    def push(self, worker: Worker, ps: Ps, message: Message, copied: "Waits") -> None:
        """A gradient: the worker sends while the link carries and the ps takes it in; the slowest of them counts."""
        arrived = Waits(lambda: self.world.after(self._delay_s, lambda: ps.enter(message)))
        copied.then(arrived.one())
        if self.bulk_s:
            ps.host.cpu.use(self.bulk_s / 2, arrived.one())
        self._through(worker.host.up, ps.host.down, ps, arrived)
        arrived.close()

    def waits(self, done: Call) -> "Waits":
        return Waits(done)

    def ask(self, ps: Ps, message: Message) -> None:
        """A message without numbers."""
        self.world.after(self._delay_s, lambda: ps.enter(message))

    def answer(self, ps: Ps, answer: Answer) -> None:
        """With parameters, where memory is not shared: they are sent beside whatever else the ps does."""
        worker = self.workers[answer.key[0]]
        has_bulk = not self.shares_memory and answer.outcome not in WITHOUT_PARAMETERS
        version = answer.version if self.mode.is_lockstep else ps.version
        began_s = self.world.now

        def arrive() -> None:
            worker.receive(ps.index, answer, version, began_s)

        arrived = Waits(lambda: self.world.after(self._delay_s, arrive))
        if has_bulk:
            ps.host.cpu.use(self.bulk_s / 2, arrived.one())
            self._through(ps.host.up, worker.host.down, ps, arrived)
        arrived.close()

    def _through(self, out: Shared, into: Shared, ps: Ps, arrived: "Waits") -> None:
        """Both ends of a link; at a worker's end the bytes of all ps that this one stands for."""
        if self.topology.link is not None and self.shard_bytes:
            many = self.shard_bytes * ps.stands_for
            is_to_ps = into is ps.host.down
            out.use(many if is_to_ps else self.shard_bytes, arrived.one())
            into.use(self.shard_bytes if is_to_ps else many, arrived.one())

    def stepped(self) -> None:
        self._steps += 1

    # --- until it is steady -------------------------------------------------------------------------------------

    def run(self) -> Prediction:
        """Warm up, then count until two chunks agree; of many workers each needs a few steps only."""
        count = self.topology.num_workers
        if count > LARGE:
            self._until(count if self.mode.has_rounds else 3 * count // 2)
            before = Counts(self)
            self._until(5 * count // 2)
            return self._predicted(before)
        chunk = max(LEAST_STEPS, 6 * count)
        self._until(chunk)
        before = Counts(self)
        rates: list[float] = []
        for _ in range(MOST_CHUNKS):
            began, steps = self.world.now, self._steps
            self._until(chunk)
            rates.append((self._steps - steps) / (self.world.now - began))
            if len(rates) > 1 and abs(rates[-1] - rates[-2]) < STEADY * rates[-1]:
                break
        return self._predicted(before)

    def _rate(self, before: "Counts") -> float:
        """Pushes a second, from each worker's own last step before to its last step now: they come in bunches, and a
        window that is cut anywhere would count one too many or too few."""
        taken = [
            (worker.steps - steps) / (worker.stepped_s - since_s)
            for worker, (steps, since_s) in zip(self.workers, before.steps_of, strict=True)
            if worker.steps > steps and steps
        ]
        return sum(taken) * len(self.workers) / len(taken) if taken else 0.0

    def _until(self, steps: int) -> None:
        wanted = self._steps + steps
        is_over = self.world.run_until(lambda: self._steps >= wanted, MOST_EVENTS)
        if not is_over and self.world.events >= MOST_EVENTS:
            raise UsageError(
                f"{self.topology.title}: too much happens in it to be simulated (more than {MOST_EVENTS:,} events); "
                "ask for fewer workers or ps, or give each a host (--link)."
            )
        assert is_over, f"{self.topology.title}: everybody waits for somebody else"

    def _predicted(self, before: "Counts") -> Prediction:
        after = Counts(self)
        passed = after.now - before.now
        steps = self._steps - before.steps
        fates = after.staleness - before.staleness
        lost = after.discarded - before.discarded
        discarded = lost / steps if steps else 0.0
        told = spread(fates)
        rate = self._rate(before) or steps / passed
        uses = self._uses(before)
        waiting = (after.waited_s - before.waited_s) / (passed * len(self.workers))
        return Prediction(
            topology=self.topology,
            step_ms=1e3 * len(self.workers) / rate / self.local_steps,
            steps_per_s=rate * self.local_steps,
            samples_per_s=rate * self.local_steps * self.costs.batch * max(0.0, 1 - discarded),
            staleness_mean=told["mean"] or 0.0,
            staleness_p95=told["p95"] or 0.0,
            discarded=discarded,
            waiting=min(1.0, waiting),
            limit=self._limit(uses, waiting).value,
            events=self.world.events,
            ps_busy=uses["ps_busy"],
            cores_busy=uses["cores_busy"],
            link_busy=uses["link_busy"],
            worker_link_busy=uses["worker_link_busy"],
        )

    def _uses(self, before: "Counts") -> dict[str, float]:
        ps_busy = max(
            (ps.busy_until(self.world.now) - was) / (self.world.now - before.now)
            for ps, was in zip(self.ps, before.ps_busy_s, strict=True)
        )
        hosts = [*(ps.host for ps in self.ps), self.workers[0].host]
        shares = [
            tuple(use.share_used(before.now, was) for use, was in zip(uses_of(host), had, strict=True))
            for host, had in zip(hosts, before.used, strict=True)
        ]
        has_link = self.topology.link is not None
        return {
            "ps_busy": ps_busy,
            "cores_busy": max(share[0] for share in shares),
            "link_busy": self._links_share([share[1:] for share in shares[:-1]]) if has_link else 0.0,
            "worker_link_busy": self._links_share([shares[-1][1:]]) if has_link else 0.0,
            "cores_short": (self.ps[0].host.cpu.short_s - before.short_s) / (self.world.now - before.now),
        }

    def _links_share(self, links: list[tuple[float, ...]]) -> float:
        """In rounds nobody sends while somebody receives, and ps:0 comes after the others: all take turns."""
        return min(1.0, sum(map(sum, links))) if self.mode.has_rounds else max(map(max, links))

    def _limit(self, uses: dict[str, float], waiting: float) -> Limit:
        if uses["link_busy"] > (NEARLY_IN_TURN if self.mode.has_rounds else NEARLY_BOTH_WAYS):
            return Limit.PS_LINK
        if self.topology.link is None and (uses["cores_busy"] > FULL or uses["cores_short"] > WAITS):
            return Limit.CORES
        if uses["ps_busy"] > NEARLY or (self.topology.link and uses["cores_busy"] > FULL and waiting > WAITS):
            return Limit.PS
        if uses["worker_link_busy"] > NEARLY / 3:
            return Limit.WORKER_LINK
        if waiting > WAITS:
            held = sum(self.ps[0].state.waited_s.values()) / self.world.now / len(self.workers)
            others = Limit.SLOWEST if self.topology.slow else Limit.ROUNDS
            return others if held > waiting / 2 else Limit.EXCHANGE
        return Limit.COMPUTE


def uses_of(host: Host) -> tuple[Shared, Shared, Shared]:
    return host.cpu, host.up, host.down


class Waits:
    """Calls when all that it was made for have ended, and nothing more will be asked of it."""

    def __init__(self, done: Call) -> None:
        self._done = done
        self._left = 1
        self._more: list[Call] = []

    def one(self) -> Call:
        self._left += 1
        return self.close

    def close(self) -> None:
        self._left -= 1
        if not self._left:
            self._done()
            for call in self._more:
                call()

    def then(self, call: Call) -> None:
        """Also this."""
        self._more.append(call)


class Counts:
    """All that is counted, at a moment."""

    def __init__(self, simulation: Simulation) -> None:
        self.now = simulation.world.now
        self.steps = simulation._steps
        self.steps_of = [(worker.steps, worker.stepped_s) for worker in simulation.workers]
        first = simulation.ps[0].state
        self.staleness: Counter[int] = together(first.staleness.values())
        self.discarded = sum(first.discarded.values())
        self.waited_s = sum(worker.waited_s for worker in simulation.workers)
        self.ps_busy_s = [ps.busy_until(self.now) for ps in simulation.ps]
        hosts = [*(ps.host for ps in simulation.ps), simulation.workers[0].host]
        self.used = []
        for host in hosts:
            for use in uses_of(host):
                use.share_used(0.0, 0.0)  # which brings it up to now
            self.used.append([use.used for use in uses_of(host)])
        self.short_s = hosts[0].cpu.short_s
