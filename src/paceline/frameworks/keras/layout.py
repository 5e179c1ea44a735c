"""Describe a Keras model and its optimizer to a ps: the layout, and the optimizer's name and numbers.

Used by frameworks/keras/training_step, frameworks/keras/preparation and frameworks/keras/checkpoint. Numbers travel,
code never does. Imports neither Keras nor TensorFlow: it looks at what it is given.

`names` lets a Keras model train beside a torch one: it says, for each of this model's weights, what the cluster calls
it, and where that has its axes in another order: {"dense/kernel": ("0.weight", (1, 0)), "dense/bias": "0.bias"}.
The layout follows the order of `names`, and the ps then run torch's formulas.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from paceline.errors import UsageError
from paceline.frameworks.keras.constraints import constraint_of
from paceline.params.layout import ITEM_BYTES, Layout, TensorSpec, widest_first
from paceline.wire.messages import OptimizerSpec, Options

# Keras's class -> the options that are numbers of its own, under Keras's names.
MAPPED: dict[str, tuple[str, ...]] = {
    "SGD": ("momentum", "nesterov"),
    "Adam": ("beta_1", "beta_2", "epsilon", "amsgrad"),
    "AdamW": ("beta_1", "beta_2", "epsilon", "amsgrad"),
    "Adagrad": ("initial_accumulator_value", "epsilon"),
    "RMSprop": ("rho", "momentum", "epsilon", "centered"),
}
AS_TORCH = ("SGD", "Adam", "AdamW")  # these can also be said in torch's words, for a cluster of both

STATISTICS = ("moving_mean", "moving_variance")  # of BatchNormalization

Names = Mapping[str, str | tuple[str, Sequence[int]]]


@dataclass(frozen=True)
class Weight:
    """One weight of a model: what the layout calls it, and the order of its axes there."""

    spec: TensorSpec
    variable: Any
    axes: tuple[int, ...]

    def as_own(self, view: Any) -> Any:
        """View an array that has the layout's order of axes in the model's own order."""
        return view if self.is_plain else view.transpose(np.argsort(self.axes))

    def as_laid_out(self, values: Any) -> Any:
        """View an array that has the model's order of axes in the layout's."""
        return values if self.is_plain else values.transpose(self.axes)

    @property
    def is_plain(self) -> bool:
        return self.axes == tuple(range(len(self.axes)))


def describe(model: Any, optimizer: Any, names: Names | None) -> tuple[Layout, dict[str, Weight]]:
    """Return the layout of a model, and its weights by the layout's names. `optimizer`: if it is to run on the ps."""
    named = _named(model, names)
    if not model.trainable_weights:
        raise UsageError(
            f"the model {type(model).__name__} has nothing to train: all of its {len(model.weights)} weights are "
            "non-trainable state"
        )
    trained = {id(v) for v in model.trainable_weights}
    buffers = _buffers(model)
    weights: dict[str, Weight] = {}
    for name, axes, variable in named:
        group = _group(optimizer, variable) if id(variable) in trained else -1
        spec = _spec(name, variable, axes, group)
        if group >= 0:
            spec = replace(spec, constraint=constraint_of(name, variable, axes, is_local=optimizer is None))
        elif id(variable) in buffers:
            spec = replace(spec, buffer=buffers[id(variable)])
        weights[name] = Weight(spec, variable, axes)
    return widest_first(w.spec for w in weights.values()), weights


def _buffers(model: Any) -> dict[int, Literal["plain", "statistic"]]:
    """Return what layers never train, by the ids of their variables: state of each worker's own, as torch's buffers
    are. Those of a frozen layer that could be trained are parameters."""
    found: dict[int, Literal["plain", "statistic"]] = {}
    for layer in model._flatten_layers():
        is_norm = any(
            c.__name__ == "BatchNormalization" and c.__module__.startswith("keras.") for c in type(layer).__mro__
        )
        statistics = [getattr(layer, name, None) for name in STATISTICS] if is_norm else []
        for variable in layer._non_trainable_variables:
            found[id(variable)] = "statistic" if any(variable is each for each in statistics) else "plain"
    return found


def weights_of(model: Any, names: Names | None) -> dict[str, Weight]:
    """Return the weights by the layout's names, whether they are trained or not."""
    return {name: Weight(_spec(name, v, axes, -1), v, axes) for name, axes, v in _named(model, names)}


def _named(model: Any, names: Names | None) -> list[tuple[str, tuple[int, ...], Any]]:
    """Return every variable once (a shared layer's too), with its name and axes in the layout."""
    if not model.built or not model.weights:
        raise UsageError(
            f"the model {type(model).__name__} is not built yet, so nobody knows its weights: give it a keras.Input, "
            "or call model.build(input_shape) or model(batch), before prepare() or load_checkpoint()"
        )
    own = {id(v): v for v in model.weights}
    twice = [path for path, count in Counter(v.path for v in own.values()).items() if count > 1]
    if twice:
        raise UsageError(f"several weights are called {twice[0]}: give the layers names of their own")
    if names is None:
        return [(v.path, tuple(range(len(v.shape))), v) for v in own.values()]
    by_path = {v.path: v for v in own.values()}
    found = []
    for path, said in names.items():
        if path not in by_path:
            near = get_close_matches(path, by_path, 1)
            hint = f"; did you mean {near[0]}?" if near else f": it has {', '.join(by_path)}"
            raise UsageError(f"names: this model has no weight {path}{hint}")
        variable = by_path.pop(path)
        name, axes = (said, range(len(variable.shape))) if isinstance(said, str) else said
        if sorted(axes) != list(range(len(variable.shape))):
            raise UsageError(f"names: {path} has {len(variable.shape)} axes, and {list(axes)} is no order of them")
        found.append((name, tuple(axes), variable))
    if by_path:
        raise UsageError(f"names: say what the cluster calls {', '.join(by_path)}, too")
    return found


def _spec(name: str, variable: Any, axes: tuple[int, ...], group: int) -> TensorSpec:
    if variable.dtype not in ITEM_BYTES:
        raise UsageError(f"{name} has dtype {variable.dtype}, which cannot be sent: use one of {', '.join(ITEM_BYTES)}")
    shape = tuple(int(variable.shape[axis]) for axis in axes)
    stride = tuple(math.prod(max(1, extent) for extent in shape[axis + 1 :]) for axis in range(len(shape)))
    return TensorSpec(name, shape, stride, variable.dtype, group)


def _group(optimizer: Any, variable: Any) -> int:
    """Return 1 for what exclude_from_weight_decay() names, also without a decay, which may come later; else 0."""
    return 0 if optimizer is None or optimizer._use_weight_decay(variable) else 1


def num_groups(layout: Layout) -> int:
    """Count the groups with tensors in them, as in torch; it stays so, whatever the options become."""
    return 1 + max(t.group for t in layout.trained)


def optimizer_spec(optimizer: Any, groups: int, as_torch: bool) -> OptimizerSpec:
    """Return the name and the numbers of a Keras optimizer, as a ps takes them."""
    kind = type(optimizer).__name__
    if kind not in MAPPED or not type(optimizer).__module__.startswith("keras."):
        raise UsageError(
            f"{kind} cannot run on a ps: its formulas are not known there. These are: {', '.join(MAPPED)}, with "
            "momentum, Nesterov and AMSGrad (`--mode local` takes any optimizer: there it runs on the worker)"
        )
    refuse_extras(optimizer)
    if as_torch and kind not in AS_TORCH:
        raise UsageError(f"names: beside a torch worker the optimizer is one of {', '.join(AS_TORCH)}, not {kind}")
    options = group_options(optimizer, learning_rate(optimizer), groups, as_torch)
    return OptimizerSpec(kind if as_torch else f"keras.{kind}", options)


def refuse_extras(optimizer: Any) -> None:
    """Refuse what Keras does around an update with memory of its own: it would be left out."""
    for option, instead in (
        ("use_ema", "the ps keep averages with --ema"),
        ("gradient_accumulation_steps", "`--mode sync --extra-tokens` sums several gradients a worker on the ps"),
    ):
        if getattr(optimizer, option, None):
            raise UsageError(f"{type(optimizer).__name__}({option}=…) runs beside the update, on the ps: {instead}")


def learning_rate(optimizer: Any) -> float:
    """Return the learning rate as it is now; of a schedule, at this iteration."""
    return float(optimizer.learning_rate)


def group_options(optimizer: Any, lr: float, groups: int, as_torch: bool) -> list[Options]:
    """Return the options of each group: with weight decay, and without."""
    made = _torch_options if as_torch else _options
    return [made(optimizer, lr, decay) for decay in (float(optimizer.weight_decay or 0.0), 0.0)[:groups]]


def _options(optimizer: Any, lr: float, decay: float) -> Options:
    own = {name: getattr(optimizer, name) for name in MAPPED[type(optimizer).__name__]}
    numbers: Options = {name: value if isinstance(value, bool) else float(value) for name, value in own.items()}
    return {"lr": lr, "weight_decay": decay, **numbers}


def _torch_options(optimizer: Any, lr: float, decay: float) -> Options:
    """Say the same in torch's words. Torch has its epsilon, and its lr beside the momentum, elsewhere."""
    plain: Options = {"lr": lr, "foreach": None, "maximize": False, "differentiable": False, "fused": None}
    kind = type(optimizer).__name__
    if kind == "SGD":
        if decay:
            raise UsageError("names: Keras's weight decay of SGD is no torch option; use AdamW, or none")
        momentum, nesterov = float(optimizer.momentum), bool(optimizer.nesterov and optimizer.momentum)
        return {**plain, "momentum": momentum, "nesterov": nesterov, "dampening": 0.0, "weight_decay": 0.0}
    if kind == "Adam" and decay:
        raise UsageError("names: Adam(weight_decay=…) of Keras is what torch calls AdamW; use AdamW")
    return {
        **plain, "betas": [float(optimizer.beta_1), float(optimizer.beta_2)], "eps": float(optimizer.epsilon),
        "weight_decay": decay, "amsgrad": bool(optimizer.amsgrad), "capturable": False,
        "decoupled_weight_decay": kind == "AdamW",
    }  # fmt: skip
