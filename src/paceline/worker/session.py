"""Hold one task's part in its run: what prepare, the training step, the data and the end of a worker share.

Made by launchers/task, one a task. The script sees worker/context, which stands in front of it; frameworks, launchers
and the other modules of worker/ talk to the session. Without a cluster it has neither an assignment nor a training
step.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline import forks
from paceline.checkpoint.loop import Loop
from paceline.checkpoint.read import Loaded, load_newest
from paceline.checkpoint.request import AUTO, NONE, requested
from paceline.checkpoint.room import other_places
from paceline.cluster.discovery import Assignment, visible_cards
from paceline.cluster.moved import Whereabouts
from paceline.errors import ConnectionLost, PacelineError, UsageError
from paceline.params.placement import table
from paceline.telemetry.paths import RunPaths
from paceline.wire import messages as m
from paceline.worker import ending
from paceline.worker.checkpoints.rewinding import Rewinder
from paceline.worker.checkpoints.saver import Saver
from paceline.worker.evaluator import Evaluator
from paceline.worker.framework import torch_module
from paceline.worker.positions.position import Progress
from paceline.worker.positions.repeated_loop import RepeatedLoop
from paceline.worker.reporting import Reporter
from paceline.worker.requests.identity import Identity
from paceline.worker.script import check_owner, script_line
from paceline.worker.step import injection, slowness
from paceline.worker.step.training_step import TrainingStep


class WorkerSession:
    """One task's part in its run."""

    def __init__(self, assignment: Assignment | None, say: Callable[[str], None]) -> None:
        self.owner = forks.Owner()
        self.assignment = assignment
        self.say = say
        self.job = assignment.task.job if assignment else "worker"
        self.task_index = assignment.task.index if assignment else 0
        is_worker = assignment is not None and self.job != "evaluator"
        self.worker_index = assignment.cluster.worker_index(assignment.task) if assignment and is_worker else 0
        self.is_chief = self.worker_index == 0 and self.job != "evaluator"
        self.num_workers = len(assignment.cluster.workers) if assignment else 1
        self.is_elastic = assignment is not None and assignment.settings.started_workers is not None  # some may join
        self.training_step: TrainingStep | None = None  # once prepare has joined
        self.evaluator: Evaluator | None = None
        self.progress = Progress(self.worker_index, self)
        self.reporter = Reporter(assignment, say, self.is_chief, self.worker_index)
        self.clock = self.reporter.clock  # what this worker's steps and epochs take
        self.injection = injection.of(assignment) if assignment else None
        self.saver: Saver | None = None  # once this worker saves
        self.training_loader: Any = None  # whose batches are the samples of a push
        self.own_weight: float | None = None  # samples of a push, as ctx.weight() says
        self.seed = 0  # of the data's order
        self.started_at = 0  # the global step at which this worker joined
        self.is_assigning = False
        self.is_again = False  # an earlier start of this worker has trained in this run
        self.resumed_from: Path | None = None
        self.not_saved = ""  # why the last checkpoint was not
        self.alone_step = 0  # steps done without a cluster, where the optimizer does not count them itself
        self._count_alone: Callable[[], int] | None = None
        self._pin: Any = None
        self._rewinder: Rewinder | None = None
        self._repeated: RepeatedLoop | None = None
        self._place = self.worker_index, self.num_workers
        self._sent_carried = 0
        self._is_closed = False
        self._began_in: Path | None = None  # a script may go to another folder
        with suppress(OSError):
            self._began_in = Path.cwd()

    # --- who and where ----------------------------------------------------------------------------------------

    def identity(self) -> Identity:
        """Return what a client needs to know of this worker."""
        assignment = self.require_cluster()
        cluster, settings = assignment.cluster, assignment.settings
        paths = self.paths
        return Identity(
            job=self.job,
            worker=self.worker_index,
            incarnation=assignment.incarnation,
            run_id=settings.run_id,
            is_chief=self.is_chief,
            spec=settings.mode_spec,
            ps_addresses=Whereabouts(cluster, settings.run_dir),
            worker_devices=tuple(t.device for t in cluster.workers),
            placement=settings.placement,
            lane=settings.lane,
            wire=settings.wire,
            overlaps=settings.overlap and settings.mode != "local",
            secret=assignment.secret,
            lease_s=settings.lease_s,
            wait_s=settings.wait_s,
            log_style=settings.log_style,
            trouble=self.injection.trouble if self.injection is not None else None,
            ledger=paths.ledger(assignment.task) if settings.ledger and paths is not None else None,
        )

    def require_cluster(self) -> Assignment:
        """Return the assignment; PacelineError without a cluster."""
        if self.assignment is None:
            raise PacelineError("there is no cluster here: this process trains alone")
        return self.assignment

    @property
    def paths(self) -> RunPaths | None:
        """The run folder; None without one."""
        if self.assignment is None or self.assignment.settings.run_dir is None:
            return None
        return RunPaths(self.assignment.settings.run_dir)

    def pin(self) -> Any:
        """Return this task's own device, chosen once: by init where torch is imported already."""
        if self._pin is None:
            self._pin = torch_module("devices").pin(self.assignment, self.say, visible_cards())
        return self._pin

    def place(self) -> tuple[int, int]:
        """Return which worker of how many this is among those that train now: its share of the data."""
        if not self.is_elastic:
            return self.worker_index, self.num_workers
        if not self.owner.is_here:
            return self._place
        live = self.training_step.client.status().live if self.training_step is not None else []
        if self.worker_index in live:  # else: ps:0 did not answer in time
            self._place = live.index(self.worker_index), len(live)
        return self._place

    def check_owner(self, what: str) -> None:
        """Refuse in a forked child what only its parent can do; without a cluster there is nothing to refuse."""
        if self.assignment is not None:
            check_owner(self.owner, what)

    # --- preparing --------------------------------------------------------------------------------------------

    def count_alone(self, steps: Callable[[], int]) -> None:
        """Without a cluster, take the number of steps from the optimizer, which counts them itself."""
        self._count_alone = steps

    def steps_alone(self) -> int:
        """Return the steps done without a cluster."""
        return self.alone_step if self._count_alone is None else self._count_alone()

    def recovery(self, training_step: TrainingStep) -> Rewinder:
        """Make what helps a ps that has lost its memory."""
        find, event = self._newest_checkpoint, self.reporter.sink.event
        is_reseeding = self.require_cluster().settings.reseed
        self._rewinder = Rewinder(self.identity(), training_step, find, is_reseeding, self.say, event)
        return self._rewinder

    def _newest_checkpoint(self) -> Loaded | None:
        """Load the newest checkpoint of this run; before it has one, what it was resumed from."""
        paths, resume = self.paths, self.require_cluster().settings.resume
        newest = load_newest(paths.checkpoints, self.say) if paths is not None else None
        if newest is None and resume not in (AUTO, NONE):
            return requested(resume, None, self.say)
        return newest

    def begin(self, training_step: TrainingStep, batch_size: int) -> None:
        """Begin to train: the cluster has started."""
        self.training_step = training_step
        self.clock.batch_size = batch_size
        assignment = self.require_cluster()
        if assignment.settings.log_device_placement:
            for line in self._placement(training_step):
                self.say(line)
        if self.is_chief and assignment.settings.run_dir is None:
            self.say("Nothing will be saved: start the chief with --run-dir to keep the model")
        training_step.slowness = slowness.of(assignment.settings.slow, assignment.task)
        if training_step.slowness is not None:
            self.say(f"Worker {self.worker_index} is {slowness.mark(training_step.slowness.factor)}")
        self._repeated = RepeatedLoop(self.worker_index, training_step, self.progress, self.is_again, self._warn)
        self._sent_carried = hash(training_step.carried_block()) if self.is_chief else 0
        if self._rewinder is not None:
            self._rewinder.has_trained = True
        self.reporter.begin(training_step, training_step.client.waited_s, training_step.device_name(self.pin))

    def _placement(self, training_step: TrainingStep) -> list[str]:
        """Return the lines of --log-device-placement: this task's devices, and of the chief where every variable is."""
        own = f"Worker {self.worker_index} computes on {training_step.device_name(self.pin)}"
        return [
            *training_step.mapping_lines(self.require_cluster().task),
            own,
            *(table(training_step.layout, training_step.plan) if self.is_chief else ()),
        ]

    def _warn(self, text: str) -> None:
        """Say it in the log and on the launcher's terminal."""
        self.say(f"paceline: {text}")
        self.reporter.sink.event("warning", task=str(self.require_cluster().task), text=text)

    # --- training ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Take the answer of the last push, unless this is a forked child."""
        if self.owner.is_here and self.training_step is not None:
            self.training_step.settle()

    def ask(self, request: m.Request) -> m.Reply:
        """Ask ps:0, with the last answer taken. A ticket of the mode before is none in the next one."""
        training_step = self.training_step
        assert training_step is not None
        training_step.settle()
        client = training_step.client
        turn = client.dial.turn
        reply: m.Reply = client.ask(request)
        training_step.has_ticket = training_step.has_ticket and client.dial.turn == turn
        return reply

    def refresh(self) -> None:
        """Take the newest parameters after a wait, whose time is no step's."""
        assert self.training_step is not None
        self.training_step.refresh()
        if self.training_step.slowness is not None:
            self.training_step.slowness.begin()

    def begin_pass(self, loader: Any) -> Any:
        """Begin a pass of a prepared loader. Return what counts the samples of its batches, if they count."""
        if self.training_step is None or loader is not self.training_loader or not self.owner.is_here:
            return None
        self.training_step.begin_loop()
        samples = self.training_step.samples
        if samples is not None:
            samples.begin_pass()
        return samples

    def takes(self, what: str) -> bool:
        """Tell whether what this worker loads with `what` goes to the ps: the chief's before the first step or inside
        assign(), and a single worker's at any time. Refuse it in the middle of a run with several workers."""
        self.check_owner(what)
        training_step = self.training_step
        is_first = training_step is None or not training_step.pushes
        if self.is_assigning or (is_first and self.started_at == 0):
            return self.is_chief
        if training_step is None or is_first:
            self.say(f"paceline: {what} has no effect: this run goes on from global step {self.started_at}")
            return False
        if not training_step.is_alone:
            raise UsageError(
                f"{what} in the middle of a run{script_line()}: the other workers would not see it. Call it on all "
                "workers inside `with ctx.assign():` (the chief's values count)"
            )
        return True

    # --- the position of this worker --------------------------------------------------------------------------

    def steps_done(self) -> int:
        """Return the steps of this worker, with those of earlier starts."""
        return self.training_step.steps if self.training_step is not None else 0

    def samples_done(self) -> float | None:
        """Return the samples in all of this worker's gradients; None if that is not known."""
        return self.training_step.samples_pushed if self.training_step is not None else 0.0

    def check_loop(self, loop: Loop) -> None:
        """Refuse or end a loop of the script that begins again where the run goes on."""
        if self._repeated is not None:
            self._repeated.check(loop, self.started_at)

    def beat(self) -> bytes:
        """Return what a heartbeat tells: where this worker is, once it trains."""
        return m.encode(self.progress.beat()) if self.training_step is not None else b""

    def here(self) -> m.Position:
        """Return where the next step would begin."""
        assert self.training_step is not None
        return self.progress.at_end(self.training_step.client.links[0].version)

    def send_position(self, position: m.Position) -> None:
        """Send a position, without an answer: that to the last push may still be on its way. It brings this worker's
        buffers; the chief's brings all carried tensors, if they have changed."""
        training_step = self.training_step
        assert training_step is not None
        if self.is_chief:
            block = training_step.carried_block()
            is_new, self._sent_carried = hash(block) != self._sent_carried, hash(block)
            block = block if is_new else b""
        else:
            block = training_step.own_block()
        with suppress(ConnectionLost):  # the next request finds the connection lost, and connects again
            training_step.client.links[0].channel.say(position, bulk=[block] if block else [])

    # --- saving -----------------------------------------------------------------------------------------------

    def announced(self, version: int, writes: bool) -> None:
        """Note that ps:0 will save the update that makes this version; `writes`: this worker writes it."""
        self.progress.announced(version)
        saver = self.make_saver() if writes else None
        if saver is not None and self.training_step is not None:
            saver.incarnation = self.training_step.client.incarnation
            saver.wake(version)

    def make_saver(self) -> Saver | None:
        """Return what writes this worker's checkpoints, made when it is first needed; None without a run folder."""
        paths, training_step = self.paths, self.training_step
        if self.saver is None and paths is not None and training_step is not None:
            settings = self.require_cluster().settings
            self.saver = Saver(
                self.identity(), training_step.layout, training_step.plan, paths.checkpoints, settings.keep, self.say,
                self.reporter.sink.event, lineage_of=training_step.client.lineage_of,
                has_means=settings.buffers == "mean", in_use=self.resumed_from,
            )  # fmt: skip
        return self.saver

    def save(self, position: m.Position | None, waits_for_others: bool = False, is_final: bool = False) -> Path | None:
        """Write a checkpoint now, and wait for it. A full disk, say, or a ps that does not come back in time, is
        printed and ends nothing. `is_final`: no other checkpoint will come."""
        saver = self.make_saver()
        assert saver is not None and self.training_step is not None
        saver.incarnation = self.training_step.client.incarnation
        try:
            return saver.save_now(position, waits_for_others, list(other_places(self._began_in)) if is_final else None)
        except (PacelineError, OSError) as error:
            self.not_saved = str(error)
            self.say(f"paceline: no checkpoint was written: {error}")
            with suppress(PacelineError, OSError):  # the disk may be full
                self.reporter.sink.event("checkpoint_failed", error=str(error))
            return None

    # --- the end ----------------------------------------------------------------------------------------------

    def close(self, is_ok: bool = True, is_interrupted: bool = False) -> None:
        """End this worker's part, once (worker/ending). In a forked child, do nothing: its parent is the worker."""
        if self._is_closed or not self.owner.is_here:
            return
        self._is_closed = True
        self.reporter.stop()
        try:
            ending.end(self, is_ok, is_interrupted)
        finally:
            if self.saver is not None:
                self.saver.close(ending.CLOSE_S if is_ok else ending.FAILED_CLOSE_S)
            if self.training_step is not None:
                self.training_step.close()
            if self.evaluator is not None:
                self.evaluator.close()
            if self.injection is not None:
                self.injection.close()
            self.reporter.close()
