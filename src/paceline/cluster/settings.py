"""HOW shall this run behave? The resolved flags of one run, the same in every task; written to config.json.

Made at the edge (cli, launch, discovery), read everywhere, changed nowhere. Holds no secret.
"""

import msgspec

from paceline.modes.spec import ModeSpec, outer_momentum, parse_grace

PACELINE, TF = LOG_STYLES = ("paceline", "tf")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One run's choices.

    >>> Settings(run_id="r1").mode
    'async'
    """

    run_id: str
    run_dir: str | None = None
    plain: bool = False  # the program does not use paceline: it gets flags and TF_CONFIG, and trains by itself
    mode: str = "async"
    replicas_to_aggregate: int | None = None
    extra_tokens: int | None = None
    grace_ms: str = "0"  # milliseconds, or a share of the round's time: "20%"
    staleness: int | None = None
    local_steps: int | None = None
    outer: str | None = None  # sync or async
    outer_lr: float = 0.7
    outer_momentum: float | None = None  # None: 0.9, and 0 with outer async, where momentum is made of old deltas
    staleness_scale: bool = False
    ema: float | None = None  # decay of the averaged parameters that the ps keep
    wire: str = "float32"  # gradients travel in this, if it is narrower than their own
    master: str = "float32"  # half-precision parameters are kept in this on the ps; "model": in their own
    overlap: bool = False  # gradients are sent while backward runs
    min_workers: int = 1  # below it training pauses
    started_workers: int | None = None  # of an elastic cluster: how many the launcher starts; the rest may join
    ledger: bool = False  # every task writes down what happens to gradients, for `paceline verify`
    slow: str = ""  # worker:1=5x: that worker sleeps as if it were five times slower
    placement: str = "bytes"
    lane: str = "auto"
    data: str = "shard"
    seed: int | None = None  # of the scripts' random numbers; each worker gets one of its own, derived from it
    log_every: int = 0  # 0: a few lines a second; N: every N-th step
    log_style: str = PACELINE  # whose words the printed lines have; tf: those of TensorFlow 1's programs
    log_device_placement: bool = False
    worker_device: str = ""  # /gpu:0,/gpu:1 in turn, or /job:worker/task:1/cpu:0; "": a share of the host's cards
    ps_device: str = ""  # a /gpu:i leaves the cards visible to the ps
    virtual_gpus: int = 0  # so many /gpu:i on the cards there are; marked in every table
    soft_placement: bool = True  # a missing GPU becomes the CPU
    allow_growth: bool = True  # GPU memory is taken as it is needed, else all of the share at once
    gpu_memory_fraction: float | None = None  # of a card's memory, for each worker
    save_every: str = "10m"  # "none" also leaves out the final checkpoint
    buffers: str = "mean"  # of several workers' running statistics, in model.safetensors and exports; or the "chief"'s
    keep: int = 3  # checkpoints that stay; the newest ones
    resume: str = "none"  # auto: from the newest complete checkpoint of the run folder, if any; or a path
    reseed: bool = False  # a ps that lost its memory gets the freshest worker's parameters, not a checkpoint's
    max_restarts: int = 3  # of one task
    lease_s: float = 5.0  # silence after which a worker is out
    stall_s: float | None = None  # heartbeat without progress; None: max(300, 20 median steps), 0: for ever
    wait_s: float = 300.0  # how long a task waits for the others before it gives up
    tls: bool = False  # tcp between tasks is encrypted
    insecure: bool = False  # no secret at all, on any address
    chaos: str = ""  # faults to inject: kill=ps:0@500,stop=worker:1@200:10s
    chaos_seed: int = 0

    @property
    def resolved_outer_momentum(self) -> float:
        """The outer momentum at the start."""
        return outer_momentum(self.outer_momentum, self.mode_spec.outer)

    @property
    def mode_spec(self) -> ModeSpec:
        """The mode with its numbers."""
        plain = ModeSpec()
        grace_ms, grace_share = parse_grace(self.grace_ms)
        return ModeSpec(
            name=self.mode,
            replicas_to_aggregate=self.replicas_to_aggregate,
            extra_tokens=self.extra_tokens,
            grace_ms=grace_ms,
            grace_share=grace_share,
            staleness=plain.staleness if self.staleness is None else self.staleness,
            local_steps=plain.local_steps if self.local_steps is None else self.local_steps,
            outer=self.outer or plain.outer,
            staleness_scale=self.staleness_scale,
        )
