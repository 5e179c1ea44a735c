"""WHICH topology is worth its cost? Simulates all that are asked for, finds the knee of each curve, recommends one.

Called by cli/plan with what was calibrated. Pure: dice come in. Must never recommend what the numbers do not show.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from paceline.plan.costs import Costs
from paceline.plan.simulate import Dice, Prediction, Simulation, extended
from paceline.plan.topology import Link, Topology, mode_of
from paceline.telemetry.limit import Limit

PAYS = 0.5  # a further worker must add so much of what the first one makes
GOOD = 0.9  # of the best is as good as the best
FINE = 0.2  # a knee is looked for until it is known to a fifth
MILLION = 1e6
FULL_WORKERS, FLAT = 16, 0.03  # from so many workers on, a curve that grows by less is flat


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be compared."""

    workers: list[int]
    ps: list[int]
    modes: list[str]
    link: Link | None = None
    lane: str = "shm"
    cores: int = 2
    price: tuple[float, float] | None = None  # a worker's host, a ps' host, an hour; on one machine: the first, once
    slow: tuple[tuple[int, float], ...] = ()

    @property
    def has_rounds(self) -> bool:
        """Whether any of the modes makes an update of several gradients."""
        specs = [mode_of(mode, self.workers[-1]) for mode in self.modes]
        return any(spec is not None and spec.has_rounds for spec in specs)


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Samples/s over workers with so many ps in one mode. `knee`: from there on a further worker does not pay."""

    num_ps: int
    mode: str
    points: list[Prediction]
    knee: int | None = None  # None: every one pays, as far as was looked
    knee_limit: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, ready for plan.json."""

    costs: Costs
    wanted: Wanted
    seed: int
    base: Prediction  # 1 ps + 1 worker, async
    curves: list[Curve]
    recommended: Prediction | None
    reason: str
    said: list[str]  # where each curve ends


class Planner:
    """Simulates, and remembers."""

    def __init__(self, costs: Costs, wanted: Wanted, dice: Callable[[], Dice]) -> None:
        self.costs, self.wanted = costs, wanted
        self._dice = dice  # the same for every topology: what differs between two is the topology
        self._done: dict[Topology, Prediction] = {}
        alone = self._topology(1, 1, "async", ())
        assert alone is not None
        self.base = self._simulated(alone)

    @property
    def events(self) -> int:
        return sum(prediction.events for prediction in self._done.values())

    def plan(self, seed: int, on_progress: Callable[[int, int], None] = lambda done, all_: None) -> Plan:
        """Every curve, then the best of all points."""
        wanted = [(num_ps, mode) for mode in self.wanted.modes for num_ps in self.wanted.ps]
        curves = []
        for number, (num_ps, mode) in enumerate(wanted):
            on_progress(number, len(wanted))
            curve = self._curve(num_ps, mode)
            curves += [curve] if curve.points else []
        recommended, reason = recommend(curves, self.base, self.wanted.price is not None)
        return Plan(
            costs=self.costs, wanted=self.wanted, seed=seed, base=self.base, curves=curves, recommended=recommended,
            reason=reason, said=[knee_sentence(curve) for curve in curves],
        )  # fmt: skip

    def predict(self, num_workers: int, num_ps: int, mode: str) -> Prediction | None:
        """None: the mode makes no sense with so few workers."""
        slow = tuple((w, f) for w, f in self.wanted.slow if w < num_workers)
        topology = self._topology(num_workers, num_ps, mode, slow)
        return self._with_cost(self._simulated(topology)) if topology is not None else None

    def _topology(
        self, num_workers: int, num_ps: int, mode: str, slow: tuple[tuple[int, float], ...]
    ) -> Topology | None:
        spec = mode_of(mode, num_workers)
        if spec is None:
            return None
        return Topology(
            num_workers=num_workers, num_ps=num_ps, mode=spec, lane=self.wanted.lane, link=self.wanted.link,
            cores=self.wanted.cores, slow=slow,
        )  # fmt: skip

    def _simulated(self, topology: Topology) -> Prediction:
        if topology not in self._done:
            self._done[topology] = Simulation(topology, self.costs, self._dice()).run()
        return self._done[topology]

    def _extend(self, last: Prediction, num_workers: int, num_ps: int, mode: str) -> None:
        topology = self._topology(num_workers, num_ps, mode, last.topology.slow)
        if topology is not None:
            self._done.setdefault(topology, extended(last, topology))

    def _with_cost(self, found: Prediction) -> Prediction:
        price, topology = self.wanted.price, found.topology
        cost = None
        if price is not None and found.samples_per_s > 0:
            many = topology.num_workers * price[0] + topology.num_ps * price[1]
            an_hour = price[0] if topology.link is None else many
            cost = an_hour / 3600 / found.samples_per_s * MILLION
        efficiency = found.samples_per_s / (topology.num_workers * self.base.samples_per_s)
        return msgspec.structs.replace(found, efficiency=efficiency, cost=cost)

    def _curve(self, num_ps: int, mode: str) -> Curve:
        points: list[Prediction] = []
        for count in self.wanted.workers:
            if is_full(points):
                self._extend(points[-1], count, num_ps, mode)
            found = self.predict(count, num_ps, mode)
            points += [found] if found is not None else []
        knee, limit = self._knee(points, num_ps, mode)
        points += [knee] if knee is not None and knee not in points else []
        points.sort(key=lambda point: point.topology.num_workers)
        return Curve(num_ps=num_ps, mode=mode, points=points, knee=_workers(knee), knee_limit=limit)

    def _knee(self, points: Sequence[Prediction], num_ps: int, mode: str) -> tuple[Prediction | None, str]:
        """The last number of workers that pays, and what limits just beyond it."""
        steps = list(pairwise(points))
        paying = [at for at, (low, high) in enumerate(steps) if self._pays(low, high)]
        at = paying[-1] + 1 if paying else 0
        if at >= len(steps):
            return None, ""
        low, high = steps[at]
        while high.topology.num_workers - low.topology.num_workers > max(1, FINE * low.topology.num_workers):
            middle = self.predict((low.topology.num_workers + high.topology.num_workers) // 2, num_ps, mode)
            assert middle is not None
            low, high = (middle, high) if self._pays(low, middle) else (low, middle)
        return low, high.limit

    def _pays(self, low: Prediction, high: Prediction) -> bool:
        more = high.topology.num_workers - low.topology.num_workers
        return high.samples_per_s - low.samples_per_s >= PAYS * more * self.base.samples_per_s


def is_full(points: Sequence[Prediction]) -> bool:
    """Whether a ps was the limit twice, and twice as many workers made no more: then more of them will not either."""
    if len(points) < 2 or points[-1].topology.num_workers < FULL_WORKERS:
        return False
    last, before = points[-1], points[-2]
    are_at_limit = {last.limit, before.limit} <= {Limit.PS_LINK.value, Limit.PS.value}
    is_double = last.topology.num_workers >= 2 * before.topology.num_workers or last.is_extended
    return are_at_limit and is_double and abs(last.samples_per_s / before.samples_per_s - 1) < FLAT


def recommend(curves: Sequence[Curve], base: Prediction, has_price: bool) -> tuple[Prediction | None, str]:
    """The topology that is worth it, and why: the cheapest, or the fewest tasks among those nearly as fast as the best.

    Beyond a knee nothing is recommended: one would pay for workers that wait."""
    paying = [p for c in curves for p in c.points if c.knee is None or p.topology.num_workers <= c.knee]
    if not paying:
        return None, "Nothing was simulated that could be recommended."
    best = max(p.samples_per_s for p in paying)
    good = [p for p in paying if p.samples_per_s >= GOOD * best]
    if has_price:
        chosen = min(paying, key=lambda p: (p.cost or 0.0, -p.samples_per_s))
        why = f"it costs {chosen.cost:.3g} a million samples, the least of those that pay"
    else:
        chosen = min(good, key=lambda p: (_tasks(p), round(p.staleness_mean), -p.samples_per_s))
        why = "no other has as few tasks within 10 % of the best that pays"
    gain = chosen.samples_per_s / base.samples_per_s
    stale = f", staleness {chosen.staleness_mean:.1f}" if chosen.staleness_mean >= 0.05 else ""
    lost = f", {100 * chosen.discarded:.0f} % of the gradients discarded" if chosen.discarded >= 0.005 else ""
    fastest = max((p for c in curves for p in c.points), key=lambda p: p.samples_per_s)
    more = fastest.samples_per_s / chosen.samples_per_s
    beyond = f" The fastest is {fastest.topology.title} with {more:.2f} times as much." if more > 1.1 else ""
    return chosen, (
        f"{chosen.topology.title}: {rate(chosen.samples_per_s)} samples/s, {gain:.2f} times one worker{stale}{lost}; "
        f"{why}; limited by {chosen.limit}.{beyond}"
    )


def rate(per_s: float) -> str:
    """Samples a second, for a reader.

    >>> rate(12018.4), rate(12.34), rate(4.5678), rate(0.0012345)
    ('12,018', '12', '4.57', '0.00123')
    """
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.3g}"


def _workers(prediction: Prediction | None) -> int | None:
    return prediction.topology.num_workers if prediction is not None else None


def _tasks(prediction: Prediction) -> int:
    return prediction.topology.num_workers + prediction.topology.num_ps


def knee_sentence(curve: Curve) -> str:
    """Where adding workers stops to pay."""
    who, first = f"{curve.num_ps} ps, {curve.mode}", curve.points[0]
    if first.topology.num_workers > 1 and (first.efficiency or 0.0) < PAYS:
        made = (first.efficiency or 0.0) * first.topology.num_workers
        return (
            f"{who}: {first.topology.num_workers} workers make {made:.2f} times what one makes: look at fewer "
            f"(limit: {first.limit})."
        )
    if curve.knee is None:
        most = curve.points[-1].topology.num_workers
        return f"{who}: every worker pays, up to {most}, as far as was looked."
    return (
        f"{who}: pays up to about {curve.knee} worker{'s' * (curve.knee > 1)}; beyond, a further one adds less than "
        f"half of what the first makes (limit: {curve.knee_limit})."
    )
