"""HOW do torch's tensors lie on an arena? Typed views of raw memory; the one place that knows both.

Used by server/numbers/shard and frameworks/torch/training_step. It copies nothing.
"""

import torch

from paceline.params.layout import ITEM_BYTES

DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def flat(memory: memoryview, dtype: str, offset: int, numel: int) -> torch.Tensor:
    """`numel` numbers at byte `offset`, as a one-dimensional tensor on that memory, which must be writable."""
    if numel == 0:
        return torch.empty(0, dtype=DTYPES[dtype])
    return torch.frombuffer(memory, dtype=DTYPES[dtype], count=numel, offset=offset)


def shaped(vector: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """A dense tensor of that shape and stride (channels_last, say) over a flat vector."""
    return vector.as_strided(shape, stride)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a dense CPU tensor in the order in which it lies."""
    vector = storage_order(tensor)
    return memoryview(vector.view(torch.uint8).numpy())  # type: ignore[arg-type]


def storage_order(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor as the flat vector in which its elements lie.

    >>> storage_order(torch.tensor([[1, 2], [3, 4]]).t()).tolist()
    [1, 2, 3, 4]
    """
    if tensor.is_contiguous() and tensor.numel() != 1:  # the stride of a single element may be anything
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))
