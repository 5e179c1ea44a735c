"""Show a script its run: `ctx`, which task this is, and everything around the training loop itself.

Made by paceline.init. Every name here is in docs/api.md; what the rest of the package needs of a worker is in
worker/session. A call first takes the answer of the last push, so that what it returns is up to date. Without a cluster
the same calls do the plain thing, and nothing of the training changes.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.errors import UsageError
from paceline.modes.spec import check as check_mode
from paceline.wire import messages as m
from paceline.worker.control import spec_of
from paceline.worker.kv import Kv
from paceline.worker.positions.position import Count, whole
from paceline.worker.session import WorkerSession
from paceline.worker.step.training_step import TrainingStep


class Context:
    """One task's view of its run. Usable as a context manager; closing it ends this worker's part."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._said_no_averages = False

    # --- this task --------------------------------------------------------------------------------------------

    @property
    def job(self) -> str:
        """The job of this task: "worker", "chief" or "evaluator"."""
        return self._session.job

    @property
    def task_index(self) -> int:
        """The number of this task within its job."""
        return self._session.task_index

    @property
    def worker_index(self) -> int:
        """The number of this worker among all that train: 0..n-1, the chief first."""
        return self._session.worker_index

    @property
    def is_chief(self) -> bool:
        """Whether this is the worker that initialises the model, prints and saves."""
        return self._session.is_chief

    @property
    def num_workers(self) -> int:
        """How many workers the cluster has."""
        return self._session.num_workers

    @property
    def mode(self) -> str:
        """The mode that holds now, by name; "single" without a cluster."""
        session = self._session
        if session.training_step is None:
            return session.assignment.settings.mode if session.assignment else "single"
        session.settle()
        return session.training_step.client.dial.spec.name

    @property
    def device(self) -> Any:
        """Where this task is to compute, for torch: its share of the host's cards, what --worker-device says, or the
        CPU. prepare() moves nothing there."""
        return self._session.pin().torch_device

    @property
    def global_step(self) -> int:
        """Updates applied by the cluster, as far as this worker has seen."""
        session, training_step = self._session, self._session.training_step
        if session.evaluator is not None:
            return session.evaluator.step
        if training_step is None:
            return session.steps_alone()
        session.progress.asks_step = session.progress.asks_step or not training_step.pushes
        session.settle()
        return training_step.client.links[0].version

    @property
    def run_dir(self) -> Path | None:
        """The run folder, also for what a script writes itself: a picture put there is named at the end of the run.
        None without a cluster, and by hand without --run-dir."""
        paths = self._session.paths
        return paths.root if paths is not None else None

    @property
    def has_averages(self) -> bool:
        """Whether the ps keep averaged parameters (--ema), which ctx.ema() shows."""
        return self._session.assignment is not None and self._session.assignment.settings.ema is not None

    @property
    def kv(self) -> Kv:
        """Any variable by name, from the ps: ctx.kv["0.weight"]."""
        if self._session.assignment is None:
            raise UsageError("ctx.kv reads from the ps, and there is no cluster here")
        me = self._session.identity()
        return Kv(me.ps_addresses, me.lane, me.secret, me.wait_s, self._session.say, me.log_style)

    # --- training ---------------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, shard: bool = True, names: Mapping[str, Any] | None = None) -> Any:
        """Bind model, optimizer, loaders and schedulers, of torch or of Keras, to the cluster; return them in the order
        given, one argument as itself. `names` says what a Keras model's weights are called in a cluster of both
        (docs/keras.md)."""
        from paceline.worker.preparation import prepare

        self._session.check_owner("ctx.prepare()")
        return prepare(self._session, objects, shard, names)

    def epochs(self, count: Count) -> Iterator[int]:
        """Yield the epochs of `count` that remain for this worker."""
        session = self._session
        number = whole("epochs", count)
        session.check_owner("ctx.epochs()")
        if session.job == "evaluator":
            return
        if session.training_step is not None:
            session.training_step.begin_loop()
        for epoch in session.progress.epochs(number):
            session.clock.epoch()
            yield epoch

    def steps(self, total: Count) -> Iterator[int]:
        """Yield steps of this worker until the *cluster* has applied exactly `total` updates."""
        session = self._session
        total = whole("steps", total)
        session.check_owner("ctx.steps()")
        training_step = session.training_step
        if training_step is None:
            yield from range(total)
            return
        number = training_step.steps
        training_step.begin_loop()
        training_step.wants_ticket = training_step.is_budgeted = session.progress.is_guided = True
        try:
            while self._has_ticket(training_step, total):
                session.progress.boundary(m.STEP)
                yield number
                number += 1
                training_step.settle()
            session.progress.boundary(m.STEP, is_last=True)
            session.reporter.last_step()
        finally:
            training_step.wants_ticket = False

    def _has_ticket(self, training_step: TrainingStep, total: int) -> bool:
        if training_step.has_ticket or not total:
            return bool(total)  # for no steps at all no ticket is asked
        turn = training_step.client.dial.turn
        ticket = self._session.ask(m.Steps(total))
        if training_step.client.dial.turn != turn:
            training_step.refresh()
        training_step.has_ticket = isinstance(ticket, m.Ticket) and ticket.is_granted
        return training_step.has_ticket

    def pull(self) -> None:
        """Take the newest parameters now (in mode local: unless this worker is between two exchanges)."""
        session = self._session
        session.check_owner("ctx.pull()")
        if session.evaluator is not None:
            session.evaluator.pull()
        elif session.training_step is not None:
            session.training_step.refresh()

    def weight(self, samples: float) -> None:
        """Say how many samples each of this worker's pushes holds from now on; without it, the samples of the batches
        in the gradient count. A round's mean is weighted by it."""
        if not (math.isfinite(samples) and samples > 0):
            raise UsageError(f"weight({samples}): a push holds a number of samples above 0")
        self._session.own_weight = float(samples)
        if self._session.training_step is not None:
            self._session.training_step.own_weight = float(samples)

    def log(self, values: Mapping[str, float]) -> None:
        """Remember the newest values; the chief also writes TensorBoard summaries, at the global step."""
        self._session.check_owner("ctx.log()")
        self._session.reporter.log(values)

    def print(self, *values: object) -> None:
        """Print on the chief only."""
        if self._session.is_chief:
            self._session.say(" ".join(str(v) for v in values))

    # --- with the others --------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every live worker is here; rounds go on without those who wait."""
        self._session.check_owner("ctx.barrier()")
        if self._session.training_step is not None:
            self._session.ask(m.Barrier())
            self._session.refresh()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Step out of the rounds, to evaluate, say: inside, the other workers do not wait for this one."""
        self._session.check_owner("ctx.pause()")
        if self._session.training_step is None:
            yield
            return
        self._session.ask(m.Pause())
        try:
            yield
        finally:
            self._session.ask(m.Resume())
            self._session.refresh()

    @contextmanager
    def ema(self) -> Iterator[None]:
        """Inside, the model holds the averages that the ps keep with --ema; outside, its own parameters again."""
        self._session.check_owner("ctx.ema()")
        holder = self._session.training_step or self._session.evaluator
        if holder is not None:
            with holder.averages():
                yield
            return
        if not self._said_no_averages:
            self._said_no_averages = True
            self._session.say("paceline: ctx.ema() without a cluster: nobody keeps averages, the model stays as it is")
        yield

    @contextmanager
    def assign(self) -> Iterator[None]:
        """Inside, load_state_dict of model and optimizer is for the whole cluster; the chief's values are taken."""
        session, training_step = self._session, self._session.training_step
        session.check_owner("ctx.assign()")
        if training_step is None:
            yield
            return
        self.barrier()
        session.is_assigning = True
        try:
            yield
            session.ask(m.Barrier())  # others may still read what the chief is about to replace
            training_step.carried_at_start = b""
            training_step.assigned(session.is_chief)
            if session.is_chief:
                training_step.assign_parameters()
            else:
                training_step.lay_back()
                training_step.forget_steps()
                training_step.remember()  # the barrier brings the chief's
        finally:
            session.is_assigning = False
        self.barrier()

    def switch_mode(self, name: str, **numbers: Any) -> None:
        """Ask for another mode; it holds once every worker has finished a step. `numbers` are run's flags by their
        Python names: replicas_to_aggregate, extra_tokens, grace_ms, staleness, local_steps, outer. Alone: nothing."""
        spec = spec_of(name, **numbers)
        self._session.check_owner("ctx.switch_mode()")
        if self._session.training_step is not None:
            check_mode(spec, self._session.num_workers)
            self._session.training_step.client.switch_mode(spec)

    # --- the end ----------------------------------------------------------------------------------------------

    def save(self) -> Path | None:
        """Write a checkpoint now, in the run folder. The chief does; where the others call it too, at the same step,
        they say where they are, so that a resumed run goes on at the same bit."""
        session, training_step = self._session, self._session.training_step
        session.check_owner("ctx.save()")
        if training_step is None or session.paths is None:
            return None
        training_step.settle()
        training_step.keep_writes()
        position = session.here()
        if not session.is_chief:
            session.send_position(position)
            return None
        training_step.send_carried()
        return session.save(position, waits_for_others=session.num_workers > 1)

    def close(self, is_ok: bool = True, is_interrupted: bool = False) -> None:
        """Report and leave; the last worker to do so writes the final checkpoint. After Ctrl+C the chief saves, too. In
        a forked child, do nothing: its parent is the worker."""
        self._session.close(is_ok, is_interrupted)

    def __enter__(self) -> "Context":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_ok = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        self.close(is_ok=is_ok, is_interrupted=isinstance(error, KeyboardInterrupt))
