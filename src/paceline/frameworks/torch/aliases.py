"""Refuse parameters of a PyTorch model whose memory is another tensor's too, before they are laid on the arena.

Used by frameworks/torch/training_step. Tied weights are one tensor, and are no matter; two tensors on the same memory
would train apart.
"""

from collections.abc import Mapping, Sequence

import torch

from paceline.cluster.spelling import listed
from paceline.errors import UsageError


def check_alone(tensors: Mapping[str, torch.Tensor], trained: Sequence[torch.Tensor]) -> str:
    """Refuse parameters whose memory is another tensor's too: they would train apart once they lie on the arena. Return
    a line for the user about aliases of parameters that cannot be found; empty if there are none."""
    named = sorted(((_span(t), name, t) for name, t in tensors.items() if t.numel()), key=lambda each: each[0])
    is_trained = {id(p) for p in trained}
    end: tuple[int, int] = (-1, -1)
    last: tuple[str, torch.Tensor | None] = ("", None)
    for (device, start, stop), name, tensor in named:
        if (device, start) < end and last[1] is not tensor and {id(tensor), id(last[1])} & is_trained:
            raise UsageError(
                f"{last[0]} and {name} share memory, but are two tensors: a ps would train them apart. Tie them by "
                "giving both modules the same nn.Parameter (b.weight = a.weight), or clone one of them before prepare()"
            )
        if (device, stop) > end:
            end, last = (device, stop), (name, tensor)
    return _held_elsewhere(tensors, is_trained)


def _held_elsewhere(tensors: Mapping[str, torch.Tensor], is_trained: set[int]) -> str:
    """Refuse views of a buffer that something else holds too. Return a line about other parameters whose memory
    something else holds; empty if there are none."""
    count_users = getattr(torch._C, "_storage_Use_Count", None)
    if count_users is None:
        return ""
    tensors = {name: t for name, t in tensors.items() if t.untyped_storage().nbytes()}  # else they share no memory
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors.values() if id(t) in is_trained}
    members: dict[int, list[str]] = {pointer: [] for pointer in storages}
    for name, tensor in tensors.items():
        members.get(tensor.untyped_storage().data_ptr(), []).append(name)
    held: list[str] = []
    for pointer, storage in storages.items():
        names = members[pointer]
        if count_users(storage._cdata) == 1 + len(names):  # `storage` here, and the tensors that are known
            continue
        if len(names) > 1 or storage.nbytes() > tensors[names[0]].nbytes:
            raise UsageError(
                f"{listed(names)}: views of a larger tensor that the script holds too. After prepare() they "
                "would no longer be on its memory: clone them before prepare(), or make such a tensor after it"
            )
        held += names
    if not held:
        return ""
    return (
        f"paceline: other tensors share the memory of {listed(held)} (.data, .detach(), numpy(), "
        "state_dict() made before prepare()). They keep the values of now: make them after prepare()"
    )


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the device and the addresses between which a tensor's elements lie."""
    last = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return tensor.get_device(), start, start + (last + 1) * tensor.element_size()
