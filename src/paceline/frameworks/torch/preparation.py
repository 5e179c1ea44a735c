"""Join the cluster with a PyTorch script's objects (ctx.prepare): sort the arguments, bind them, share out the data.

Called by worker/preparation, which has the steps of joining. The model and the optimizer come back as the same objects.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.cluster.spelling import with_article
from paceline.errors import UsageError
from paceline.frameworks.torch.constraints import bind, hold_after_steps
from paceline.frameworks.torch.data import batch_size_of, note_epochs, share
from paceline.frameworks.torch.local import LocalTorchStep
from paceline.frameworks.torch.position import TorchOwn
from paceline.frameworks.torch.training_step import TorchStep
from paceline.worker.preparation import check_pair, evaluate, join
from paceline.worker.script import script_line
from paceline.worker.step.local_steps import bound_by

if TYPE_CHECKING:
    from paceline.worker.session import WorkerSession


def prepare(session: "WorkerSession", objects: Sequence[Any], shard: bool) -> Sequence[Any]:
    """Bind what was given, and return it in the same order."""
    models = [o for o in objects if isinstance(o, nn.Module)]
    optimizers = [o for o in objects if isinstance(o, torch.optim.Optimizer)]
    loaders = [o for o in objects if isinstance(o, DataLoader)]
    schedulers = [o for o in objects if hasattr(o, "step") and hasattr(o, "optimizer") and o not in optimizers]
    _check(objects, models, optimizers, loaders, schedulers)
    if session.assignment is None:

        def count_step(*_: Any) -> None:
            session.alone_step += 1

        for optimizer in optimizers:
            bind(optimizer, models[0] if models else None)
            hold_after_steps(optimizer)
            optimizer.register_step_post_hook(count_step)
        for loader in loaders:
            note_epochs(loader, session.clock)
        return objects
    if session.job == "evaluator":
        for model in models:
            names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
            evaluator = evaluate(session, {name: _taking(model, name) for name in names})
            for optimizer in optimizers:
                optimizer.register_step_pre_hook(evaluator.refuse_step)
        return objects
    check_pair(session, bool(models), bool(optimizers))
    seed = session.seed
    if models:
        session.progress.own = own = TorchOwn(optimizers[0], schedulers, session.say)
        binding = _Binding(session, models[0], optimizers[0], own)
        seed = join(session, binding, sum(batch_size_of(x) for x in loaders[:1]))
    trains = loaders[0] if loaders and (models or session.training_loader is None) else None
    return [_loader(session, o, seed, shard, o is trains) if isinstance(o, DataLoader) else o for o in objects]


def _check(objects: Sequence[Any], *kinds: list[Any]) -> None:
    known = {id(o) for kind in kinds for o in kind}
    for each in objects:
        if id(each) not in known:
            given = with_article(type(each).__name__)
            raise UsageError(f"prepare() takes a model, an optimizer, DataLoaders and schedulers, not {given}")
    if len(kinds[0]) > 1 or len(kinds[1]) > 1:
        raise UsageError("prepare() takes one model and one optimizer")
    for optimizer in kinds[1]:
        if isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            raise UsageError(
                f"prepare() was given {with_article(type(optimizer).__name__)} that wraps an {type(inner).__name__}"
                f"{script_line()}: call ctx.prepare() with the model and the optimizer themselves, and give what it "
                "returns to the library (accelerator.prepare(), fabric.setup())"
            )
    for model in kinds[0]:
        if not any(True for _ in model.parameters()):
            raise UsageError(f"the model {type(model).__name__} has no parameters to train")


def _taking(model: nn.Module, name: str) -> Callable[[Any], None]:
    """Return what takes the values of a tensor. Find it by name then: the model may assign a buffer anew."""
    prefix, _, leaf = name.rpartition(".")

    def take(values: Any) -> None:
        with torch.no_grad():
            getattr(model.get_submodule(prefix), leaf).copy_(torch.from_numpy(values))

    return take


class _Binding:
    """One model and its optimizer around joining (worker/preparation)."""

    def __init__(
        self, session: "WorkerSession", model: nn.Module, optimizer: torch.optim.Optimizer, own: TorchOwn
    ) -> None:
        bind(optimizer, model)
        self.own = own
        self.training_step = bound_by(session, TorchStep, LocalTorchStep, model, optimizer, takes=session.takes)
        self.send_memory, self.convert = self.training_step.send_memory, self.training_step.follow

    def seed(self) -> int:
        return torch.initial_seed()


def _loader(session: "WorkerSession", loader: DataLoader[Any], seed: int, shard: bool, trains: bool) -> DataLoader[Any]:
    assert session.assignment is not None
    data = session.assignment.settings.data if shard else "full"
    shared = share(loader, *session.place(), seed, data, session.say, session.place if session.is_elastic else None)
    if not trains:
        return note_epochs(shared, session.clock)
    session.training_loader = shared
    if isinstance(session.progress.own, TorchOwn):
        session.progress.own.follow(shared)
    has_weights = session.num_workers > 1 or session.is_elastic
    return note_epochs(shared, session.clock, lambda: session.begin_pass(shared), session.progress, has_weights)
