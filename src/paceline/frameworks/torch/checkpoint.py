"""HOW does a plain PyTorch program take a checkpoint? Into its own model and optimizer, bit for bit, without a cluster.

Called by worker/loading: to go on as one process, to evaluate, to fine-tune. Reads what checkpoint/read has checked;
nothing that a file holds is ever run. Never writes.
"""

from typing import Any

import torch
from torch import nn

from paceline.checkpoint.read import Loaded
from paceline.checkpoint.tensors import Entry
from paceline.errors import UsageError
from paceline.views import DTYPES
from paceline.wire.messages import MASTER, WIDE_AVERAGE
from paceline.worker.options import load_groups


def load(
    loaded: Loaded, tensors: dict[str, Entry], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:  # fmt: skip
    """These tensors into the model; the optimizer gets its state and its groups' options (lr, …) as they were."""
    own = _tensors(model, optimizer)
    _check(loaded, own, tensors)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(_tensor(tensors[name]))
    if optimizer is not None:
        _load_optimizer(loaded, own, optimizer)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Every tensor of the model by its first name, as a checkpoint calls it, and what only the optimizer holds."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    named: list[tuple[str, torch.Tensor]] = list(model.state_dict(keep_vars=True).items())
    if optimizer is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        named += [(f"optimizer.{number}", p) for number, p in enumerate(parameters)]
    for name, tensor in named:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def _check(loaded: Loaded, own: dict[str, torch.Tensor], tensors: dict[str, Entry]) -> None:
    lines = [f"- {name}: not in the checkpoint" for name in own if name not in tensors]
    lines += [f"+ {name}: only in the checkpoint" for name in tensors if name not in own]
    for name in own.keys() & tensors.keys():
        entry, tensor = tensors[name], own[name]
        if (DTYPES[entry.dtype], entry.shape) != (tensor.dtype, tuple(tensor.shape)):
            here = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            lines.append(f"~ {name}: here {here}, in the checkpoint {entry.dtype}{list(entry.shape)}")
    if lines:
        raise UsageError(f"The checkpoint {loaded.path} is of another model: " + "\n".join(sorted(lines)))


def _tensor(entry: Entry) -> torch.Tensor:
    if not entry.size_bytes:
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    return torch.frombuffer(bytearray(entry.data), dtype=DTYPES[entry.dtype]).reshape(entry.shape)


def _load_optimizer(loaded: Loaded, own: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    state = loaded.state
    if state.mode.name == "local":
        raise UsageError(
            f"{loaded.path} is of mode local, where each worker has its own optimizer: load the model alone."
        )
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
