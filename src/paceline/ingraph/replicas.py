"""WHAT does one tower do? It holds a copy of the model, and makes a batch into a loss and its gradient.

Used by ingraph/towers for devices of this task and by ingraph/copies for those of others: the arithmetic of a tower is
the same wherever it stands. Must never change the model that it is a copy of.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from paceline.errors import UsageError
from paceline.ingraph.attributes import attributes_of, changed, check_structure, put, structure_of
from paceline.ingraph.op import Op
from paceline.ingraph.precision import Precision, plain_on

Loss = Callable[..., torch.Tensor]  # of a model and what a batch holds
Batch = Sequence[Any] | Mapping[str, Any]


class Computed(msgspec.Struct, frozen=True):
    """What a tower made of one batch; gradients in the order of the model's parameters, None where there is none."""

    loss: Any
    gradients: list[Any]
    buffers: list[Any]  # as the forward pass has left them


class Tower(Protocol):
    """One copy of the model, on one device."""

    place: str  # towers of one place take turns

    def load(self, model: nn.Module) -> None:
        """Take the model's values, and the precision of this thread; called while this tower computes nothing."""

    def compute(self, loss: Loss, batch: Batch) -> Computed:
        """The gradient of one batch, in whichever thread calls."""

    def close(self) -> None: ...


class LocalTower:
    """A tower on a device of this task."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.place = str(device)
        self._device = device
        self._copy = copy.deepcopy(model).to(device)
        self._structure, self._attributes = structure_of(model), attributes_of(model)
        self._precision = Precision.now()

    def load(self, model: nn.Module) -> None:
        check_structure(model, self._structure)
        known, self._attributes = self._attributes, attributes_of(model)
        put(self._copy, changed(self._attributes, known))
        self._precision = Precision.now()
        follow(self._copy, training_of(model), trained_of(model))
        mine, its = tensors_of(self._copy), tensors_of(model)
        if mine:
            with torch.no_grad():
                torch._foreach_copy_(mine, its)

    def compute(self, loss: Loss, batch: Batch) -> Computed:
        return computed(self._copy, loss, moved(batch, self._device), self._device, self._precision)

    def close(self) -> None:
        """Nothing but memory is held."""


def computed(module: nn.Module, loss: Loss, batch: Batch, device: torch.device, precision: Precision) -> Computed:
    """The gradient of one batch: every tower, near or far, computes it here."""
    module.zero_grad(set_to_none=True)
    with torch.enable_grad():
        plain = loss.fn if isinstance(loss, Op) else loss  # an op would look for a device scope
        with precision.on(device):
            value = plain(module, **batch) if isinstance(batch, Mapping) else plain(module, *batch)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise UsageError(f"A tower's loss is one number in a tensor, such as cross_entropy gives, not {shape}.")
        with plain_on(device):
            value.backward()  # type: ignore[no-untyped-call]
    return Computed(value.detach(), [p.grad for p in module.parameters()], list(module.buffers()))


def mean(parts: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor | None:
    """(g0 + g1 + …) / n on that device, in the order given, with a true division; None where nobody has a gradient.

    INVARIANT: this is how the ps of sync mode average, too (I4). The parts may be used up.

    >>> mean([torch.tensor([1.0]), None, torch.tensor([1.0])], torch.device("cpu"))
    tensor([0.6667])
    """
    present = [part for part in parts if part is not None]
    if not present:
        return None
    total = present[0].to(device)
    for part in present[1:]:
        total += part.to(device)
    return total.div_(len(parts)) if len(parts) > 1 else total


def heed_threads() -> None:
    """Let this thread compute on as many cores as the user has told torch; asked for the number, torch takes it over.

    INVARIANT: a thread of our own computes the bits of the user's: other cores are other sums.
    """
    torch.get_num_threads()


# --- what a copy must have in common with its model ---------------------------------------------------------------


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    """All values, parameters first; of a prepared model the newest ones."""
    return [*(p.detach() for p in module.parameters()), *module.buffers()]


def training_of(module: nn.Module) -> list[bool]:
    """Which parts are in training mode."""
    return [each.training for each in module.modules()]


def trained_of(module: nn.Module) -> list[bool]:
    """Which parameters are trained."""
    return [each.requires_grad for each in module.parameters()]


def follow(module: nn.Module, training: Iterable[bool], trained: Iterable[bool]) -> None:
    """Make a copy behave as its model does now."""
    for part, is_training in zip(module.modules(), training, strict=True):
        part.training = is_training
    for parameter, is_trained in zip(module.parameters(), trained, strict=True):
        parameter.requires_grad_(is_trained)


# --- batches ------------------------------------------------------------------------------------------------------


def moved(batch: Any, device: torch.device) -> Any:
    """Every tensor of a batch on that device."""
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)


def split(batch: Any, count: int) -> list[Any]:
    """One batch cut into `count`, sample by sample; sizes differ by one at most.

    >>> split((torch.arange(5), torch.arange(5) * 2), 2)
    [(tensor([0, 1, 2]), tensor([0, 2, 4])), (tensor([3, 4]), tensor([6, 8]))]
    """
    whole = (batch,) if isinstance(batch, torch.Tensor) else batch
    leaves, shape = pytree.tree_flatten(whole, is_leaf=lambda part: part is not whole and _is_list_of_samples(part))
    sizes = {len(leaf) for leaf in leaves if _has_samples(leaf)}
    if len(sizes) != 1:
        found = f"tensors of {', '.join(map(str, sorted(sizes)))} samples" if sizes else "no tensor"
        raise UsageError(f"A batch is cut along the first dimension of its tensors, which must agree; it has {found}.")
    if min(sizes) < count:
        raise UsageError(f"A batch of {min(sizes)} samples cannot be cut for {count} towers; each needs one at least.")
    cut = [_cut(leaf, count, min(sizes)) for leaf in leaves]
    return [pytree.tree_unflatten([parts[at] for parts in cut], shape) for at in range(count)]


def _cut(leaf: Any, count: int, size: int) -> Sequence[Any]:
    """What has samples in parts, anything else for all."""
    if _has_samples(leaf):
        parts: Sequence[Any] = (
            leaf.tensor_split(count) if isinstance(leaf, torch.Tensor) else np.array_split(leaf, count)
        )
        return parts
    if not _is_list_of_samples(leaf):
        return [leaf] * count
    if len(leaf) != size:
        raise UsageError(
            f"The batch has a list of {len(leaf)} beside {size} samples; a list is cut like the tensors. Give what is "
            "for all towers as a number, a string, or by itself in the loss."
        )
    numbers = torch.arange(size).tensor_split(count)
    return [[leaf[at] for at in part.tolist()] for part in numbers]


def _has_samples(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


def _is_list_of_samples(part: Any) -> bool:
    """A list in which no tensor is; one with tensors is a part of the batch's own nesting."""
    return type(part) is list and not any(
        isinstance(leaf, torch.Tensor | np.ndarray) for leaf in pytree.tree_leaves(part)
    )


def check_batch(batch: Any) -> None:
    """A batch is what the loss takes besides the model; a bare tensor is most likely half of one."""
    if isinstance(batch, Mapping) or (isinstance(batch, Sequence) and not isinstance(batch, str | bytes)):
        return
    raise UsageError(
        f"A tower's batch is a tuple of what the loss takes after the model, such as (images, labels), not a "
        f"{type(batch).__name__}; towers.split(batch) cuts one batch for all towers."
    )
