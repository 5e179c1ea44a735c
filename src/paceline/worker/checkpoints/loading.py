"""Load a checkpoint into a plain program's own model and optimizer: paceline.load_checkpoint.

For going on as one process, evaluating and fine-tuning; frameworks/torch/checkpoint and frameworks/keras/checkpoint put
the values in. Must never import a framework itself: a TensorFlow process has no torch, and a torch process no
TensorFlow.
"""

from pathlib import Path
from typing import Any

from paceline.checkpoint.request import at
from paceline.errors import UsageError
from paceline.worker.framework import is_of_keras, keras_module, torch_module


def load_checkpoint(
    path: str | Path, model: Any, optimizer: Any = None, ema: bool = False, names: Any = None
) -> int:  # fmt: skip
    """Load a checkpoint, or the newest of a run folder, into plain objects of torch or Keras; returns its global step.

    `ema`: the averaged parameters of a run with --ema instead of the last ones. The optimizer gets its state and its
    lr as they were (in torch: all options of its groups). `names`: for a Keras model whose weights are called
    otherwise in the checkpoint, as in ctx.prepare.
    """
    is_keras = is_of_keras(type(model))
    if names is not None and not is_keras:
        raise UsageError("names= is for Keras models: it says what their weights are called in the checkpoint")
    loaded = at(Path(path), _warn, f"load_checkpoint({str(path)!r})", "give a checkpoint or a run folder")
    if ema and loaded.averages is None:
        raise UsageError(f"{loaded.path} holds no averaged parameters: the run was not started with --ema.")
    if optimizer is not None and loaded.state.mode.name == "local":
        raise UsageError(
            f"{loaded.path} is of mode local, where each worker has its own optimizer: load the model alone."
        )
    tensors = {**loaded.model, **((loaded.averages or {}) if ema else {})}
    if is_keras:
        keras_module("checkpoint").load(loaded, tensors, model, optimizer, names)
    else:
        torch_module("checkpoint").load(loaded, tensors, model, optimizer)
    return loaded.state.global_step


def _warn(line: str) -> None:
    print(line, flush=True)
