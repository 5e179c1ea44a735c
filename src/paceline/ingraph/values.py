"""WHAT may travel to an op and back? Tensors, arrays and JSON values in any nesting; as a description and raw memory.

Used by ingraph/remote and calls for arguments and results. Kind, dtype, shape and the order in memory are kept, so that
the same numbers come out on the other side. Must never build anything else from bytes: no class, no code, no object.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from paceline.cluster.spelling import with_article
from paceline.errors import ProtocolError, UsageError
from paceline.params.arena import check_fits
from paceline.transport.base import Buffer
from paceline.views import storage_order
from paceline.wire.ops import ALIGN, MAX_BULK_BYTES

MAX_DEPTH = 100
MAX_DIMS = 64  # numpy's own limit
LARGE_BYTES = 64 << 20  # from here on this host is asked whether it has so much
_ARRAY_DTYPE = re.compile(
    r"[<>|=]?(b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)|[SU][1-9][0-9]{0,8})"
)  # no element without a byte: any number of those would fit
_TENSOR_DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "complex64", "complex128", "int64", "int32", "int16", "int8",
        "uint8", "bool", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2",
    )
    if hasattr(torch, name)
}  # fmt: skip
_TENSOR_NAMES = {dtype: name for name, dtype in _TENSOR_DTYPES.items()}


class Ref(msgspec.Struct, frozen=True, tag="ref", array_like=True):
    """Where the value of another node of a graph is to stand."""

    node: str


class _Bytes(msgspec.Struct, frozen=True, tag="bytes", array_like=True):
    value: bytes


class _Tensor(msgspec.Struct, frozen=True, tag="tensor", array_like=True):
    """`order`: its dimensions from the outermost in memory to the innermost."""

    dtype: str
    shape: list[int]
    order: list[int]
    offset: int


class _Array(msgspec.Struct, frozen=True, tag="array", array_like=True):
    dtype: str
    shape: list[int]
    offset: int
    is_scalar: bool = False


class _List(msgspec.Struct, frozen=True, tag="list", array_like=True):
    items: "list[_Item]"


class _Tuple(msgspec.Struct, frozen=True, tag="tuple", array_like=True):
    items: "list[_Item]"


class _Dict(msgspec.Struct, frozen=True, tag="dict", array_like=True):
    keys: list[str]
    items: "list[_Item]"


_Item = None | bool | int | float | str | _Bytes | Ref | _Tensor | _Array | _List | _Tuple | _Dict
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: "msgspec.msgpack.Decoder[_Item]" = msgspec.msgpack.Decoder(_Item)


def pack(value: object) -> tuple[bytes, list[Buffer]]:
    """The description of a value, and the memory of its tensors and arrays; both are views as long as that is possible.

    Sent in this order, padded by `bulk`. Anything else is refused with a sentence that names its type.

    >>> import torch
    >>> description, buffers = pack({"x": torch.ones(3), "note": "hello"})
    >>> unpack(description, block_of(buffers))
    {'x': tensor([1., 1., 1.]), 'note': 'hello'}
    """
    packer = _Packer()
    item = packer.item(value, 0)
    try:
        return _ENCODER.encode(item), packer.buffers
    except (OverflowError, UnicodeEncodeError) as error:
        raise UsageError(f"This value cannot travel to another task: {error}.") from None


def bulk(description: bytes, buffers: list[Buffer]) -> list[Buffer]:
    """What is sent behind a message: the description, padded so that the buffers keep their places."""
    pieces = [description, bytes(-len(description) % ALIGN), *buffers]
    size_bytes = sum(memoryview(piece).nbytes for piece in pieces)
    if size_bytes > MAX_BULK_BYTES:
        raise UsageError(
            f"A value of {size_bytes} bytes cannot travel at once, {MAX_BULK_BYTES} can; send it in parts."
        )
    return pieces


def unpack(description: bytes, block: memoryview) -> Any:
    """The value again; its tensors and arrays lie on `block`, which must stay untouched and be aligned (new_block)."""
    try:
        item = _DECODER.decode(description)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the description of a value does not parse: {error}") from error
    try:
        return _value(item, block)
    except (ValueError, TypeError, IndexError, RuntimeError, OverflowError) as error:
        raise ProtocolError(f"the description of a value does not fit its bytes: {error}") from error


def new_block(size_bytes: int) -> memoryview:
    """Memory into which a bulk is received, aligned as torch's own. The system hands it out page by page as bytes come,
    so that a claim alone takes none; one that this host could never hold is refused at once."""
    try:
        if size_bytes >= LARGE_BYTES:
            check_fits(size_bytes)
        return memoryview(torch.empty(size_bytes, dtype=torch.uint8).numpy())  # type: ignore[arg-type]
    except (MemoryError, RuntimeError) as error:  # torch's own, where memory is not handed out beyond what there is
        raise ProtocolError(f"a value is too large for this task: {error}") from None


def block_of(buffers: list[Buffer]) -> memoryview:
    """The buffers in one piece, as they arrive on the other side."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    block = new_block(sum(view.nbytes for view in views))
    position = 0
    for view in views:
        block[position : position + view.nbytes] = view
        position += view.nbytes
    return block


def mapped(value: Any, change: Callable[[Any], Any], depth: int = 0) -> Any:
    """The same nesting with every leaf changed.

    >>> mapped({"a": [1, 2], "b": (3,)}, lambda leaf: leaf + 1)
    {'a': [2, 3], 'b': (4,)}
    """
    if depth > MAX_DEPTH:
        raise _too_deep()
    if type(value) is dict:
        return {key: mapped(each, change, depth + 1) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)([mapped(each, change, depth + 1) for each in value])
    return change(value)


def size_bytes(value: Any) -> int:
    """The memory that a value takes, as far as it may be large.

    >>> size_bytes({"x": torch.zeros(3), "note": b"1234"})
    16
    """
    sizes: list[int] = []
    mapped(value, lambda leaf: sizes.append(_leaf_bytes(leaf)))
    return sum(sizes)


def _leaf_bytes(leaf: Any) -> int:
    return len(leaf) if isinstance(leaf, bytes | str) else int(getattr(leaf, "nbytes", 0))


class _Packer:
    """Describes a value and gathers its memory; each piece begins at a multiple of ALIGN."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._size = 0

    def item(self, value: object, depth: int) -> _Item:
        if depth > MAX_DEPTH:
            raise _too_deep()
        if value is None or type(value) in (bool, float, str) or isinstance(value, Ref):
            return value  # type: ignore[return-value]
        if type(value) is bytes:
            return _Bytes(value)
        if type(value) is int:
            if not -(1 << 63) <= value < 1 << 64:
                raise UsageError("A whole number of more than 64 bits cannot travel to another task; send it as text.")
            return value
        if type(value) is list:
            return _List([self.item(each, depth + 1) for each in value])
        if type(value) is tuple:
            return _Tuple([self.item(each, depth + 1) for each in value])
        if type(value) is dict:
            return self._dict(value, depth)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value)
        raise _refusal(with_article(_type_name(value)))

    def _dict(self, value: dict[object, object], depth: int) -> _Dict:
        for key in value:
            if type(key) is not str:
                raise _refusal(f"a dict with a key of type {_type_name(key)} (keys are strings)")
        return _Dict([str(key) for key in value], [self.item(each, depth + 1) for each in value.values()])

    def _tensor(self, tensor: torch.Tensor) -> _Tensor:
        if tensor.is_nested:
            raise _refusal("a nested tensor")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in _TENSOR_NAMES:
            raise _refusal(f"a tensor of layout {tensor.layout} and type {tensor.dtype} on {tensor.device}")
        if tensor.dim() > MAX_DIMS:
            raise _refusal(f"a tensor of {tensor.dim()} dimensions")
        plain = tensor.detach().resolve_conj().resolve_neg().cpu()
        order = sorted(range(plain.dim()), key=lambda dim: (-plain.stride()[dim], dim))
        if not plain.permute(order).is_contiguous():
            order, plain = list(range(plain.dim())), plain.contiguous()
        flat = storage_order(plain.permute(order))
        memory = memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")  # type: ignore[arg-type]
        return _Tensor(_TENSOR_NAMES[tensor.dtype], list(tensor.shape), order, self._add(memory))

    def _array(self, value: "np.ndarray[Any, Any] | np.generic") -> _Array:
        array = np.asarray(value)
        if type(value) is not np.ndarray and not isinstance(value, np.generic):
            raise _refusal(with_article(_type_name(value)))
        if not _ARRAY_DTYPE.fullmatch(array.dtype.str):
            raise _refusal(f"an array of type {array.dtype}")
        flat = np.ascontiguousarray(array).reshape(-1)
        memory = memoryview(flat.view(np.uint8)) if flat.nbytes else memoryview(b"")  # type: ignore[arg-type]
        return _Array(array.dtype.str, list(array.shape), self._add(memory), isinstance(value, np.generic))

    def _add(self, memory: memoryview) -> int:
        offset = self._size
        padding = -memory.nbytes % ALIGN
        self.buffers += [memory, bytes(padding)] if padding else [memory]
        self._size += memory.nbytes + padding
        return offset


def _value(item: _Item, block: memoryview) -> Any:
    if isinstance(item, _List):
        return [_value(each, block) for each in item.items]
    if isinstance(item, _Tuple):
        return tuple(_value(each, block) for each in item.items)
    if isinstance(item, _Dict):
        return {key: _value(each, block) for key, each in zip(item.keys, item.items, strict=True)}
    if isinstance(item, _Bytes):
        return item.value
    if isinstance(item, _Tensor):
        return _tensor(item, block)
    if isinstance(item, _Array):
        return _array(item, block)
    return item


def _tensor(item: _Tensor, block: memoryview) -> torch.Tensor:
    if item.dtype not in _TENSOR_DTYPES:
        raise ValueError(f"no type {item.dtype}")
    dtype, shape = _TENSOR_DTYPES[item.dtype], [item.shape[dim] for dim in item.order]
    if sorted(item.order) != list(range(len(item.shape))) or any(size < 0 for size in shape):
        raise ValueError("no such shape")
    count = _count(shape)
    if count == 0:
        return torch.empty(item.shape, dtype=dtype)
    if item.offset < 0 or item.offset + count * dtype.itemsize > block.nbytes:
        raise ValueError("a tensor beyond its bytes")
    flat = torch.frombuffer(block, dtype=dtype, count=count, offset=item.offset)
    inverse = sorted(range(len(item.order)), key=item.order.__getitem__)
    return flat.reshape(shape).permute(inverse)


def _array(item: _Array, block: memoryview) -> Any:
    if not _ARRAY_DTYPE.fullmatch(item.dtype) or any(size < 0 for size in item.shape):
        raise ValueError(f"no type {item.dtype}")
    dtype, count = np.dtype(item.dtype), _count(item.shape)
    flat = np.frombuffer(block, dtype, count, item.offset) if count else np.zeros(0, dtype)
    array = flat.reshape(item.shape)
    return array[()] if item.is_scalar else array


def _count(shape: list[int]) -> int:
    if len(shape) > MAX_DIMS:
        raise ValueError(f"{len(shape)} dimensions")
    return math.prod(shape)


def _too_deep() -> UsageError:
    return UsageError(f"A value nested more than {MAX_DEPTH} deep, or in itself, cannot travel to a device or a task.")


def _refusal(what: str) -> UsageError:
    return UsageError(
        f"An op on another task takes and returns tensors, arrays and JSON values; {what} cannot travel there."
    )


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
