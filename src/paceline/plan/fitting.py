"""WHICH costs make the simulation give what the calibrating runs gave? What no stopwatch sees is fitted to them.

Called by plan/calibrate with the parts that plan/timings found, and by bench/plan. Pure: the dice come in. Must never
see a run that is to be predicted. One number a run, each from the run that shows it:

1. `rest_ms` of a lane from its 1 ps + 1 worker: what the parts of a step leave unexplained,
2. `contention` from the crowd without rounds: nobody waits for anybody, and all cores are busy,
3. `shared_spread` from the crowd in rounds: the last one is waited for, so it shows how unevenly cores are shared.

Each changes the others a little, so it is gone round a few times; 1 comes once more at the end and holds exactly.
"""

from collections.abc import Callable

import msgspec

from paceline.modes.spec import ModeSpec
from paceline.plan.costs import Costs
from paceline.plan.simulate import Dice, Simulation
from paceline.plan.topology import Topology

ROUNDS = 3
HALVINGS = 12
CLOSE, EXACT = 0.001, 1e-5  # of a step
MOST_CONTENTION, MOST_SPREAD = 2.0, 1.0

Roll = Callable[[], Dice]


def fitted(costs: Costs, roll: Roll) -> Costs:
    """The same costs with what the runs as a whole say; `roll` gives the same dice each time."""
    seen = costs.seen
    if seen is None:
        return costs
    for _ in range(ROUNDS):
        costs = _anchored(costs, seen.alone_ms, roll)  # 1
        if seen.crowd_async_ms is not None:  # 2
            crowd = _topology(costs, seen.num_crowd, "async")
            costs = _fitted(costs, with_contention, crowd, seen.crowd_async_ms, (0.0, MOST_CONTENTION), roll)
        if seen.crowd_sync_ms is not None:  # 3
            crowd = _topology(costs, seen.num_crowd, "sync")
            costs = _fitted(costs, with_spread, crowd, seen.crowd_sync_ms, (costs.spread, MOST_SPREAD), roll)
    return _anchored(costs, seen.alone_ms, roll)


def _anchored(costs: Costs, alone_ms: dict[str, float], roll: Roll) -> Costs:
    """1 ps + 1 worker takes as long as it took, on every lane."""
    for name, step_ms in alone_ms.items():
        alone = _topology(costs, 1, "async", name)
        for _ in range(ROUNDS):
            lane, off_ms = costs.lanes[name], step_ms - _step_ms(alone, costs, roll)
            if abs(off_ms) < EXACT * step_ms:
                break
            lanes = {**costs.lanes, name: msgspec.structs.replace(lane, rest_ms=lane.rest_ms + off_ms)}
            costs = msgspec.structs.replace(costs, lanes=lanes)
    return costs


def with_contention(costs: Costs, contention: float) -> Costs:
    return msgspec.structs.replace(costs, contention=contention)


def with_spread(costs: Costs, spread: float) -> Costs:
    return msgspec.structs.replace(costs, shared_spread=spread)


def _topology(costs: Costs, num_workers: int, mode: str, lane: str = "shm") -> Topology:
    return Topology(num_workers=num_workers, num_ps=1, mode=ModeSpec(name=mode), lane=lane, cores=costs.cores)


def _step_ms(topology: Topology, costs: Costs, roll: Roll) -> float:
    return Simulation(topology, costs, roll()).run().step_ms


def _fitted(
    costs: Costs,
    with_value: Callable[[Costs, float], Costs],
    topology: Topology,
    step_ms: float,
    between: tuple[float, float],
    roll: Roll,
) -> Costs:
    """By halving; the least where the run was no slower than with that."""
    low, high = between
    if _step_ms(topology, with_value(costs, low), roll) >= step_ms:
        return with_value(costs, low)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        got_ms = _step_ms(topology, with_value(costs, middle), roll)
        if abs(got_ms / step_ms - 1) < CLOSE:
            return with_value(costs, middle)
        low, high = (middle, high) if got_ms < step_ms else (low, middle)
    return with_value(costs, (low + high) / 2)
