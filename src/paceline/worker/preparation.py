"""Bind a user's objects to the cluster (ctx.prepare): choose their framework, and join, as all frameworks do.

Called by worker/context; frameworks/torch/preparation and frameworks/keras/preparation sort the arguments. Must never
import a framework itself: a TensorFlow worker has no torch, and a torch worker no TensorFlow.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from paceline.checkpoint.read import Loaded
from paceline.checkpoint.request import AUTO, NONE, requested
from paceline.cluster.membership import first_incarnation
from paceline.errors import UsageError
from paceline.telemetry.paths import RunPaths
from paceline.wire import messages as m
from paceline.worker.checkpoints.restoring import Restored
from paceline.worker.ending import end_for_good
from paceline.worker.evaluator import Evaluator
from paceline.worker.framework import is_of_keras, keras_module, torch_module
from paceline.worker.positions.position import Own
from paceline.worker.requests.client import Client
from paceline.worker.requests.link import ClosedAlready
from paceline.worker.step.training_step import TrainingStep

if TYPE_CHECKING:
    from paceline.worker.session import WorkerSession

MAX_SEED = 1 << 31  # of the data's order


def prepare(session: "WorkerSession", objects: Sequence[Any], shard: bool, names: Any) -> Any:
    """Bind the objects with the module of their framework; see Context.prepare."""
    if any(is_of_keras(type(each)) for each in objects):
        prepared = keras_module("preparation").prepare(session, objects, shard, names)
    elif names is not None:
        raise UsageError("names= is for Keras models: it says what their weights are called in a torch model")
    else:
        prepared = torch_module("preparation").prepare(session, objects, shard)
    return prepared[0] if len(prepared) == 1 else tuple(prepared)


class Binding(Protocol):
    """One model and its optimizer, as a framework binds them; join calls these methods in the order below."""

    @property
    def training_step(self) -> TrainingStep: ...

    @property
    def own(self) -> Own: ...

    def seed(self) -> int:
        """Return the seed of the data's order, for the chief of a new run."""
        ...

    def send_memory(self) -> None:
        """Send the state that the optimizer has from before prepare to the ps."""
        ...

    def convert(self) -> None:
        """Have the model and the optimizer train with the cluster from now on."""
        ...


def evaluate(session: "WorkerSession", takers: Mapping[str, Callable[[Any], None]]) -> Evaluator:
    """Have an evaluator's model follow the ps; `takers` take a tensor's values by its name."""
    session.evaluator = evaluator = Evaluator(takers, session.identity(), session.say)
    evaluator.pull()
    return evaluator


def check_pair(session: "WorkerSession", has_model: bool, has_optimizer: bool) -> None:
    """Refuse a model without its optimizer, an optimizer without its model, and a second pair in a run."""
    if has_model:
        if session.training_step is not None:
            raise UsageError("this run has its model and optimizer already: prepare() takes one pair a run")
        if not has_optimizer:
            raise UsageError("prepare(model) needs the optimizer in the same call: prepare(model, optimizer, loader)")
    elif has_optimizer:
        raise UsageError("prepare(optimizer) needs the model in the same call: prepare(model, optimizer, loader)")


def join(session: "WorkerSession", binding: Binding, batch_size: int) -> int:
    """Join the cluster with a model that is bound to the arena (1); return the seed of the data's order. 2. Join and
    wait for the others; 3. take the chief's values; 4. convert the optimizer; 5. go on where this worker, or an earlier
    start of it, was."""
    training_step = binding.training_step
    client = training_step.client
    session.reporter.stand_by()
    first = FirstValues(session, binding)
    try:
        started = client.join(training_step.spec, training_step.carried_block, first.send_rest, first.init)  # 2
    except ClosedAlready as closed:
        client.close()
        end_for_good(session, training_step, closed)
    except BaseException:
        client.close()  # the session does so only for a worker that has joined
        raise
    if training_step.layout.carried_bytes and not first.has_sent_carried:  # 3
        _, block = client.links[0].ask_bulk(m.Fetch("carried"), m.Fetched, training_step.layout.carried_bytes)
        training_step.take_carried(block)
    if not first.has_sent_carried:
        _, block = client.links[0].ask_bulk(m.Fetch("unsaved"), m.Fetched, m.MAX_UNSAVED_BLOCK)
        if block:
            training_step.take_unsaved(block)
    training_step.is_alone = session.num_workers == 1 and not session.is_elastic
    training_step.goes_on = started.global_step > 0
    training_step.joined(lambda: _loaded(session, training_step))
    training_step.carried_at_start = training_step.carried_block() if training_step.goes_on else b""
    binding.convert()  # 4
    session.seed, session.started_at = started.seed, started.global_step
    session.say(_start_line(session, client, batch_size))
    if session.is_chief and not training_step.is_alone and (line := _statistics_line(session, training_step)):
        session.say(line)
    if started.position is not None:  # 5
        binding.own.load(started.position)
        training_step.steps, training_step.samples_pushed = started.position.steps, started.position.samples
        session.progress.resume(started.position)
    session.is_again = started.is_again or is_started_again(session)
    session.begin(training_step, batch_size)
    if started.saves_next:
        session.announced(started.global_step + 1, writes=session.is_chief)
    return started.seed


def is_started_again(session: "WorkerSession") -> bool:
    """Tell whether the launcher has started this task before in this run; of tasks by hand only a ps knows."""
    made = session.assignment
    return made is not None and made.source == "launcher" and made.incarnation >= first_incarnation(2)


class FirstValues:
    """What the chief initialises the ps with: its model, or with --resume a checkpoint."""

    def __init__(self, session: "WorkerSession", binding: Binding) -> None:
        self._session = session
        self._binding = binding
        self._training_step = binding.training_step
        self._restored: Restored | None = None
        self._has_looked = False
        self.has_sent_carried = False  # else ps:0 has those of an earlier start of the chief

    def init(self, index: int) -> m.Init:
        """Return what initialises a ps that has no values yet, before those of the arena are sent."""
        self.has_sent_carried |= index == 0
        if not self._has_looked:
            self._has_looked = True
            self._look()
        if self._restored is not None:
            return self._restored.init(index, self._session.num_workers)
        return m.Init(
            seed=self._binding.seed() % MAX_SEED
        )  # a script that seeds its framework sees the same order again

    def _look(self) -> None:
        """Lay the checkpoint that the run goes on from into the model, if there is one."""
        session, training_step = self._session, self._training_step
        assert session.assignment is not None
        settings = session.assignment.settings
        loaded = self._loaded()
        if loaded is None:
            return
        self._restored = restored = Restored(
            loaded, training_step.layout, training_step.plan, training_step.spec.name, training_step.is_local
        )
        restored.lay_out(training_step.arena.memory)
        training_step.take_carried(bytearray(restored.carried_block()))
        session.resumed_from = loaded.path
        state = loaded.state
        session.say(f"Resuming from {loaded.path}: global step {state.global_step}, written in mode {state.mode}")
        if state.mode != settings.mode_spec:
            session.say(
                f"This start's flags say mode {settings.mode_spec}: that holds, not the checkpoint's {state.mode}"
            )
        if not restored.has_slots:
            session.say("The checkpoint's optimizer state is of another mode's optimizer, so it starts anew")

    def _loaded(self) -> Loaded | None:
        """Load what `--resume` names, or the newest checkpoint of the run if this chief was started again."""
        session = self._session
        assert session.assignment is not None
        settings = session.assignment.settings
        folder = RunPaths(settings.run_dir).checkpoints if settings.run_dir is not None else None
        is_again = is_started_again(session)
        loaded = requested(AUTO, folder, session.say) if is_again and folder is not None else None
        if loaded is None:
            loaded = requested(settings.resume, folder, session.say)
        if loaded is None and (is_again or settings.resume != NONE):
            session.say(f"Nothing to resume in {folder}: training starts at step 0")
        return loaded

    def send_rest(self) -> None:
        """Send what follows the parameters: optimizer state, averages, and buffers that no checkpoint holds."""
        if block := self._training_step.unsaved_block():
            self._training_step.client.links[0].ask(m.Assign("unsaved"), bulk=[block])
        if self._restored is None:
            self._binding.send_memory()
        else:
            links = self._training_step.client.links
            self._restored.send_rest(links)
            self._restored.send_buffers(links[0], self._session.num_workers)


def _start_line(session: "WorkerSession", client: Client, batch_size: int) -> str:
    lanes = ", ".join(sorted({link.channel.lane for link in client.links}))
    batch = f"batch {batch_size} a worker" if batch_size else "batches of your own"
    if batch_size and not session.is_elastic:
        batch += f", {batch_size * session.num_workers} together"
    return f"Worker {session.worker_index} of {session.num_workers}: mode {client.dial.spec}, lane {lanes}, {batch}"


def _statistics_line(session: "WorkerSession", training_step: TrainingStep) -> str:
    names = [spec.name for spec in training_step.layout.own if spec.buffer == "statistic"]
    if not names:
        return ""
    assert session.assignment is not None
    is_mean = session.assignment.settings.buffers == "mean"
    held = "their mean, weighted by samples (--buffers chief: the chief's)"
    return (
        f"paceline: each worker keeps running statistics of its own ({names[0]}, {len(names)} in all); checkpoints "
        f"hold {held if is_mean else f'the chief{chr(39)}s (--buffers mean: their mean)'}"
    )


def _loaded(session: "WorkerSession", training_step: TrainingStep) -> None:
    """Send the values that the script has loaded into the model to the ps, if they are the cluster's. A forked child
    loads into its own copy."""
    if not training_step.owner.is_here:
        return
    if session.takes(training_step.loading):
        training_step.assign_parameters()
    elif session.started_at and not session.is_assigning:
        training_step.take_newest()
    else:
        training_step.forget_steps()
        training_step.remember()  # the chief loads, too, and sends
