"""Join the cluster with a Keras script's objects (ctx.prepare): sort the arguments, bind them, share out the data.

Called by worker/preparation, which has the steps of joining. The model and the optimizer come back as the same objects.
"""

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from paceline.errors import UsageError
from paceline.frameworks.keras.constraints import bind
from paceline.frameworks.keras.data import batch_size_of, share
from paceline.frameworks.keras.layout import Names, Weight, describe
from paceline.frameworks.keras.local import LocalKerasStep
from paceline.frameworks.keras.objects import change, check_compiled, convert_model
from paceline.frameworks.keras.position import KerasOwn
from paceline.frameworks.keras.training_step import IS_TENSORFLOW, KerasStep, assign, tf
from paceline.worker.preparation import check_pair, evaluate, join
from paceline.worker.step.local_steps import bound_by

if TYPE_CHECKING:
    from paceline.worker.session import WorkerSession

BACKENDS = ("tensorflow", "torch")


def prepare(
    session: "WorkerSession", objects: Sequence[Any], shard: bool, names: Names | None
) -> Sequence[Any]:  # fmt: skip
    """Bind what was given, and return it in the same order."""
    models = [o for o in objects if isinstance(o, keras.Model)]
    optimizers = [o for o in objects if isinstance(o, keras.optimizers.Optimizer)]
    datasets = [o for o in objects if IS_TENSORFLOW and isinstance(o, tf.data.Dataset)]
    _check(objects, models, optimizers, datasets)
    if session.assignment is None:
        for model in models:
            bind(model.trainable_weights, is_kept=False)
        if optimizers:
            session.count_alone(lambda: int(optimizers[0].iterations.numpy()))
        return objects
    if session.job == "evaluator":
        for model in models:
            _, weights = describe(model, None, names)
            evaluator = evaluate(session, {name: _taking(weight) for name, weight in weights.items()})
            for optimizer in optimizers:
                change(optimizer, {"apply": evaluator.refuse_step})
        return objects
    check_pair(session, bool(models), bool(optimizers))
    if models:
        binding = _Binding(session, models[0], optimizers[0], names)
        session.progress.own = binding.own
        join(session, binding, sum(batch_size_of(x) for x in datasets[:1]))
    data = session.assignment.settings.data if shard else "full"
    shared = {id(each): share(each, *session.place(), data, session.say) for each in datasets}
    return [shared.get(id(each), each) for each in objects]


def _check(objects: Sequence[Any], models: Sequence[Any], optimizers: Sequence[Any], datasets: Sequence[Any]) -> None:
    backend = keras.backend.backend()
    if backend not in BACKENDS:
        raise UsageError(
            f"Keras runs on {backend} here: paceline trains Keras models on {' and '.join(BACKENDS)} "
            "(KERAS_BACKEND=tensorflow)"
        )
    known = {id(each) for each in (*models, *optimizers, *datasets)}
    for each in objects:
        if id(each) not in known:
            raise UsageError(
                "prepare() takes a Keras model, a Keras optimizer and tf.data sets, not a "
                f"{type(each).__module__.partition('.')[0]} {type(each).__name__}"
            )
    if len(models) > 1 or len(optimizers) > 1:
        raise UsageError("prepare() takes one model and one optimizer")


def _taking(weight: Weight) -> Callable[[Any], None]:
    return lambda values: assign(weight.variable, weight.as_own(values))


class _Binding:
    """One model and its optimizer around joining (worker/preparation)."""

    def __init__(self, session: "WorkerSession", model: Any, optimizer: Any, names: Names | None) -> None:
        self._session = session
        self._model = model
        check_compiled(model, optimizer)
        self.training_step: KerasStep = bound_by(session, KerasStep, LocalKerasStep, model, optimizer, names)
        self.own = KerasOwn(model, optimizer, self.training_step.forget_count)
        self.send_memory = self.training_step.send_memory

    def seed(self) -> int:
        """Return what keras.utils.set_random_seed has set, among others."""
        word = random.getstate()[1][0]
        return int(word)

    def convert(self) -> None:
        training_step = self.training_step
        bind([weight.variable for weight in training_step.trained], is_kept=not training_step.is_local)
        training_step.follow()
        convert_model(self._model, training_step, self._session.clock.epoch, self._session.progress)
        for kept in ("train_function", "test_function", "predict_function"):
            setattr(self._model, kept, None)  # graphs from before would train beside the ps
