"""HOW do a user's objects join the cluster? ctx.prepare for PyTorch: sort the arguments, bind, join, share the data.

Called by worker/context. The model and the optimizer come back as the same objects.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.cluster.membership import first_incarnation
from paceline.errors import UsageError
from paceline.telemetry.paths import RunPaths
from paceline.views import NAMES, as_bytes, flat, shaped
from paceline.wire import messages as m
from paceline.worker.client import Client
from paceline.worker.data import batch_size_of, note_epochs, share
from paceline.worker.evaluator import Evaluator
from paceline.worker.link import ClosedAlready
from paceline.worker.restoring import AUTO, Restored, find
from paceline.worker.slots import COUNTERS, WholeSlot, scatter
from paceline.worker.torch import Trainee
from paceline.worker.torch_local import LocalTrainee
from paceline.worker.torch_optimizer import convert
from paceline.worker.torch_position import TorchOwn

if TYPE_CHECKING:
    from paceline.worker.context import Context

MAX_SEED = 1 << 31  # of the data's order


def prepare(ctx: "Context", objects: Sequence[Any], shard: bool) -> Any:
    """Bind what was given; see Context.prepare."""
    models = [o for o in objects if isinstance(o, nn.Module)]
    optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
    loaders = [o for o in objects if isinstance(o, DataLoader)]
    schedulers = [o for o in objects if hasattr(o, "step") and hasattr(o, "optimizer") and o not in optimizers]
    _check(objects, models, optimizers, loaders, schedulers)
    if ctx.assignment is None:
        _prepare_alone(ctx, optimizers, loaders)
        return objects[0] if len(objects) == 1 else tuple(objects)
    if ctx.job == "evaluator":
        _prepare_evaluator(ctx, models, optimizers)
        return objects[0] if len(objects) == 1 else tuple(objects)
    seed = 0
    if models:
        if ctx.is_prepared:
            raise UsageError("this run has its model and optimizer already: prepare() takes one pair a run")
        if not optimizers:
            raise UsageError("prepare(model) needs the optimizer in the same call: prepare(model, optimizer, loader)")
        ctx.progress.own = own = TorchOwn(optimizers[0], schedulers, ctx.say)
        seed = _join(ctx, models[0], optimizers[0], sum(batch_size_of(x) for x in loaders[:1]), own)
    elif optimizers:
        raise UsageError("prepare(optimizer) needs the model in the same call: prepare(model, optimizer, loader)")
    else:
        seed = ctx.seed
    trains = loaders[0] if loaders and (models or ctx.training_loader is None) else None
    result = [_loader(ctx, o, seed, shard, o is trains) if isinstance(o, DataLoader) else o for o in objects]
    return result[0] if len(result) == 1 else tuple(result)


def _check(objects: Sequence[Any], *kinds: list[Any]) -> None:
    known = {id(o) for kind in kinds for o in kind}
    for each in objects:
        if id(each) not in known:
            raise UsageError(
                f"prepare() takes a model, an optimizer, DataLoaders and schedulers, not a {type(each).__name__}"
            )
    if len(kinds[0]) > 1 or len(kinds[1]) > 1:
        raise UsageError("prepare() takes one model and one optimizer")
    for model in kinds[0]:
        if not any(True for _ in model.parameters()):
            raise UsageError(f"the model {type(model).__name__} has no parameters to train")


def _prepare_alone(ctx: "Context", optimizers: Sequence[torch.optim.Optimizer], loaders: Sequence[Any]) -> None:
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda *_: ctx.count_solo_step())
    for loader in loaders:
        note_epochs(loader, ctx.clock.epoch)


def _prepare_evaluator(
    ctx: "Context", models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    for model in models:
        evaluator = Evaluator(model, ctx.identity(), ctx.say)
        ctx.follow(evaluator)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(evaluator.refuse_step)


def _join(ctx: "Context", model: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int, own: TorchOwn) -> int:
    """1. bind to the arena; 2. join and wait for the others; 3. take the chief's values; 4. convert the optimizer;
    5. go on where this worker, or its predecessor, was."""
    assert ctx.assignment is not None
    trainee = _trainee(ctx, model, optimizer)  # 1
    client = trainee.connect(ctx.identity(), ctx.say)
    ctx.stand_by(trainee)
    remote = _Remote(ctx, trainee)
    is_local = isinstance(trainee, LocalTrainee)
    has_memory = bool(optimizer.state) and not is_local
    first = FirstValues(ctx, trainee, (lambda: remote.load_slots(optimizer)) if has_memory else lambda: None)
    try:
        started = client.join(trainee.spec, trainee.carried_block, first.send_rest, first.init)  # 2
    except ClosedAlready as closed:
        client.close()
        ctx.end_for_good(trainee, closed)
    except BaseException:
        client.close()  # a worker that was refused has no context yet that would
        raise
    if trainee.layout.carried_bytes and not ctx.is_chief:  # 3
        _, block = client.links[0].ask_bulk(m.Fetch("carried"), trainee.layout.carried_bytes)
        trainee.take_carried(block)
    trainee.joined(lambda: _loaded(ctx, trainee))
    if isinstance(trainee, LocalTrainee):  # 4
        trainee.follow(ctx.stepped)
    else:
        optimizer.state.clear()
        convert(optimizer, remote)
    ctx.seed, ctx.started_at = started.seed, started.global_step
    ctx.say(_start_line(ctx, client, batch_size))
    if started.position is not None:  # 5
        own.load(started.position)
        trainee.steps = started.position.steps
        ctx.progress.resume(started.position)
    ctx.begin(trainee, batch_size)
    if started.saves_next:
        ctx.announced(started.global_step + 1, writes=ctx.is_chief)
    return started.seed


class FirstValues:
    """What the chief initialises the ps with: its model, or with --resume a checkpoint."""

    def __init__(self, ctx: "Context", trainee: Trainee, what_it_remembers: Callable[[], None]) -> None:
        self._ctx = ctx
        self._trainee = trainee
        self._what_it_remembers = what_it_remembers
        self._restored: Restored | None = None
        self._is_looked_for = False

    def init(self, index: int) -> m.Init:
        """Called for every ps that has no values yet, before those of the arena are sent."""
        if not self._is_looked_for:
            self._is_looked_for = True
            self._look()
        if self._restored is not None:
            return self._restored.init(index, self._ctx.num_workers)
        return m.Init(seed=torch.initial_seed() % MAX_SEED)  # a script that seeds torch sees the same order again

    def _look(self) -> None:
        ctx, trainee = self._ctx, self._trainee
        assert ctx.assignment is not None
        settings = ctx.assignment.settings
        folder = RunPaths(settings.run_dir).checkpoints if settings.run_dir is not None else None
        is_again = ctx.assignment.source == "launcher" and ctx.assignment.incarnation >= first_incarnation(2)
        loaded = find(settings.resume if not (is_again and folder) else AUTO, folder, ctx.say)
        if loaded is None:
            return
        is_local = isinstance(trainee, LocalTrainee)
        self._restored = restored = Restored(loaded, trainee.layout, trainee.plan, trainee.spec.name, is_local)
        restored.lay_out(trainee.arena.memory)
        trainee.take_carried(bytearray(restored.carried_block()))
        ctx.resumed_from = loaded.path
        state = loaded.state
        ctx.say(f"Resuming from {loaded.path}: global step {state.global_step}, written in mode {state.mode}")
        if state.mode != settings.mode_spec:
            ctx.say(f"This start's flags say mode {settings.mode_spec}: that holds, not the checkpoint's {state.mode}")
        if not restored.has_slots:
            ctx.say("The checkpoint's optimizer state is of another mode's optimizer, so it starts anew")

    def send_rest(self) -> None:
        """After every ps has its parameters: what the optimizer remembers, and averages."""
        if self._restored is None:
            self._what_it_remembers()
        else:
            links = self._trainee.client.links
            self._restored.send_rest(links)
            self._restored.send_buffers(links[0], self._ctx.num_workers)


def _trainee(ctx: "Context", model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainee:
    assert ctx.assignment is not None
    settings, num_ps = ctx.assignment.settings, len(ctx.assignment.cluster.ps)
    if settings.mode == "local":
        outer = settings.mode_spec.outer, settings.outer_lr, settings.outer_momentum
        return LocalTrainee(model, optimizer, num_ps, settings.placement, *outer)
    return Trainee(model, optimizer, num_ps, settings.placement)


def _start_line(ctx: "Context", client: Client, batch_size: int) -> str:
    lanes = ", ".join(sorted({link.channel.lane for link in client.links}))
    batch = f"batch {batch_size} a worker" if batch_size else "batches of your own"
    if batch_size and not ctx.is_elastic:
        batch += f", {batch_size * ctx.num_workers} together"
    return f"Worker {ctx.worker_index} of {ctx.num_workers}: mode {client.dial.spec}, lane {lanes}, {batch}"


def _loaded(ctx: "Context", trainee: Trainee) -> None:
    """After model.load_state_dict: the chief's values go to the ps, before the first step or inside assign()."""
    if ctx.may_assign():
        trainee.assign_parameters()
    else:
        trainee.forget_steps()


def _loader(ctx: "Context", loader: DataLoader[Any], seed: int, shard: bool, trains: bool) -> DataLoader[Any]:
    assert ctx.assignment is not None
    data = ctx.assignment.settings.data if shard else "full"
    shared = share(loader, *ctx.place(), seed, data, ctx.say, ctx.place if ctx.is_elastic else None)
    if not trains:
        return note_epochs(shared, ctx.clock.epoch)
    ctx.training_loader = shared
    if isinstance(ctx.progress.own, TorchOwn):
        ctx.progress.own.follow(shared)
    return note_epochs(shared, ctx.clock.epoch, lambda count: ctx.saw_samples(shared, count), ctx.progress)


class _Remote:
    """What the converted optimizer calls."""

    def __init__(self, ctx: "Context", trainee: Trainee) -> None:
        self._ctx = ctx
        self._trainee = trainee

    def step(self) -> None:
        self._trainee.step()
        self._ctx.stepped()

    def before_zeroing(self) -> None:
        self._trainee.before_zeroing()

    def state_dict_slots(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """torch's shape of state: gathered from the ps for the moment of the call."""
        trained, tensors = self._trainee.layout.trained, self._trainee.tensors
        for tensor, named in self._trainee.slots().items():
            spec = trained[tensor]
            state = optimizer.state[tensors[spec.name]]
            named.pop(m.MASTER, None)  # torch knows no wider copy of a parameter
            named.pop(m.WIDE_AVERAGE, None)
            for name, whole in named.items():
                vector = flat(memoryview(whole.data), whole.dtype, 0, 1 if whole.is_scalar else spec.numel)
                state[name] = vector.reshape(()) if whole.is_scalar else shaped(vector, spec.shape, spec.stride)
        try:
            return type(optimizer).__mro__[1].state_dict(optimizer)  # type: ignore[attr-defined, no-any-return]
        finally:
            optimizer.state.clear()

    def load_slots(self, optimizer: torch.optim.Optimizer) -> None:
        """The chief's loaded state goes to the ps."""
        if not self._ctx.may_assign():
            return
        slots: dict[int, dict[str, WholeSlot]] = {}
        for index, spec in enumerate(self._trainee.layout.trained):
            state = optimizer.state.get(self._trainee.tensors[spec.name], {})
            slots[index] = {name: _whole(name, value, spec.stride) for name, value in state.items()}
        self._trainee.settle()
        scatter(self._trainee.client.links, self._trainee.plan, slots)


def _whole(name: str, value: Any, stride: tuple[int, ...]) -> WholeSlot:
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
    tensor = tensor.detach().to("cpu")
    if name in COUNTERS:
        return WholeSlot(NAMES[tensor.dtype], True, bytearray(as_bytes(tensor)))
    laid = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
    return WholeSlot(NAMES[tensor.dtype], False, bytearray(as_bytes(laid)))
