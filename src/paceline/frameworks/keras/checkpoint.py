"""Load a checkpoint into a plain Keras model and optimizer, bit for bit, without a cluster.

Called by worker/checkpoints/loading. Nothing that a file holds is ever run. Never writes. Must never import torch.
"""

from collections.abc import Mapping
from typing import Any

import keras

from paceline.checkpoint.read import Loaded
from paceline.checkpoint.tensors import Entry
from paceline.errors import UsageError
from paceline.frameworks.keras.gradients import vector
from paceline.frameworks.keras.layout import Names, Weight, weights_of
from paceline.frameworks.keras.optimizer_state import SLOTS, variables_of
from paceline.frameworks.keras.training_step import assign

MOST_SAID = 4  # differences in a sentence


def load(loaded: Loaded, tensors: Mapping[str, Entry], model: Any, optimizer: Any, names: Names | None) -> None:
    """Copy these tensors into the model; give the optimizer its state, its iterations and its lr as they were."""
    weights = weights_of(model, names)
    _refuse_other_model(loaded, weights, tensors)
    if optimizer is not None:
        own = f"keras.{type(optimizer).__name__}"
        if own != loaded.state.optimizer:
            raise UsageError(
                f"{loaded.path} was written by {loaded.state.optimizer}, not by {own}: load the model alone."
            )
        _load_optimizer(loaded, weights, model, optimizer)
    for name, weight in weights.items():
        _put(weight.variable, weight, tensors[name])


def _put(variable: Any, weight: Weight, entry: Entry) -> None:
    flat = vector(memoryview(entry.data), entry.dtype, 0, weight.spec.numel)
    assign(variable, weight.as_own(flat.reshape(entry.shape)))


def _refuse_other_model(loaded: Loaded, weights: Mapping[str, Weight], tensors: Mapping[str, Entry]) -> None:
    said = [f"it has no {name}" for name in weights if name not in tensors]
    said += [f"only it has {name}" for name in tensors if name not in weights]
    by_path = " (weights go by Keras's paths: name model and layers as in that run, or say which is which in names=)"
    hint = by_path if said else ""
    for name in sorted(weights.keys() & tensors.keys()):
        entry, spec = tensors[name], weights[name].spec
        if (entry.dtype, entry.shape) != (spec.dtype, spec.shape):
            there, here = f"{entry.dtype}{list(entry.shape)}", f"{spec.dtype}{list(spec.shape)}"
            said.append(f"{name} is {there} there and {here} here")
    if said:
        more = [f"and {len(said) - MOST_SAID} more"] if len(said) > MOST_SAID else []
        told = ", ".join([*said[:MOST_SAID], *more])
        raise UsageError(f"The checkpoint {loaded.path} is of another model: {told}{hint}.")


def _load_optimizer(loaded: Loaded, weights: Mapping[str, Weight], model: Any, optimizer: Any) -> None:
    """Set what the optimizer had. A learning rate that is a schedule stays one: it follows the iterations."""
    state = loaded.state
    optimizer.build(model.trainable_variables)
    for name, entry in loaded.optimizer.items():
        tensor, _, slot = name.rpartition(".")
        weight = weights.get(tensor)
        if weight is None or slot not in SLOTS or not weight.variable.trainable:
            continue
        kept = variables_of(optimizer, slot)
        if kept is None:
            raise UsageError(f"{loaded.path} holds a {slot} of every weight, and this optimizer is made without one.")
        _put(kept[optimizer._get_variable_index(weight.variable)], weight, entry)
    chief = state.worker(0)
    said = (chief.groups if chief is not None else None) or [{}]
    iterations = said[0].get("iterations")
    optimizer.iterations.assign(iterations if isinstance(iterations, int) else state.global_step)
    lr = state.groups[0].get("lr") if state.groups else None
    if isinstance(lr, float) and isinstance(optimizer._learning_rate, keras.Variable):
        optimizer.learning_rate = lr
