"""Write what a worker records of its run: printed lines, a record a second, metrics, and its report at the end.

Used by worker/session, one a task. Must never wait: what cannot be written is dropped and counted (telemetry/sink).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from paceline.cluster.discovery import Assignment
from paceline.cluster.settings import PACELINE
from paceline.telemetry import lines
from paceline.telemetry.meter import Meter
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.records import PairBytes, WorkerReport
from paceline.telemetry.sink import Sink
from paceline.telemetry.steps import StepClock
from paceline.telemetry.summaries import EventWriter
from paceline.transport.channel import Counts

if TYPE_CHECKING:
    from paceline.worker.step.training_step import TrainingStep


class Reporter:
    """The one writer of a worker's lines, records and metrics."""

    def __init__(
        self, assignment: Assignment | None, say: Callable[[str], None], is_chief: bool, worker: int = 0
    ) -> None:
        self._say = say
        self._worker = worker
        self._task = str(assignment.task) if assignment else ""
        self._style = assignment.settings.log_style if assignment else PACELINE
        self._training_step: TrainingStep | None = None  # once training begins
        self._printed_step = 0  # the last step that had a line
        self._device = ""
        self._metrics: dict[str, float] = {}
        self._stop = threading.Event()
        self._began_s = time.monotonic()
        self._trained_from_s = 0.0
        self.clock = StepClock(self._print_step, assignment.settings.log_every if assignment else 0)
        self._meter: Meter | None = None
        self._ticked_s = 0.0  # processor time of the thread that ticks
        run_dir = assignment.settings.run_dir if assignment else None
        paths = RunPaths(run_dir) if run_dir else None
        self.sink = Sink(paths.telemetry(assignment.task) if paths and assignment else None)
        self._events: EventWriter | None = None
        self._events_of = paths.root if paths and is_chief else None
        if assignment is not None:
            self.sink.event("start", task=self._task, incarnation=assignment.incarnation)

    def stand_by(self) -> None:
        """Open TensorBoard's events before this worker joins, so that no other waits for that import. The package that
        writes them looks for the framework, which is imported by now."""
        if self._events is None and self._events_of is not None:
            self._events = EventWriter(self._events_of)

    def begin(self, training_step: "TrainingStep", waited_s: float, device: str = "") -> None:
        """Begin to record: training begins now, on this device."""
        self._training_step, self._device = training_step, device
        self._trained_from_s = time.time()
        self.clock.earlier = training_step.steps  # of an earlier life, or of the run that is resumed
        self.clock.waited(waited_s)
        self._say(lines.begins_line(self._trained_from_s))
        if self._task and threading.current_thread() is threading.main_thread():  # else it shares its process
            self._meter = Meter(self._task, is_on_card="gpu" in device)
            self._meter.look()
        threading.Thread(target=self._tick, args=(training_step,), name="telemetry", daemon=True).start()

    def last_step(self) -> None:
        """Print the line of this worker's last step, if it has had none."""
        if self._training_step is not None and self.clock.steps and self._printed_step != self._training_step.steps:
            self._print_step()

    def _print_step(self) -> None:
        """Print the line of this step; the clock calls it after every `--log-every`th, or a few times a second."""
        if self._training_step is not None:
            step, newest = self._training_step.steps, self._training_step.newest_step()
            self._printed_step = step
            self._say(lines.step_line(time.time(), self._worker, step, newest, self._style))

    def log(self, values: Mapping[str, float]) -> None:
        """Keep the newest values of the script's own metrics; the chief also writes TensorBoard summaries."""
        numbers = {name: float(value) for name, value in values.items()}
        self._metrics.update(numbers)
        self.clock.metrics(numbers)
        if self._events is not None and self._training_step is not None:
            self._events.scalars(numbers, self._training_step.newest_step())

    def end(self, training_step: "TrainingStep", counts: Sequence[tuple[str, Counts]] = ()) -> WorkerReport:
        """Print the last lines, write the last record, and return the report. `counts`: what went to each ps, in their
        order, and on which lane."""
        self.last_step()
        ended_s = time.time()
        took_s = ended_s - self._trained_from_s
        self._say(lines.ends_line(ended_s))
        self._say(lines.elapsed_line(took_s, self._style))
        self._record(training_step, (training_step.steps - self.clock.earlier) / max(took_s, 1e-9))
        self.clock.discarded(training_step.discarded)
        report = self.clock.report(self._worker, time.monotonic() - self._began_s)
        use = self._meter.use(self._ticked_s + self.sink.cpu_s) if self._meter is not None else None
        pairs = [pair(self._task, index, *each) for index, each in enumerate(counts)]
        report = msgspec.structs.replace(report, device=self._device, use=use, pairs=pairs)
        self.sink.event("report", task=self._task, report=msgspec.to_builtins(report))
        return report

    def stop(self) -> None:
        """End the thread that writes records."""
        self._stop.set()

    def close(self) -> None:
        self.stop()
        if self._events is not None:
            self._events.close()
        self.sink.close()

    def _tick(self, training_step: "TrainingStep") -> None:
        steps, at_s = self.clock.earlier, time.monotonic()
        while not self._stop.wait(1.0):
            now_steps, now_s = training_step.steps, time.monotonic()
            if self._meter is not None:
                self._meter.look()
            self._record(training_step, (now_steps - steps) / (now_s - at_s))
            steps, at_s = now_steps, now_s
            self._ticked_s = time.thread_time()

    def _record(self, training_step: "TrainingStep", steps_per_s: float) -> None:
        self.sink.tick(
            task=self._task,
            step=training_step.steps,
            global_step=training_step.newest_step(),
            steps_per_s=round(steps_per_s, 2),
            metrics=dict(self._metrics),
            phase="train",
            device=self._device,
            split_ms=self.clock.split_ms(),
            **(self._meter.told() if self._meter is not None else {}),
        )


def pair(worker: str, ps: int, lane: str, counts: Counts) -> PairBytes:
    """Return what one worker and one ps have exchanged, for the summary."""
    return PairBytes(
        worker=worker,
        ps=f"ps:{ps}",
        lane=lane,
        pushed_bytes=counts.sent,
        pulled_bytes=counts.received,
        tcp_sent_bytes=counts.tcp_sent,
        tcp_received_bytes=counts.tcp_received,
    )
