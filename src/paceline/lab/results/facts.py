"""WHAT is known of a cell or a row that says what limits it? Times, cores and shares, from a result's lines.

Called by lab/results/telling; lab/results/limits judges. Pure. Must never fill in what was not measured: None means
that nobody knows.
"""

from collections.abc import Mapping, Sequence

import msgspec

from paceline.lab import cells
from paceline.lab.matrices import carrier_matrix, overhead
from paceline.lab.results.cables import Cable, cable
from paceline.lab.results.figures import slowed
from paceline.lab.results.lines import Line, Measured, Result, Segment
from paceline.lab.tables import quantile

LOADS = {overhead.SOCKET: None, carrier_matrix.SOCKET: carrier_matrix.SOCKET_BYTES}  # None: as the settings say
COMPUTE, DATA, BOTH, EXCHANGE = "compute", "data", "compute (with data)", "push and pull"  # parts of a worker's step
LONG_START = 0.50  # of a run's time: its numbers are more of the start than of the steps
FEEDS = 0.5  # of a step: from here on the client is what others wait for
WAIT = "wait"  # the part of a client's step in which it only waits


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker's step goes, in milliseconds; None: not measured."""

    data_ms: float | None = None  # None in a split that is known: it is in compute
    compute_ms: float | None = None
    exchange_ms: float | None = None  # push and pull
    wait_ms: float | None = None  # for others

    @property
    def is_known(self) -> bool:
        return None not in (self.compute_ms, self.exchange_ms)


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    step_ms: float | None = None
    wait_share: float | None = None  # of its time, for others
    cores: float | None = None
    split: Split = Split()
    slowed_times: float | None = None  # by --slow

    @property
    def own_ms(self) -> float | None:
        """A step without the waiting for others."""
        if self.split.compute_ms is not None:
            return self.split.compute_ms + (self.split.data_ms or 0.0)
        if self.step_ms is None or self.wait_share is None:
            return None
        return self.step_ms * (1 - self.wait_share)


class PsFacts(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    busy_share: float | None = None  # of the time trained, applying
    cores: float | None = None


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one cell."""

    workers: tuple[WorkerFacts, ...] = ()
    ps: tuple[PsFacts, ...] = ()
    machine_cores: int | None = None
    link_share: float | None = None  # of what the lane carries, by all pairs together
    cable: Cable | None = None  # one whose rate is known
    client_share: float | None = None  # in-graph: of a step, that the client does not only wait
    lane: str = ""
    start_share: float | None = None  # of the run's time that no worker trained
    is_told: bool = True  # the script told how long it trained; else evaluating is in that share too
    num_steps: int | None = None  # of the worker that made most

    @property
    def shares(self) -> dict[str, float] | None:
        """The parts of a step over all workers that were not slowed on purpose; None when any of them is not known."""
        splits = [worker.split for worker in self.workers if not worker.slowed_times]
        if not splits or not all(split.is_known for split in splits):
            return None
        compute = sum(split.compute_ms or 0.0 for split in splits)
        data = sum(split.data_ms or 0.0 for split in splits)
        is_apart = all(split.data_ms is not None for split in splits)
        parts = {
            **({COMPUTE: compute, DATA: data} if is_apart else {BOTH: compute + data}),
            EXCHANGE: sum(split.exchange_ms or 0.0 for split in splits),
            WAIT: sum(split.wait_ms or 0.0 for split in splits),
        }
        whole = sum(parts.values())
        return {name: value / whole for name, value in parts.items()} if whole > 0 else None

    @property
    def used_cores(self) -> float | None:
        """Of all tasks together; None when any of them is not known."""
        cores = [worker.cores for worker in self.workers] + [ps.cores for ps in self.ps]
        known = [value for value in cores if value is not None]
        return sum(known) if known and len(known) == len(cores) else None


# --- whole runs -------------------------------------------------------------------------------------------------------


class _Seconds(msgspec.Struct, frozen=True):
    seconds: float | None = None


class _Client(msgspec.Struct, frozen=True):
    client_us: dict[str, float] = {}


def facts(result: Result, cell: Measured) -> Facts:
    """Everything that is known of a whole run."""
    trained, told = trained_s(cell), _told_s(cell)
    start_share = max(0.0, 1 - trained / cell.wall_s) if trained and cell.wall_s else None
    has_cores = start_share is None or start_share < LONG_START  # else they are those of the start
    slow = {str(task): times for task, times in slowed(cell.slow).items()}
    return Facts(
        workers=tuple(_worker(cell, worker, trained, slow, has_cores) for worker in cell.workers),
        ps=tuple(_ps(cell, ps, trained, has_cores) for ps in cell.ps),
        machine_cores=result.origin.cores,
        link_share=_link_share(result, cell, trained),
        cable=cable(cell, trained),
        client_share=_client_share(cell),
        lane=" and ".join(sorted({pair.lane for pair in cell.pairs if pair.lane})),
        start_share=start_share,
        is_told=told is not None,
        num_steps=max((worker.steps for worker in cell.workers), default=0) or None,
    )


def trained_s(cell: Measured) -> float | None:
    """How long the workers trained: as the script told it, else the steps of the one that took longest."""
    lasted = [lasted_s for worker in cell.workers if (lasted_s := _lasted_s(worker)) is not None]
    return _told_s(cell) or max(lasted, default=None)


def _lasted_s(worker: cells.Worker) -> float | None:
    """All steps of a worker: by their mean where it is known, because a few long ones do not move the median."""
    if not worker.steps:
        return None
    if worker.split_ms is not None:
        return worker.steps * worker.split_ms.step * 1e-3
    return worker.steps * worker.step_ms.median * 1e-3 if worker.step_ms else None


def _told_s(cell: Measured) -> float | None:
    try:
        return msgspec.json.decode(cell.told, type=_Seconds).seconds
    except msgspec.MsgspecError:
        return None  # a shape of the script's own


def _client_share(cell: Measured) -> float | None:
    try:
        parts = msgspec.json.decode(cell.told, type=_Client).client_us
    except msgspec.MsgspecError:
        return None  # a shape of the script's own
    whole = sum(parts.values())
    return 1 - parts[WAIT] / whole if whole > 0 and WAIT in parts else None


def _worker(
    cell: Measured, worker: cells.Worker, trained: float | None, slow: Mapping[str, float], has_cores: bool
) -> WorkerFacts:
    name = f"worker:{worker.index}"
    median = worker.step_ms.median if worker.step_ms else None
    used = cell.task(name) if has_cores else None
    split = worker.split_ms
    return WorkerFacts(
        name=name,
        step_ms=1e3 * trained / worker.steps if _told_s(cell) and trained and worker.steps else median,
        wait_share=min(1.0, worker.waited_s / trained) if trained else None,
        cores=used.cpu_cores if used else None,
        split=Split()
        if split is None
        else Split(
            data_ms=split.data, compute_ms=split.compute, exchange_ms=split.exchange, wait_ms=split.wait
        ),
        slowed_times=slow.get(name),
    )  # fmt: skip


def _ps(cell: Measured, ps: cells.Ps, trained: float | None, has_cores: bool) -> PsFacts:
    name = f"ps:{ps.index}"
    # With one worker on its host it may look for the next push, on a core that nobody needs: that is no work.
    looks = len(cell.workers) == 1 and any(pair.ps == name and pair.lane == "shm" for pair in cell.pairs)
    used = cell.task(name) if has_cores and not looks else None
    busy = ps.apply_ms * 1e-3 * ps.updates / trained if ps.apply_ms is not None and trained else None
    return PsFacts(
        name=name, busy_share=None if busy is None else min(1.0, busy), cores=used.cpu_cores if used else None
    )


def _link_share(result: Result, cell: Measured, trained: float | None) -> float | None:
    """Of tcp on one host, where the same result has a raw socket: all pairs share it. Of other lanes nobody knows what
    they carry; of a cable between hosts only where it was limited (lab/results/cables)."""
    pairs, speed = cell.pairs, socket_speed(result)
    if not pairs or not trained or any(pair.lane != "tcp" for pair in pairs) or "--hosts" in cell.command:
        return None
    return sum(pair.pushed_bytes + pair.pulled_bytes for pair in pairs) / trained / speed if speed else None


def socket_speed(result: Result) -> float | None:
    """Bytes a second on loopback, there and back together, as measured beside; None: nobody looked."""
    for scenario, load_bytes in LOADS.items():
        size = load_bytes or result.origin.settings.get("carrier_bytes")
        times = [max(each.us) for each in result.segments if each.scenario == scenario and each.us]
        if times and isinstance(size, int):
            return 2 * size / (quantile(times, 0.25) * 1e-6)
    return None


# --- rows -------------------------------------------------------------------------------------------------------------


def parts_of(segments: Sequence[Segment], scenario: str) -> tuple[float, Mapping[str, float]] | None:
    """The time of a scenario's step and its parts: of the segment at the lower quartile; None where none has parts."""
    mine = sorted((each for each in segments if each.scenario == scenario and each.us and each.parts), key=_us)
    if not mine:
        return None
    chosen = mine[(len(mine) - 1) // 4]
    return _us(chosen), chosen.parts


def _us(segment: Segment) -> float:
    return max(segment.us or [0.0])


def row_words(result: Result, row: Line) -> str:
    """What a row says of its cost, against the noise; and where its step goes, if that was measured."""
    if row.is_noise:
        return f"The same against the same: {row.ratio:.2f} where 1 is right, {row.spread:.2f} between the quartiles."
    noise = max(result.noise or 0.0, row.spread)
    off, beside = row.ratio - 1, row.beside or "what it is measured beside"
    if abs(off) <= noise:
        told = [f"No difference from {beside} that is larger than the noise ({100 * noise:.0f} %)"]
    else:
        more = "more" if off > 0 else "less"
        cost = f"A step takes {100 * abs(off):.0f} % {more} than that of {beside} ({row.us - row.beside_us:+.0f} µs)"
        told = [cost, _parts_words(result, row)]
    return ". ".join(filter(None, told)) + "."


def _parts_words(result: Result, row: Line) -> str:
    found = parts_of(result.segments, row.scenario) if row.scenario else None
    if found is None:
        return ""
    us, parts = found
    if us <= 0 or WAIT not in parts:
        largest = max(parts, key=lambda name: parts[name])
        return f"The largest part of a step is {largest}: {parts[largest]:.0f} of {us:.0f} µs"
    own = 1 - parts[WAIT] / us
    if own >= FEEDS:
        return f"The client limits: it is busy {100 * own:.0f} % of a step, so a further worker would wait for it"
    return f"The workers limit: the client waits {100 * (1 - own):.0f} % of a step, so a further worker would pay"
