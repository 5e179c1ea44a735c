"""WHAT is known of a cell that says what limits it? Times, cores, bytes; None where nobody measured.

Filled by lab/facts, judged by lab/limits. Pure. Must never hold a guess.
"""

import msgspec


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker's step goes, in milliseconds; None: not measured."""

    data_ms: float | None = None
    compute_ms: float | None = None
    exchange_ms: float | None = None  # push and pull
    wait_ms: float | None = None  # for others

    @property
    def is_known(self) -> bool:
        return None not in (self.data_ms, self.compute_ms, self.exchange_ms)


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
    mode: str = "async"
    machine_cores: int | None = None
    link_share: float | None = None  # of what the lane carries, of the fullest pair
    lane: str = ""
    staleness: float | None = None
    start_share: float | None = None  # of the run's time that no worker trained

    @property
    def shares(self) -> dict[str, float] | None:
        """The parts of a step over all workers that were not slowed on purpose; None when any of them is not known."""
        splits = [worker.split for worker in self.workers if not worker.slowed_times]
        if not splits or not all(split.is_known for split in splits):
            return None
        parts = {
            "compute": sum(split.compute_ms or 0.0 for split in splits),
            "data": sum(split.data_ms or 0.0 for split in splits),
            "push and pull": sum(split.exchange_ms or 0.0 for split in splits),
            "wait": sum(split.wait_ms or 0.0 for split in splits),
        }
        whole = sum(parts.values())
        return {name: value / whole for name, value in parts.items()} if whole > 0 else None

    @property
    def used_cores(self) -> float | None:
        """Of all tasks together; None when any of them is not known."""
        cores = [worker.cores for worker in self.workers] + [ps.cores for ps in self.ps]
        known = [value for value in cores if value is not None]
        return sum(known) if known and len(known) == len(cores) else None
