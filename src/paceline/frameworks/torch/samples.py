"""Count the samples that a PyTorch gradient is made of: those of the batches that were accumulated into it.

Used by frameworks/torch/training_step where several workers train, because a mean over workers is weighted by it. A
batch counts if autograd accumulated a gradient after the loader gave it and before the loader gave the next one. It no
longer counts once the gradients were cleared (None, or zeros) without a step. One hook on each trained parameter
notices that.

A loop that takes batches ahead of its backward pass (prefetching) is recognised by the first batch of a pass: its
tensors are alive at the first backward pass, though the next batch was taken. Then the older batch counts.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

UNKNOWN = (
    "paceline: how many samples a batch has is not known here ({why}), so the workers' gradients weigh the same in a "
    "mean; ctx.weight(n) says how many there are"
)
NO_INDEX = "no index of a sampler counts them"
AHEAD = "batches are taken ahead of the backward pass, and differ in size"
NO_BACKWARD = "no backward pass has made this gradient"


@dataclass(slots=True)
class Batch:
    """One batch that the loader gave; `tensor`: its first one, while the script holds it."""

    size: int | None
    tensor: TensorWeakRef | None = None

    @property
    def is_alive(self) -> bool:
        """Tell whether the script still holds it."""
        return self.tensor is not None and self.tensor() is not None


class GradientSamples:
    """The samples in one model's gradients since the last push."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], say: Callable[[str], None], matters: Callable[[], bool]
    ) -> None:
        self._parameters = sorted(parameters, key=torch.Tensor.numel)
        self._say = say
        self._matters = matters  # whether the counts are used
        self._has_said = False
        self._nodes: list[Any] = []
        self._handles: list[Any] = []
        self._samples = 0.0
        self._is_known = True
        self._is_counted = True  # the current batch is in the gradient, or there is none
        self._is_used = False  # a gradient of the current batch was accumulated
        self._batches: deque[Batch] = deque()  # the last ones of this pass; the first of them is the current one
        self._has_begun = False  # a gradient was accumulated in this pass
        self._is_ahead = False  # the loop takes batches ahead of its backward pass
        self._is_over = False  # the loader has no more batches in this pass

    # --- what the loader does ---------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Start to count the batches of another pass; gradients that were accumulated before stay counted."""
        self._batches.clear()
        self._has_begun = self._is_ahead = self._is_over = False
        self._is_counted = True

    def take(self, size: int | None, batch: Any) -> None:
        """Note a batch that the loader gives."""
        if not self._handles:
            self._install()
        if not self._has_begun:
            tensor = first_tensor(batch)
            self._batches.append(Batch(size, None if tensor is None else TensorWeakRef(tensor)))
        else:
            self._batches.append(Batch(size))
            self._batches.popleft()
        self._is_counted = self._is_used = False

    def end_pass(self) -> None:
        """Note that the loader had no other batch to give; those that were taken ahead remain."""
        if self._is_used or not self._is_over:
            self._advance()
        self._is_over = True

    def _advance(self) -> None:
        if self._is_ahead and len(self._batches) > 1:
            self._batches.popleft()
            self._is_counted = self._is_used = False

    # --- what autograd does -----------------------------------------------------------------------------------

    def _install(self) -> None:
        """Call _before whenever a gradient is about to be accumulated. The hooks are on autograd's nodes, so copies of
        the model have none."""
        self._nodes = [_accumulator(p) for p in self._parameters]  # a node that is not held is made anew
        self._handles = [node.register_prehook(self._before) for node in self._nodes]

    def _before(self, _: Any) -> None:
        if not self._is_counted:
            self._count()

    @torch.no_grad()
    def _count(self) -> None:
        self._is_counted = self._is_used = True
        if (self._samples or not self._is_known) and self._is_cleared():
            self._samples, self._is_known = 0.0, True
        if not self._has_begun:
            self._begin()
        current = self._batches[0 if self._is_ahead else -1]
        if current.size is None:
            self._lose_count(NO_INDEX)
        elif not self._is_ahead and any(each.size != current.size for each in self._batches):
            self._lose_count(AHEAD)
        else:
            self._samples += current.size

    def _begin(self) -> None:
        """Decide at the first accumulation of a pass which of its batches that is for, where several were taken."""
        self._has_begun = True
        while len(self._batches) > 1 and not self._batches[0].is_alive and self._batches[-1].is_alive:
            self._batches.popleft()  # the script left it out
        self._is_ahead = len(self._batches) > 1 and self._batches[0].is_alive

    def _lose_count(self, why: str) -> None:
        self._is_known = False
        if self._matters() and not self._has_said:
            self._has_said = True
            self._say(UNKNOWN.format(why=why))

    def _is_cleared(self) -> bool:
        """Tell whether the script has set all gradients to None or to zeros."""
        gradients = (p.grad for p in self._parameters)
        values = (g._values() if g.is_sparse else g for g in gradients if g is not None)
        return not any(bool(each.any()) for each in values)

    # --- what a push takes ------------------------------------------------------------------------------------

    def pushed(self) -> float | None:
        """Return how many samples are in the gradient, and begin anew: 0 if that is unknown, None if there is no
        gradient, or only zeros."""
        if not self._samples and self._is_known:
            if not self._handles or self._is_cleared():
                return None
            self._lose_count(NO_BACKWARD)
        samples = self._samples if self._is_known else 0.0
        self._samples, self._is_known = 0.0, True
        if self._is_over and self._is_used:
            self._advance()
        self._is_counted = not self._batches
        return samples

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _accumulator(parameter: torch.Tensor) -> Any:
    """Return the node that accumulates a parameter's gradient, also of one that is frozen now."""
    requires_grad = parameter.requires_grad
    with torch.enable_grad():
        node = parameter.requires_grad_(True).expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    parameter.requires_grad_(requires_grad)
    return node


def first_tensor(batch: Any) -> torch.Tensor | None:
    """Return the first tensor in a batch, if there is one.

    >>> first_tensor({"text": ["a"], "x": (torch.zeros(2),)})
    tensor([0., 0.])
    """
    if isinstance(batch, torch.Tensor):
        return batch
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return next((tensor for part in batch if (tensor := first_tensor(part)) is not None), None)
    return None
