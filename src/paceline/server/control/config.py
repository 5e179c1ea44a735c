"""The settings of one ps, which the launcher makes."""

from dataclasses import dataclass, field

from paceline.modes.base import Mode


@dataclass(frozen=True, slots=True)
class PsConfig:
    """The settings of one ps; they never change."""

    index: int
    num_ps: int
    num_workers: int
    run_id: str
    mode: Mode
    placement: str
    lease_s: float
    expected: int | None = None  # workers that must come before training starts; None: all
    min_workers: int = 1
    ema: float | None = None
    wire: str = "float32"
    master: str = "float32"
    save_every: str = "none"
    stall_s: float | None = None  # None: the default of cluster/membership, 0: never
    rejoin_s: float = 15.0  # for so long a worker that did not close may come back, when no other one is in
    may_look: bool = True  # for the next push before it sleeps, where that is of use
    owns_process: bool = False  # else torch's threads are the user's own
    cluster: dict[str, list[str]] = field(default_factory=dict)  # jobs and addresses, for those who ask
