"""WHAT does a script hold? `ctx`: which task it is, and everything that is not the training loop itself.

Made by paceline.init. Every call first takes the answer of the last push, so that what it says is up to date.
Without a cluster the same calls do the plain thing, and nothing of the training changes.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import msgspec

from paceline import forks
from paceline.checkpoint.read import Loaded, load_newest
from paceline.checkpoint.request import AUTO, NONE, requested
from paceline.checkpoint.room import other_places
from paceline.cluster.discovery import Assignment, visible_cards
from paceline.cluster.moved import Whereabouts
from paceline.errors import ConnectionLost, NotSaved, PacelineError, UsageError
from paceline.modes.spec import check as check_mode
from paceline.params.placement import table
from paceline.telemetry.lines import FailedAt, failed_line
from paceline.telemetry.paths import RunPaths
from paceline.telemetry.steps import StepClock
from paceline.wire import messages as m
from paceline.worker import injection, slowness
from paceline.worker.client import Identity
from paceline.worker.control import spec_of
from paceline.worker.framework import torch_module
from paceline.worker.kv import Kv
from paceline.worker.link import ClosedAlready
from paceline.worker.position import Count, Progress, whole
from paceline.worker.repeated_loop import RepeatedLoop
from paceline.worker.reporting import Reporter
from paceline.worker.rewinding import Rewinder
from paceline.worker.saver import Saver
from paceline.worker.script import check_owner, script_line

CLOSE_S = 60.0  # how long the end waits for a checkpoint that is being written
FAILED_CLOSE_S = 5.0  # and after an error
INTERRUPTED_SAVE_S = 10.0  # how long Ctrl+C waits for the last one
JUST_S = 5.0  # and how old one may be that needs no other


class Context:
    """One task's view of its run. Usable as a context manager; closing it ends this worker's part."""

    def __init__(self, assignment: Assignment | None, out: Callable[[str], None]) -> None:
        self.owner = forks.Owner()
        self._assignment = assignment
        self._say = out
        self._trainee: Any = None
        self._pin: Any = None
        self._evaluator: Any = None
        self._alone_step = 0  # without a cluster: steps done; as an evaluator: the step last pulled
        self._count_alone: Callable[[], int] | None = None
        self._is_closed = False
        self._weight: float | None = None
        self.training_loader: Any = None  # whose batches are the samples of a push
        self._place = self.worker_index, self.num_workers
        self.seed = 0
        self.started_at = 0  # the global step at which this worker joined
        self.is_assigning = False
        self.is_again = False  # an earlier start of this worker has trained in this run
        self._said_no_averages = False
        self.progress = Progress(self.worker_index)
        self._saver: Saver | None = None
        self._rewinder: Rewinder | None = None
        self.resumed_from: Path | None = None
        self._sent_carried = 0
        self._not_saved = ""  # why the last checkpoint was not
        self._began_in: Path | None = None  # a script may go to another folder
        with suppress(OSError):
            self._began_in = Path.cwd()
        self._injection = injection.of(assignment) if assignment else None
        self._reporter = Reporter(assignment, out, self.is_chief)

    # --- who am I ---------------------------------------------------------------------------------------------

    @property
    def job(self) -> str:
        return self._assignment.task.job if self._assignment else "worker"

    @property
    def task_index(self) -> int:
        return self._assignment.task.index if self._assignment else 0

    @cached_property
    def worker_index(self) -> int:
        """0..n-1, the chief first."""
        if self._assignment is None or self.job == "evaluator":
            return 0
        return self._assignment.cluster.worker_index(self._assignment.task)

    @property
    def is_chief(self) -> bool:
        return self.worker_index == 0 and self.job != "evaluator"

    @property
    def num_workers(self) -> int:
        return len(self._assignment.cluster.workers) if self._assignment else 1

    @property
    def mode(self) -> str:
        """The mode that holds now, by name."""
        if self._trainee is not None:
            self._settle()
            name: str = self._trainee.client.dial.spec.name
            return name
        return self._assignment.settings.mode if self._assignment else "single"

    @property
    def device(self) -> Any:
        """Where this task is to compute, for torch: its share of the host's cards, what --worker-device says, or the
        CPU. prepare() moves nothing there."""
        return self.pin().torch_device

    def pin(self) -> Any:
        """This task's own device; found once, by init where torch is imported already."""
        if self._pin is None:
            self._pin = torch_module("devices").pin(self._assignment, self._say, visible_cards())
        return self._pin

    @property
    def global_step(self) -> int:
        """Updates applied by the cluster, as far as this worker has seen."""
        if self._trainee is None:
            return self._alone_step if self._count_alone is None else self._count_alone()
        self.progress.asks_step = self.progress.asks_step or not self._trainee.pushes
        self._settle()
        version: int = self._trainee.client.links[0].version
        return version

    @property
    def run_dir(self) -> Path | None:
        """The run folder, also for what a script writes itself: a picture put there is named at the end of the run.
        None without a cluster, and by hand without --run-dir."""
        paths = self._paths()
        return paths.root if paths is not None else None

    @property
    def has_averages(self) -> bool:
        """Whether the ps keep averaged parameters (--ema), which ctx.ema() shows."""
        return self._assignment is not None and self._assignment.settings.ema is not None

    # --- preparing --------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, shard: bool = True, names: Mapping[str, Any] | None = None) -> Any:
        """Model, optimizer, loader, scheduler in any order; returned in that order, one argument as itself. Of torch or
        of Keras; `names` says what a Keras model's weights are called in a cluster of both (docs/keras.md)."""
        from paceline.worker.preparation import prepare

        self.check_owner("ctx.prepare()")
        return prepare(self, objects, shard, names)

    def identity(self) -> Identity:
        """What a client needs to know of this worker."""
        assignment = self._require_cluster()
        cluster, settings = assignment.cluster, assignment.settings
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
            trouble=self._injection.trouble if self._injection is not None else None,
            ledger=self._ledger_path(assignment),
        )

    @staticmethod
    def _ledger_path(assignment: Assignment) -> Path | None:
        settings = assignment.settings
        is_asked = settings.ledger and settings.run_dir is not None
        return RunPaths(settings.run_dir or "").ledger(assignment.task) if is_asked else None

    @property
    def is_prepared(self) -> bool:
        return self._trainee is not None

    def follow(self, evaluator: Any) -> None:
        """Called by prepare in an evaluator."""
        self._evaluator = evaluator
        self.pull()

    def begin(self, trainee: Any, batch_size: int) -> None:
        """Called by prepare when the cluster has started."""
        self._trainee = trainee
        trainee.own_weight = self._weight
        trainee.batch_size = batch_size
        settings = self._require_cluster().settings
        if settings.log_device_placement:
            for line in self._placement(trainee):
                self._say(line)
        if self.is_chief and settings.run_dir is None:
            self._say("Nothing will be saved: start the chief with --run-dir to keep the model")
        trainee.slowness = slowness.of(settings.slow, self._require_cluster().task)
        if trainee.slowness is not None:
            self._say(f"Worker {self.worker_index} is {slowness.mark(trainee.slowness.factor)}")
        trainee.injection = self._injection
        self._follow_progress(trainee)
        if self._rewinder is not None:
            self._rewinder.has_trained = True
        self._reporter.begin(trainee, trainee.client.waited_s, trainee.device_name(self.pin))

    def _placement(self, trainee: Any) -> list[str]:
        """The lines of --log-device-placement: this task's devices; the chief also tells where every variable is."""
        own = f"Worker {self.worker_index} computes on {trainee.device_name(self.pin)}"
        return [
            *trainee.mapping_lines(self._require_cluster().task),
            own,
            *(table(trainee.layout, trainee.plan) if self.is_chief else ()),
        ]

    def stand_by(self, trainee: Any) -> None:
        """Called by prepare before this worker joins: a ps may have lost its memory by then."""
        self._reporter.stand_by()
        find, event = self._newest_checkpoint, self._reporter.sink.event
        is_reseeding = self._require_cluster().settings.reseed
        self._rewinder = Rewinder(self.identity(), trainee, find, is_reseeding, self._say, event)
        trainee.client.entrance.on_empty = self._rewinder.on_empty
        trainee.client.entrance.offer = self._rewinder.offer

    def end_for_good(self, trainee: Any, closed: ClosedAlready) -> NoReturn:
        """Called by prepare when an earlier start of this worker has closed, but was killed before it had ended: who
        closed last may still have had to save. By hand, somebody has started a worker that is done."""
        if self._require_cluster().source != "launcher":
            raise closed
        self._say(f"paceline: {closed}")
        self._trainee = trainee
        if closed.reply.is_last and self._saves and self._save(None, is_final=True) is None:
            raise NotSaved(f"the final model could not be saved: {self._not_saved}")
        self._trainee = None  # it has no connection to close
        self._reporter.sink.event("done")
        raise SystemExit(0)

    def stepped(self) -> None:
        """Called by the optimizer after every step of this worker."""
        self.clock.step(self._trainee.batch_size)
        self._reporter.stepped(self.worker_index, self._trainee, self.clock.last_s)

    def _follow_progress(self, trainee: Any) -> None:
        """Have this worker's position go into its heartbeats, and to ps:0 when an update is saved."""
        progress = self.progress
        progress.steps = lambda: int(trainee.steps)
        progress.samples = lambda: trainee.samples_pushed
        progress.send = self._send_position
        repeated = RepeatedLoop(self.worker_index, trainee, progress, self.is_again, self._warn)
        progress.on_unguided = lambda loop: repeated.check(loop, self.started_at)
        self._sent_carried = hash(trainee.carried_block()) if self.is_chief else 0
        trainee.client.watch.tail = lambda: m.encode(progress.beat())
        trainee.progress, trainee.on_save = progress, self.announced

    def _warn(self, text: str) -> None:
        """Say it in the log and on the launcher's terminal."""
        self._say(f"paceline: {text}")
        self._reporter.sink.event("warning", task=str(self._require_cluster().task), text=text)

    def _send_position(self, position: m.Position) -> None:
        """Send a position, without an answer: that to the last push may still be on its way. It brings this worker's
        buffers; the chief's brings all carried tensors, if they have changed."""
        trainee = self._trainee
        if self.is_chief:
            block = trainee.carried_block()
            is_new, self._sent_carried = hash(block) != self._sent_carried, hash(block)
            block = block if is_new else b""
        else:
            block = trainee.own_block()
        with suppress(ConnectionLost):  # the next request finds the connection lost, and connects again
            trainee.client.links[0].channel.say(position, bulk=[block] if block else [])

    def announced(self, version: int, writes: bool) -> None:
        """ps:0 will save the update that makes this version; `writes`: this worker writes it."""
        self.progress.announced(version)
        saver = self._make_saver() if writes else None
        if saver is not None:
            saver.incarnation = self._trainee.client.incarnation
            saver.wake(version)

    def _newest_checkpoint(self) -> Loaded | None:
        """Of this run; before it has one, what it was resumed from."""
        paths, resume = self._paths(), self._require_cluster().settings.resume
        newest = load_newest(paths.checkpoints, self._say) if paths is not None else None
        if newest is None and resume not in (AUTO, NONE):
            return requested(resume, None, self._say)
        return newest

    def _make_saver(self) -> Saver | None:
        paths, trainee = self._paths(), self._trainee
        if self._saver is None and paths is not None:
            settings, event = self._require_cluster().settings, self._reporter.sink.event
            me = self.identity()
            self._saver = Saver(me, trainee.layout, trainee.plan, paths.checkpoints, settings.keep, self._say, event)
            self._saver.has_means = settings.buffers == "mean"
            self._saver.in_use = self.resumed_from
            self._saver.lineage_of = lambda index: trainee.client.links[index].lineage
        return self._saver

    @property
    def clock(self) -> StepClock:
        """What this worker's steps and epochs take."""
        return self._reporter.clock

    # --- going on ---------------------------------------------------------------------------------------------

    def epochs(self, count: Count) -> Iterator[int]:
        """The epochs that remain for this worker."""
        number = whole("epochs", count)
        self.check_owner("ctx.epochs()")
        if self.job == "evaluator":
            return
        if self._trainee is not None:
            self._trainee.begin_loop()
        for epoch in self.progress.epochs(number):
            self.clock.epoch()
            yield epoch

    def steps(self, total: Count) -> Iterator[int]:
        """Steps of this worker until the *cluster* has applied exactly `total` updates."""
        total = whole("steps", total)
        self.check_owner("ctx.steps()")
        if self._trainee is None:
            yield from range(total)
            return
        trainee, number = self._trainee, self._trainee.steps
        trainee.begin_loop()
        trainee.wants_ticket = trainee.is_budgeted = self.progress.is_guided = True
        try:
            while self._has_ticket(total):
                self.progress.boundary(m.STEP)
                yield number
                number += 1
                trainee.settle()
            self.progress.boundary(m.STEP, is_last=True)
            self._reporter.last_step(self.worker_index, trainee)
        finally:
            trainee.wants_ticket = False

    def _has_ticket(self, total: int) -> bool:
        if self._trainee.has_ticket or not total:
            return bool(total)  # none at all needs nobody's leave, and binds nobody
        turn = self._trainee.client.dial.turn
        ticket = self._ask(m.Steps(total))
        if self._trainee.client.dial.turn != turn:
            self._trainee.refresh()
        self._trainee.has_ticket = isinstance(ticket, m.Ticket) and ticket.is_granted
        return bool(self._trainee.has_ticket)

    def log(self, values: Mapping[str, float]) -> None:
        """Remember the newest values; the chief also writes TensorBoard summaries, at the global step."""
        self.check_owner("ctx.log()")
        self._reporter.log(values, self._trainee)

    def print(self, *values: object) -> None:
        """Print on the chief only."""
        if self.is_chief:
            self._say(" ".join(str(v) for v in values))

    def barrier(self) -> None:
        """Wait until every live worker is here; rounds go on without those who wait."""
        self.check_owner("ctx.barrier()")
        if self._trainee is not None:
            self._ask(m.Barrier())
            self._trainee.refresh()
            if self._trainee.slowness is not None:
                self._trainee.slowness.begin()  # waiting here is no step

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Out of rounds while evaluating, say: nobody waits for this worker inside."""
        self.check_owner("ctx.pause()")
        if self._trainee is None:
            yield
            return
        self._ask(m.Pause())
        try:
            yield
        finally:
            self._ask(m.Resume())
            self._trainee.refresh()
            if self._trainee.slowness is not None:
                self._trainee.slowness.begin()

    def pull(self) -> None:
        """The newest parameters, now (in mode local: unless this worker is between two exchanges)."""
        self.check_owner("ctx.pull()")
        if self._evaluator is not None:
            self._alone_step = self._evaluator.pull()
        elif self._trainee is not None:
            self._trainee.refresh()

    @contextmanager
    def ema(self) -> Iterator[None]:
        """Inside, the model holds the averages that the ps keep with --ema; outside, its own parameters again."""
        self.check_owner("ctx.ema()")
        holder = self._trainee or self._evaluator
        if holder is not None:
            with holder.averages():
                yield
            return
        if not self._said_no_averages:
            self._said_no_averages = True
            self._say("paceline: ctx.ema() without a cluster: nobody keeps averages, the model stays as it is")
        yield

    def weight(self, samples: float) -> None:
        """Say how many samples each of this worker's pushes holds from now on; without it, the samples of the batches
        in the gradient count. A round's mean is weighted by it."""
        if not (math.isfinite(samples) and samples > 0):
            raise UsageError(f"weight({samples}): a push holds a number of samples above 0")
        self._weight = float(samples)
        if self._trainee is not None:
            self._trainee.own_weight = self._weight

    def begin_pass(self, loader: Any) -> Any:
        """Begin a pass of a prepared loader. Return what counts the samples of its batches, if they count."""
        if self._trainee is None or loader is not self.training_loader or not self.owner.is_here:
            return None
        self._trainee.begin_loop()
        samples = self._trainee.samples
        if samples is not None:
            samples.begin_pass()
        return samples

    def switch_mode(self, name: str, **numbers: Any) -> None:
        """Ask for another mode; it holds once every worker has finished a step. `numbers` are run's flags by their
        Python names: replicas_to_aggregate, extra_tokens, grace_ms, staleness, local_steps, outer. Alone: nothing."""
        spec = spec_of(name, **numbers)
        self.check_owner("ctx.switch_mode()")
        if self._trainee is not None:
            check_mode(spec, self.num_workers)
            self._trainee.client.switch_mode(spec)

    def place(self) -> tuple[int, int]:
        """Which worker of how many this is among those that train now; for an elastic cluster's shares of the data."""
        if not self.is_elastic:
            return self.worker_index, self.num_workers
        if not self.owner.is_here:
            return self._place
        live = self._trainee.client.status().live if self._trainee is not None else []
        if self.worker_index in live:  # else: ps:0 did not answer in time
            self._place = live.index(self.worker_index), len(live)
        return self._place

    @property
    def is_elastic(self) -> bool:
        """Whether workers may join while the others train."""
        return self._assignment is not None and self._assignment.settings.started_workers is not None

    @contextmanager
    def assign(self) -> Iterator[None]:
        """Inside, load_state_dict of model and optimizer is for the whole cluster; the chief's values are taken."""
        self.check_owner("ctx.assign()")
        if self._trainee is None:
            yield
            return
        self.barrier()
        self.is_assigning = True
        try:
            yield
            self._ask(m.Barrier())  # others may still read what the chief is about to replace
            self._trainee.carried_at_start = b""
            self._trainee.assigned(self.is_chief)
            if self.is_chief:
                self._trainee.assign_parameters()
            else:
                self._trainee.lay_back()
                self._trainee.forget_steps()
                self._trainee.writes.remember()  # the barrier brings the chief's
        finally:
            self.is_assigning = False
        self.barrier()

    def takes(self, what: str) -> bool:
        """Tell whether what this worker loads with `what` goes to the ps: the chief's before the first step or inside
        assign(), and a single worker's at any time. Refuse it in the middle of a run with several workers."""
        self.check_owner(what)
        trainee = self._trainee
        is_first = trainee is None or not trainee.pushes
        if self.is_assigning or (is_first and self.started_at == 0):
            return self.is_chief
        if is_first:
            self._say(f"paceline: {what} has no effect: this run goes on from global step {self.started_at}")
            return False
        if not trainee.is_alone:
            raise UsageError(
                f"{what} in the middle of a run{script_line()}: the other workers would not see it. Call it on all "
                "workers inside `with ctx.assign():` (the chief's values count)"
            )
        return True

    @property
    def kv(self) -> Kv:
        """Any variable by name, from the ps: ctx.kv["0.weight"]."""
        if self._assignment is None:
            raise UsageError("ctx.kv reads from the ps, and there is no cluster here")
        me = self.identity()
        return Kv(me.ps_addresses, me.lane, me.secret, me.wait_s, self._say, me.log_style)

    def save(self) -> Path | None:
        """Write a checkpoint now, in the run folder. The chief does; where the others call it too, at the same step,
        they say where they are, so that a resumed run goes on at the same bit."""
        self.check_owner("ctx.save()")
        trainee = self._trainee
        if trainee is None or self._paths() is None:
            return None
        trainee.settle()
        trainee.keep_writes()
        position = self._where()
        if not self.is_chief:
            self._send_position(position)
            return None
        trainee.send_carried()
        return self._save(position, waits_for_others=self.num_workers > 1)

    def _where(self) -> m.Position:
        return self.progress.at_end(self._trainee.client.links[0].version)

    # --- the end ----------------------------------------------------------------------------------------------

    def close(self, is_ok: bool = True, is_interrupted: bool = False) -> None:
        """Report and leave; the last worker to do so writes the final checkpoint. After Ctrl+C the chief saves, too. In
        a forked child, do nothing: its parent is the worker."""
        if self._is_closed or not self.owner.is_here:
            return
        self._is_closed = True
        self._reporter.stop()
        try:
            if self._trainee is not None and is_ok:
                self._leave()
            elif self._trainee is not None and is_interrupted and self.is_chief and self._saves:
                self._save_in_time()
            elif self._trainee is not None and not is_interrupted:
                self._say(failed_line(self._failed_at(self._trainee)))
        finally:
            if self._saver is not None:
                self._saver.close(CLOSE_S if is_ok else FAILED_CLOSE_S)
            if self._trainee is not None:
                self._trainee.close()
            if self._evaluator is not None:
                self._evaluator.close()
            if self._injection is not None:
                self._injection.close()
            self._reporter.close()

    def _failed_at(self, trainee: Any) -> FailedAt:
        progress, steps = self.progress, int(trainee.steps)
        batch = (progress.epoch, progress.passes, progress.batch) if progress.is_in_pass else None
        return FailedAt(step=steps, step_of_start=steps - self.clock.earlier, batch=batch)

    def _leave(self) -> None:
        trainee = self._trainee
        refused = trainee.finish()
        links = trainee.client.links
        counts = [(link.channel.lane, link.counts()) for link in links]
        report = self._reporter.end(self.worker_index, trainee, trainee.discarded, counts)
        if self.is_chief:
            trainee.send_carried()
        trainee.refresh()  # whoever ends carries ps:0's open decisions to all shards first
        saves = self._saves
        self._send_position(self._where())
        saved_at = -1
        if self.is_chief and saves:  # the last worker saves at the end, but it may never get there
            is_last = trainee.client.status().live == [self.worker_index]  # the others have said what they end with
            if self._save(self._where()) is not None and is_last:
                saved_at = links[0].version
        reports = [link.ask(m.Close()) for link in links[1:]]
        told = [r.report for r in reports if isinstance(r, m.Closed)]
        closed = links[0].ask(m.Close(msgspec.json.encode(report), told))
        if isinstance(closed, m.Closed) and closed.is_last and saves:
            trainee.client.pull()  # our end may have closed a round with the gradient of one that died
            if links[0].version != saved_at and self._save(self._where(), is_final=True) is None:
                version = links[0].version
                raise NotSaved(f"the final model, of global step {version}, could not be saved: {self._not_saved}")
        if refused is not None:
            raise refused

    @property
    def _saves(self) -> bool:
        return self._require_cluster().settings.save_every != "none" and self._paths() is not None

    def _save_in_time(self) -> None:
        """Everybody leaves, and the ps soon after: save what they have, if it takes no longer than somebody waits.
        The connections of the training stopped in the middle of anything; the saver has its own. What the launcher has
        just had saved is better: there everybody's place is known."""
        is_launched = self._require_cluster().source == "launcher"
        if is_launched and self._saver is not None and self._saver.has_just_saved(JUST_S, INTERRUPTED_SAVE_S):
            return
        self._say("Interrupted: saving before the end")
        position, saver = self._where(), self._make_saver()
        assert saver is not None
        try:
            saver.carried = self._trainee.carried_block()
        except UsageError as refused:
            self._say(f"paceline: buffers are saved as ps:0 has them: {refused}")
        writing = threading.Thread(target=self._try_save, args=(position,), name="last save", daemon=True)
        writing.start()
        writing.join(INTERRUPTED_SAVE_S)
        if writing.is_alive():
            self._say(f"paceline: the checkpoint was not written within {INTERRUPTED_SAVE_S:g} s, so it is left out")

    def _try_save(self, position: m.Position) -> None:
        saved = self._save(position, is_final=True)
        if saved is not None:
            self._say(f"Saved: {saved}")

    def _save(self, position: m.Position | None, waits_for_others: bool = False, is_final: bool = False) -> Path | None:
        """Write a checkpoint now, and wait for it. A full disk, say, or a ps that does not come back in time, is
        printed and ends nothing. `is_final`: no other checkpoint will come."""
        saver = self._make_saver()
        assert saver is not None
        saver.incarnation = self._trainee.client.incarnation
        try:
            return saver.save_now(position, waits_for_others, list(other_places(self._began_in)) if is_final else None)
        except (PacelineError, OSError) as error:
            self._not_saved = str(error)
            self._say(f"paceline: no checkpoint was written: {error}")
            with suppress(PacelineError, OSError):  # the disk may be full
                self._reporter.sink.event("checkpoint_failed", error=str(error))
            return None

    def __enter__(self) -> "Context":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_ok = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        self.close(is_ok=is_ok, is_interrupted=isinstance(error, KeyboardInterrupt))

    # --- inside -----------------------------------------------------------------------------------------------

    def check_owner(self, what: str) -> None:
        """Refuse in a forked child what only its parent can do; without a cluster there is nothing to refuse."""
        if self._assignment is not None:
            check_owner(self.owner, what)

    def _settle(self) -> None:
        """Take the answer of the last push, unless this is a forked child."""
        if self.owner.is_here:
            self._trainee.settle()

    def _ask(self, request: m.Request) -> m.Reply:
        """Ask ps:0, with the last answer taken. A ticket of the mode before is none in the next one."""
        self._trainee.settle()
        client = self._trainee.client
        turn = client.dial.turn
        reply: m.Reply = client.ask(request)
        self._trainee.has_ticket = self._trainee.has_ticket and client.dial.turn == turn
        return reply

    def _require_cluster(self) -> Assignment:
        if self._assignment is None:
            raise PacelineError("there is no cluster here: this process trains alone")
        return self._assignment

    def _paths(self) -> RunPaths | None:
        if self._assignment is None or self._assignment.settings.run_dir is None:
            return None
        return RunPaths(self._assignment.settings.run_dir)

    def say(self, line: str) -> None:
        self._say(line)

    @property
    def assignment(self) -> Assignment | None:
        return self._assignment

    def count_solo_step(self) -> None:
        self._alone_step += 1

    def count_alone(self, steps: Callable[[], int]) -> None:
        """Called by prepare without a cluster, where the optimizer counts its steps itself."""
        self._count_alone = steps


def flush_line(text: str) -> None:
    """Print a line so that it is in the log at once, even when the log is a file."""
    print(text, flush=True)
