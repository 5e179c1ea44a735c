"""Find the tensors that a ps only carries for a PyTorch model: frozen parameters and buffers, by name each time.

Used by frameworks/torch/training_step when a checkpoint is made and when values come from the ps, never in between. A
module may assign a buffer anew (`self.center = self.center * 0.9 + …`), so a reference that was taken at prepare()
shows its first value.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from xxhash import xxh3_64_digest

from paceline.cluster.spelling import listed
from paceline.errors import UsageError
from paceline.params.layout import TensorSpec
from paceline.views import DTYPES, as_bytes, flat, shaped
from paceline.wire.messages import MAX_UNSAVED_BYTES
from paceline.worker.script import script_line

COMPILED = "_orig_mod."  # what torch.compile puts into the names of a layer that it wraps
DIGEST_BYTES = 8
STATISTICS = ("running_mean", "running_var")


class Carried:
    """The carried tensors of one model."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, torch.Tensor], say: Callable[[str], None]) -> None:
        self._model = model
        self._say = say
        self._tensors = dict(tensors)  # as they were found last, in dtype and shape as prepare() saw them
        self._parameters = {id(p): p for p in model.parameters()}
        self._known = {name for name, _ in _buffers(model)}
        self._said: set[str] = set()
        self._is_over = False

    def block(self, specs: Sequence[TensorSpec], offsets: Sequence[int], size_bytes: int) -> bytes:
        """Copy the values of these tensors as they are now; refuse one whose shape has changed."""
        block = bytearray(size_bytes)
        with torch.no_grad():
            for offset, (spec, tensor) in zip(offsets, self._found(specs), strict=True):
                if spec.numel:
                    _place(block, spec, offset).copy_(tensor)
        return bytes(block)

    def take(self, specs: Sequence[TensorSpec], offsets: Sequence[int], block: bytearray) -> None:
        """Overwrite these tensors of the model with the values in the block."""
        with torch.no_grad():
            for offset, (spec, tensor) in zip(offsets, self._found(specs), strict=True):
                if spec.numel:
                    tensor.copy_(_place(block, spec, offset))

    def end(self, specs: Sequence[TensorSpec]) -> UsageError | None:
        """Return the refusal of a tensor that does not fit any more at the end of training. From now on its last value
        that did is saved."""
        try:
            list(self._found(specs))
        except UsageError as refused:
            self._is_over = True
            return refused
        trained = [name for name, parameter in self._made_since() if parameter.grad is not None]
        if not trained:
            return None
        return UsageError(
            f"{listed(trained)} was made after prepare() and trained: no ps knows it, no checkpoint holds it. "
            "Make all layers before prepare() (freeze those that shall wait: requires_grad_(False))"
        )

    def _made_since(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters that the model did not have at prepare()."""
        return ((name, p) for name, p in self._model.named_parameters() if id(p) not in self._parameters)

    def _found(self, specs: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        now: dict[str, torch.Tensor] = {
            _plain(name): tensor for name, tensor in self._model.named_parameters(remove_duplicate=False)
        }
        buffers = {_plain(name): buffer for name, buffer in _buffers(self._model)}
        for name in buffers.keys() - {_plain(known) for known in self._known} - self._said:
            self._once(name, "buffer", "was made after prepare(): checkpoints do not hold it. Register it before")
        for name, _ in self._made_since():
            self._once(name, "parameter", "was made after prepare(): no ps trains it, and checkpoints do not hold it")
        now.update(buffers)
        for spec in specs:
            yield spec, self._fitting(spec, now.get(_plain(spec.name)))

    def _fitting(self, spec: TensorSpec, tensor: torch.Tensor | None) -> torch.Tensor:
        known = self._tensors[spec.name]
        if tensor is None:  # it has another name or no place any more, as after torch.nn.utils.prune
            return known
        if tuple(tensor.shape) != spec.shape:
            if self._is_over:
                return known
            raise UsageError(
                f"{spec.name} had the shape {list(spec.shape)} at prepare() and has {list(tensor.shape)} now, so no "
                "checkpoint can hold it: register it with its last shape before prepare(), or with persistent=False "
                f"and save it yourself; seen when the model was to be saved{script_line()}"
            )
        if tensor.dtype != DTYPES[spec.dtype]:
            if torch.equal(known.to(tensor.dtype), tensor):  # the model was cast: the value before that is exact
                return known
            self._once(spec.name, "buffer", f"is {tensor.dtype} since prepare(): checkpoints hold it as {spec.dtype}")
            return tensor
        self._tensors[spec.name] = tensor
        return tensor

    def _once(self, name: str, kind: str, what: str) -> None:
        if name not in self._said:
            self._said.add(name)
            self._say(f"paceline: the {kind} {name} {what}")


def statistics_of(model: nn.Module) -> set[int]:
    """Return the ids of the running means and variances of norm layers, which a checkpoint can average over workers."""
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    found = [norm._buffers.get(name) for norm in norms for name in STATISTICS]
    return {id(buffer) for buffer in found if buffer is not None and buffer.is_floating_point()}


def unsaved_block(model: nn.Module) -> bytes:
    """Copy the values of the buffers that state_dict() leaves out, behind a digest of their names, shapes and dtypes;
    empty if there are none, or more than MAX_UNSAVED_BYTES."""
    buffers = _unsaved(model)
    if not buffers or sum(buffer.nbytes for buffer in buffers.values()) > MAX_UNSAVED_BYTES:
        return b""
    parts = [as_bytes(buffer.detach().cpu().contiguous()) for buffer in buffers.values()]
    return b"".join([_digest(buffers), *parts])


def take_unsaved(model: nn.Module, block: bytes | bytearray) -> list[str] | None:
    """Overwrite the buffers that state_dict() leaves out with the values in another worker's block. Return the names of
    those that had other values, or None if the two models' buffers are not alike."""
    buffers = _unsaved(model)
    if block[:DIGEST_BYTES] != _digest(buffers):
        return None
    start, changed = DIGEST_BYTES, []
    for name, buffer in buffers.items():
        part = block[start : start + buffer.nbytes]
        start += buffer.nbytes
        if part != bytes(as_bytes(buffer.detach().cpu().contiguous())):
            vector = torch.frombuffer(bytearray(part), dtype=buffer.dtype)
            with torch.no_grad():
                buffer.copy_(vector.view(buffer.shape))
            changed.append(name)
    return changed


def _unsaved(model: nn.Module) -> dict[str, torch.Tensor]:
    buffers = {name: buffer for name, buffer, is_saved in _all_buffers(model) if not is_saved}
    return {n: b for n, b in buffers.items() if b.numel() and b.layout is torch.strided and not b.is_meta}


def _digest(buffers: Mapping[str, torch.Tensor]) -> bytes:
    told = [(_plain(name), tuple(buffer.shape), str(buffer.dtype)) for name, buffer in buffers.items()]
    return xxh3_64_digest(repr(told).encode())


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every buffer that state_dict() has."""
    return ((name, buffer) for name, buffer, is_saved in _all_buffers(model) if is_saved)


def _all_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield every buffer, and whether state_dict() has it."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                is_saved = name not in module._non_persistent_buffers_set
                yield f"{prefix}.{name}" if prefix else name, buffer, is_saved


def _plain(name: str) -> str:
    return name.replace(COMPILED, "")


def _place(block: bytearray, spec: TensorSpec, offset: int) -> torch.Tensor:
    return shaped(flat(memoryview(block), spec.dtype, offset, spec.numel), spec.shape, spec.stride)
