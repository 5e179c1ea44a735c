"""HOW shall this run behave? The resolved flags of one run, the same in every task; written to config.json.

Made at the edge (cli, launch, discovery), read everywhere, changed nowhere. Holds no secret.
"""

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One run's choices.

    >>> Settings(run_id="r1").mode
    'async'
    """

    run_id: str
    run_dir: str | None = None
    mode: str = "async"
    replicas_to_aggregate: int | None = None
    placement: str = "bytes"
    lane: str = "auto"
    data: str = "shard"
    log_every: int = 0  # 0: a few lines a second; N: every N-th step
    log_device_placement: bool = False
    save_every: str = "10m"  # "none" also leaves out the final checkpoint
    lease_s: float = 5.0
    wait_s: float = 300.0  # how long a task waits for the others before it gives up
