"""Time a worker's steps, epochs and waits, say when a step is due to be printed, and sum up when the worker ends.

Called by worker/step/training_step from the thread that trains, once a step.
Must never cost a microsecond a step, nor grow with the length of the run: only the newest are kept.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from time import perf_counter

from paceline.telemetry.records import SplitMs, StepMs, WorkerReport

NUM_FIRST = 100
LINES_PER_S = 3.0
KEEP_STEPS = 1 << 20  # 8 MiB of durations; beyond it the older half is let go


class StepClock:
    """A step lasts from the end of the one before it, or from the start of its epoch, to its own end.

    What it is made of is added where it happens, by the thread that trains: `data_s` by frameworks/torch/data,
    `exchange_s` by worker/step/training_step, without what was waited meanwhile, and `wait_s` by worker/requests/link
    and client. The rest is compute.

    >>> clock = StepClock()
    >>> clock.epoch()
    >>> clock.step(samples=32)
    >>> clock.report(index=0, ended_at_s=1.5).steps
    1
    """

    def __init__(self, print_step: Callable[[], None] | None = None, log_every: int = 0) -> None:
        self._print_step = print_step
        self._log_every = log_every  # steps; 0: a few lines a second
        self._next_line_s = 0.0
        self.batch_size = 0  # of the loader, 0 if it does not say: samples of a step whose caller says none
        self.earlier = 0  # steps of this worker's lives before this process, as far as they are known
        self._took = array("d")
        self._forgotten = 0
        self._first: list[float] = []
        self._train_s = 0.0
        self._samples = 0
        self._epoch_began: float | None = None
        self._epoch_first_step = 0
        self._epochs_s: list[float] = []
        self._waited_s = 0.0
        self._discarded = 0
        self._metrics: dict[str, float] = {}
        self.data_s = self.exchange_s = self.wait_s = 0.0
        self._data_s = self._exchange_s = self._wait_s = 0.0  # the same at the end of the last step
        self.pushing_since_s = 0.0  # when this step's push began, less `wait_s` then; 0: it has not
        self.last_s = perf_counter()  # where the step under way began

    @property
    def steps(self) -> int:
        """How many steps this process has done so far."""
        return self._forgotten + len(self._took)

    def step(self, samples: int | None = None) -> None:
        """Count a step that ends now, over so many samples; print it if that is due."""
        now = perf_counter()
        took = now - self.last_s
        self.last_s = now
        self._took.append(took)
        self._train_s += took  # before its parts: whoever reads them meanwhile never sees more parts than whole
        if self.pushing_since_s:
            self.exchange_s += now - self.wait_s - self.pushing_since_s
            self.pushing_since_s = 0.0
        self._data_s = self.data_s
        self._exchange_s = self.exchange_s
        self._wait_s = self.wait_s
        self._samples += self.batch_size if samples is None else samples
        if len(self._took) >= KEEP_STEPS:
            self._forget_older_half()
        if self._print_step is None:
            return
        every, steps = self._log_every, self.earlier + self._forgotten + len(self._took)
        if steps % every == 0 if every else now >= self._next_line_s:
            self._next_line_s = now + 1 / LINES_PER_S
            self._print_step()

    def epoch(self) -> None:
        """An epoch starts now; what lay between it and the last step (an evaluation, say) is no step."""
        self._end_epoch()
        self._begin_step()
        self._epoch_began = self.last_s
        self._epoch_first_step = self.steps

    def waited(self, seconds: float) -> None:
        """So long the worker has just waited for others before it could train."""
        self._waited_s += seconds
        self._begin_step()

    def discarded(self, count: int = 1) -> None:
        """The ps did not let this many gradients count."""
        self._discarded += count

    def metrics(self, values: Mapping[str, float]) -> None:
        """Remember the newest value of each name."""
        self._metrics.update(values)

    def split_ms(self) -> SplitMs | None:
        """Where the mean step of this process went; None before the first. Any thread may ask."""
        data_s, exchange_s, wait_s = self._data_s, self._exchange_s, self._wait_s
        steps, train_s = self.steps, self._train_s
        if not steps:
            return None
        ms = 1e3 / steps
        compute_s = train_s - data_s - exchange_s - wait_s
        return SplitMs(data_s * ms if data_s else None, compute_s * ms, exchange_s * ms, wait_s * ms)

    def report(self, index: int, ended_at_s: float) -> WorkerReport:
        """Sum up; the epoch under way ends with its last step. Times are of this process, steps of all lives."""
        self._end_epoch()
        first = self._first_steps()
        later = self._epochs_s[1:] or self._epochs_s
        return WorkerReport(
            index=index,
            steps=self.earlier + self.steps,
            discarded=self._discarded,
            step_ms=_step_ms(self._took),
            split_ms=self.split_ms(),
            first_100_steps_ms=1e3 * sum(first) / len(first) if first else None,
            waited_at_start_s=self._waited_s,
            first_epoch_s=self._epochs_s[0] if self._epochs_s else None,
            epoch_s=sum(later) / len(later) if later else None,
            samples_per_s=self._samples / self._train_s if self._samples and self._train_s > 0 else None,
            ended_at_s=ended_at_s,
            metrics=dict(self._metrics),
        )

    def _begin_step(self) -> None:
        """The step under way begins only now: what came before is no part of it."""
        self.data_s, self.exchange_s, self.wait_s = self._data_s, self._exchange_s, self._wait_s
        self.pushing_since_s = 0.0
        self.last_s = perf_counter()

    def _end_epoch(self) -> None:
        if self._epoch_began is not None and self.steps > self._epoch_first_step:
            self._epochs_s.append(self.last_s - self._epoch_began)
        self._epoch_began = None

    def _first_steps(self) -> Sequence[float]:
        return self._first or self._took[:NUM_FIRST]

    def _forget_older_half(self) -> None:
        if not self._first:
            self._first = list(self._took[:NUM_FIRST])
        half = len(self._took) // 2
        del self._took[:half]
        self._forgotten += half


def _step_ms(took_s: Sequence[float]) -> StepMs | None:
    if not took_s:
        return None
    ordered = sorted(took_s)
    return StepMs(median=1e3 * _at(ordered, 0.5), p95=1e3 * _at(ordered, 0.95))


def _at(ordered: Sequence[float], fraction: float) -> float:
    """Nearest rank: the smallest value that `fraction` of all values do not exceed."""
    return ordered[ceil(fraction * len(ordered)) - 1]
