"""Have a user's Keras model and optimizer train with the ps: their classes become subclasses of their own.

Called by frameworks/keras/preparation and frameworks/keras/training_step. The objects stay the same, and so do the
names and modules of their classes, by which they are saved and serialised.

- The optimizer keeps all that Keras does around an update: filtering, unscaling, clipping, counting iterations. The
  update itself goes to the ps; what it would remember here is not made.
- The model tells when values were loaded into it. It is not compiled with XLA: a compiled graph cannot call out.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from paceline.errors import UsageError
from paceline.exits import true_error
from paceline.worker.positions.position import Progress
from paceline.worker.script import script_line

if TYPE_CHECKING:
    from paceline.frameworks.keras.training_step import KerasStep

LOADERS = ("load_weights", "set_weights")


def convert_optimizer(optimizer: Any, training_step: "KerasStep") -> None:
    """Change the optimizer in place: same object, its `apply` and `apply_gradients` go to the ps."""

    def build(self: Any, variables: Sequence[Any]) -> None:
        if not self.built:
            keras.optimizers.Optimizer.build(self, variables)  # which variables are its own, and no more

    def backend_apply_gradients(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> None:
        training_step.apply(self._clip_gradients(list(grads)), trainable_variables)

    def exclude_from_weight_decay(self: Any, *args: Any, **options: Any) -> None:
        raise UsageError(
            f"optimizer.exclude_from_weight_decay() comes after prepare(){script_line()}, when the ps know what "
            "decays: call it before prepare()"
        )

    base = type(optimizer)

    def variables(self: Any) -> Any:
        training_step.show_state()
        return base.variables.fget(self)

    def showing(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            training_step.show_state()
            return getattr(base, name)(self, *args)

        return call

    own = [build, exclude_from_weight_decay]
    members: dict[str, Any] = {member.__name__: member for member in own}
    members |= {name: showing(name) for name in ("set_weights", "load_own_variables", "save_own_variables")}
    members |= {"_backend_apply_gradients": backend_apply_gradients, "variables": property(variables)}
    change(optimizer, members)


def convert_model(model: Any, training_step: "KerasStep", on_epoch: Callable[[], None], progress: Progress) -> None:
    """Change the model in place: same object, its loaders tell of new values, and its fit of epochs and errors."""
    base = type(model)

    def compile_(self: Any, *args: Any, **options: Any) -> Any:
        result = base.compile(self, *args, **options)
        check_compiled(self, training_step.optimizer)
        return result

    never = property(lambda self: False, lambda self, value: None)  # whatever compile() or the script asks for
    members: dict[str, Any] = {name: _loader(base, name, training_step) for name in LOADERS}
    change(model, {**members, "fit": _fit(base, on_epoch, progress), "compile": compile_, "jit_compile": never})


def change(target: Any, members: dict[str, Any]) -> None:
    """Give an object a subclass of its own class, under the same name. What else is of that class stays as it is."""
    base = type(target)
    own = {name: _only_for(target, getattr(base, name), member) for name, member in members.items()}
    named = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    made = type(base.__name__, (base,), {**own, **named})
    _register(made, base)
    # Keras's own __setattr__ would look at it as at a layer's attribute.
    object.__setattr__(target, "__class__", made)


def _only_for(target: Any, plain: Any, member: Any) -> Any:
    """Return a member for this object alone: Keras makes clones and copies of the class of what they are made from."""
    if isinstance(member, property):
        pairs = (plain.fget, member.fget), (plain.fset, member.fset)
        return property(*[_only_for(target, *pair) if pair[1] is not None else None for pair in pairs])

    def method(self: Any, *args: Any, **options: Any) -> Any:
        return (member if self is target else plain)(self, *args, **options)

    return method


def _register(made: type[Any], base: type[Any]) -> None:
    """Register the new class as its base is: it is saved under that name, and loaded as what was registered."""
    registered = keras.saving.get_registered_name(base)
    if registered != base.__name__:
        package, _, name = registered.rpartition(">")
        for each in (made, base):  # the last one is who is made of a file
            keras.saving.register_keras_serializable(package, name)(each)


def _loader(base: type[Any], name: str, training_step: "KerasStep") -> Callable[..., Any]:
    plain = getattr(base, name)

    def load(self: Any, *args: Any, **options: Any) -> Any:
        result = plain(self, *args, **options)
        training_step.on_load()
        return result

    return load


def _fit(base: type[Any], on_epoch: Callable[[], None], progress: Progress) -> Callable[..., Any]:
    signature = inspect.signature(base.fit)

    def begin_epoch() -> None:
        on_epoch()
        progress.begin_fit_epoch()

    def fit(self: Any, *args: Any, **options: Any) -> Any:
        bound = signature.bind(self, *args, **options)
        own = bound.arguments.get("callbacks")
        progress.begin_fit(counts_on=bool(bound.arguments.get("initial_epoch")))
        told = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: begin_epoch(), on_epoch_end=lambda epoch, logs: progress.end_fit_epoch()
        )
        if isinstance(own, keras.callbacks.CallbackList):
            own.append(told)
        else:
            bound.arguments["callbacks"] = [*([own] if isinstance(own, keras.callbacks.Callback) else own or []), told]
        try:
            return base.fit(*bound.args, **bound.kwargs)
        except Exception as error:
            true = true_error(error)
            if true is error:
                raise
            raise true from None

    return fit


def check_compiled(model: Any, optimizer: Any) -> None:
    """Refuse a model that is compiled with another optimizer: it would train beside the ps."""
    used = getattr(model, "optimizer", None)
    if used is not None and used is not optimizer and getattr(used, "inner_optimizer", None) is not optimizer:
        raise UsageError(
            "model.compile() was given another optimizer than prepare(): give both the same object, "
            "model.compile(optimizer=optimizer, …) and prepare(model, optimizer)"
        )
