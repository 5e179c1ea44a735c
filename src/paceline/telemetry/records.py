"""WHAT does a record say? The shapes of the records that others read back, each a small frozen value.

Made by `steps` and by the ps service, written by `sink`, read by `read`, put together by `summary`.
Must never hold anything but plain numbers and text: a record is JSON, and outlives the code that wrote it.
"""

from collections.abc import Mapping

import msgspec

from paceline.telemetry.usage import TaskUse

# JSON has no word for a value that is not finite: a loss of NaN is written as null and read back as None.
Metrics = Mapping[str, float | None]
SERVES, RUNS = "serves", "runs"  # phases of a worker that trains nothing: it runs ops for others, or calls them
OVER = "over"  # the kind of the launcher's last record about a worker: it has ended for good
Histograms = dict[str, dict[str, int]]  # worker index -> staleness -> how many pushes


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a telemetry file."""

    t: float
    kind: str
    task: str
    fields: dict[str, object] = {}


class SplitMs(msgspec.Struct, frozen=True):
    """Where the mean step of a worker went, in milliseconds; its parts add up to the step."""

    data: float | None  # in next() of a prepared loader; None: the script has its data from elsewhere
    compute: float  # all the rest
    exchange: float  # push and pull: looked at, copied, sent, received
    wait: float  # for a ps to answer, whatever it waits for

    @property
    def step(self) -> float:
        return (self.data or 0.0) + self.compute + self.exchange + self.wait


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """How one task stands at second `t`; the first group of fields is a worker's, the second a ps's."""

    t: float = 0.0
    task: str = ""
    global_step: int = 0

    step: int = 0
    steps_per_s: float = 0.0
    metrics: Metrics = {}
    phase: str = ""
    device: str = ""  # /gpu:1 (virtual), say
    split_ms: SplitMs | None = None  # since it began to train

    version: int = 0
    updates_per_s: float = 0.0
    workers: int = 0
    mode: str = ""
    lacks: int = 0  # so many more workers are needed before training goes on
    staleness_mean: float | None = None
    staleness: Histograms = {}  # since the start, without the rare ones told apart
    waited_s: dict[str, float] = {}

    cores: float | None = None  # since the tick before
    rss_bytes: int = 0
    is_seen: bool = False  # from outside, by the launcher (--plain): the task tells nothing itself


class StepMs(msgspec.Struct, frozen=True):
    """How long a step took, in milliseconds."""

    median: float
    p95: float


class PairBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker and one ps gave each other: tensors (gradients, parameters; the chief's first values), and
    beside it all bytes of their connection as the kernel counted them (TCP_INFO; None: not tcp, or not Linux)."""

    worker: str
    ps: str
    lane: str
    pushed_bytes: int = 0
    pulled_bytes: int = 0
    tcp_sent_bytes: int | None = None
    tcp_received_bytes: int | None = None


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker did, told by itself when it ended; None where it did too little to say.

    `index` is the worker index (the chief is 0). `steps` are those of all its lives, also before a resume; times are of
    its last one. `is_lost`: it never reported; told from its last tick.
    """

    index: int
    task: str = ""
    steps: int = 0
    discarded: int = 0
    step_ms: StepMs | None = None
    split_ms: SplitMs | None = None
    first_100_steps_ms: float | None = None  # mean of the first 100 steps, or of those there are
    waited_at_start_s: float = 0.0
    first_epoch_s: float | None = None
    epoch_s: float | None = None  # mean of the epochs after the first; with one epoch, that one
    samples_per_s: float | None = None
    ended_at_s: float | None = None
    device: str = ""  # what it trained on: /cpu:0, or /gpu:1 (virtual)
    metrics: Metrics = {}
    is_lost: bool = msgspec.field(default=False, name="lost")
    ops: str = ""  # SERVES or RUNS: what it did where it trained nothing
    use: TaskUse | None = None
    pairs: list[PairBytes] = []


class ModeChange(msgspec.Struct, frozen=True, kw_only=True):
    """From global step `at_step` on this mode held; `pause_ms`: how long the first worker stood still for it."""

    at_step: int
    mode: str
    pause_ms: float | None = None


class PsReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one ps did, told by itself when it ended; keys of what is told for each worker are worker indices."""

    index: int
    updates: int = 0
    apply_ms: float | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    staleness: Histograms = {}
    pushes: dict[str, int] = {}  # the last push that was dealt with
    steps: dict[str, int] = {}  # of the whole run, over all lives
    waited_s: dict[str, float] = {}  # how long this ps made it wait for others
    discarded: dict[str, int] = {}
    not_finite: dict[str, int] = {}
    modes: list[ModeChange] = []
    use: TaskUse | None = None
    global_step: int = 0
    is_lost: bool = msgspec.field(default=False, name="lost")
