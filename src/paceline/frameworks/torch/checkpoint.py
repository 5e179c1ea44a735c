"""Load a checkpoint into a plain PyTorch model and optimizer, bit for bit, without a cluster.

Called by worker/checkpoints/loading. Reads what checkpoint/read has checked; nothing that a file holds is ever run.
Never writes.
"""

from typing import Any

import torch
from torch import nn

from paceline.checkpoint.read import Loaded
from paceline.checkpoint.tensors import Entry
from paceline.errors import UsageError
from paceline.frameworks.torch.layout import named_tensors
from paceline.frameworks.torch.options import load_groups
from paceline.views import DTYPES
from paceline.wire.messages import MASTER, WIDE_AVERAGE
from paceline.worker.checkpoints.restoring import refuse_other_model


def load(
    loaded: Loaded, tensors: dict[str, Entry], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:  # fmt: skip
    """Copy these tensors into the model; give the optimizer its state and its groups' options (lr, …) as they were."""
    own = named_tensors(model, optimizer)
    refuse_other_model(
        loaded.path, {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in own.items()}, tensors
    )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(_tensor(tensors[name]))
    if optimizer is not None:
        _load_optimizer(loaded, own, optimizer)


def _tensor(entry: Entry) -> torch.Tensor:
    if not entry.size_bytes:
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    return torch.frombuffer(bytearray(entry.data), dtype=DTYPES[entry.dtype]).reshape(entry.shape)


def _load_optimizer(loaded: Loaded, own: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    state = loaded.state
    if type(optimizer).__name__ != state.optimizer:
        raise UsageError(f"{loaded.path} was written by {state.optimizer}, not by {type(optimizer).__name__}.")
    if not load_groups(optimizer, state.groups):
        raise UsageError(
            f"{loaded.path} has {len(state.groups)} parameter groups, this optimizer {len(optimizer.param_groups)}."
        )
    slots: dict[str, dict[str, Any]] = {}
    for name, entry in loaded.optimizer.items():
        tensor, _, slot = name.rpartition(".")
        if slot not in (MASTER, WIDE_AVERAGE):
            slots.setdefault(tensor, {})[slot] = _tensor(entry)
    optimizer.state.clear()
    for name, values in slots.items():
        if name in own:
            parameter = own[name]
            optimizer.state[parameter] = {n: v if v.dim() == 0 else v.to(parameter.device) for n, v in values.items()}
