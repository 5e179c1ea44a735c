"""WHICH cluster, and what happens to it? One frozen value, and the modes that it may be in.

Made by the tests, read by all other sim files.
"""

from dataclasses import dataclass

from sim_ps import SimService
from sim_worker import Worker

from paceline.errors import UsageError
from paceline.modes.spec import ModeSpec, check
from paceline.server.control.state import ShardState

GRACE_MS = 2_000.0  # messages take about a second here


def of_n(count: int, **numbers: float) -> ModeSpec:
    return ModeSpec(name="sync", replicas_to_aggregate=count, **numbers)  # type: ignore[arg-type]


def bounded(staleness: int, **numbers: bool) -> ModeSpec:
    return ModeSpec(name="bounded", staleness=staleness, **numbers)


def local(outer: str = "sync", count: int | None = None, local_steps: int = 10) -> ModeSpec:
    return ModeSpec(name="local", outer=outer, replicas_to_aggregate=count, local_steps=local_steps)


ASYNC, SYNC = ModeSpec(), ModeSpec(name="sync")
MODES: dict[str, tuple[ModeSpec, ...]] = {
    "async": (ASYNC, ModeSpec(staleness_scale=True)),
    "sync": (SYNC,),
    "k of n": (of_n(1), of_n(2), of_n(3)),
    "more than n": (of_n(3), of_n(5), of_n(2, extra_tokens=1), of_n(3, extra_tokens=2)),
    "grace": (of_n(1, grace_ms=GRACE_MS), of_n(2, grace_share=0.3), of_n(2, extra_tokens=1, grace_ms=GRACE_MS)),
    "bounded": (bounded(0), bounded(1), bounded(3, staleness_scale=True)),
    "local": (local(), local("async"), local("sync", 2)),
}
OTHERS = (ASYNC, SYNC, of_n(1), of_n(2), of_n(4), of_n(2, grace_ms=GRACE_MS), bounded(0), bounded(2))
LOCAL_OTHERS = (local(), local("async"), local("sync", 2), local("sync", 4), local(local_steps=5))


def fits(spec: ModeSpec, num_workers: int) -> bool:
    """Whether so many workers can train in this mode."""
    try:
        check(spec, num_workers)
    except UsageError:
        return False
    return True


@dataclass(frozen=True)
class Plan:
    """One cluster and what happens to it; rates are per run or per step."""

    num_ps: int = 2
    num_workers: int = 3
    mode: str | ModeSpec = "sync"  # async, sync, the K of k of n, or any other one in full
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
    switches: int = 0
    ps_restarts: int = 0
    rebirths: int = 0  # a ps dies, and another one is made of what it had written down
    losses: int = 0  # a ps loses its memory with its host
    saves: int = 0  # one in so many updates is saved
    optional: int = 0  # the last so many workers join late, or never
    min_workers: int = 1
    span: float = 60.0  # disasters happen within so many seconds; a run takes one to five minutes
    state: type = ShardState
    worker: type = Worker
    service: type = SimService

    def parts(self) -> tuple[type, ...]:
        """The classes that a wrong version replaces."""
        return self.state, self.worker, self.service

    @property
    def expected(self) -> int:
        return max(1, self.num_workers - self.optional)

    @property
    def spec(self) -> ModeSpec:
        if isinstance(self.mode, ModeSpec):
            return self.mode
        return {"async": ASYNC, "sync": SYNC}[self.mode] if not self.mode.isdigit() else of_n(int(self.mode))

    @property
    def other_modes(self) -> list[ModeSpec]:
        """Where a run in this mode may be switched to."""
        others = LOCAL_OTHERS if self.spec.name == "local" else OTHERS
        return [spec for spec in others if fits(spec, self.num_workers)]

    @property
    def is_calm(self) -> bool:
        """Whether nobody leaves before it is done."""
        return not (self.deaths or self.evictions or self.zombies or self.losses or (self.cuts and not self.retries))

    def steps_of(self, worker: int) -> int:
        """Workers end at different times."""
        return self.steps + worker % 3
