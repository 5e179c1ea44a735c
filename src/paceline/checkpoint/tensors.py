"""HOW do tensors lie in a file? The safetensors format: header size, JSON header, data in C order.

Used by checkpoint/store and checkpoint/read. Written here, because the library's functions want a framework's tensors
and these bytes belong to none; a test reads the files back with the library. Pure: never opens a file, and never
trusts a header: sizes, shapes and offsets must agree with each other and with the bytes that are there.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import numpy as np

from paceline.checkpoint.manifest import JSON_LIMIT_BYTES, decoded
from paceline.errors import CheckpointError
from paceline.params.layout import ITEM_BYTES, TensorSpec

SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
DTYPES = {theirs: ours for ours, theirs in SAFETENSORS_DTYPES.items()}
RAW = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}
METADATA = "__metadata__"
PREFIX_BYTES = 8  # the header's size, little-endian
MAX_DIMENSIONS = 64

Offset = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Entry(msgspec.Struct, frozen=True):
    """One tensor as it lies in a file: C order. `data` may be a view of memory that must not change meanwhile."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    @property
    def size_bytes(self) -> int:
        return len(self.data)


class Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor as a header describes it."""

    dtype: str
    shape: Annotated[tuple[Offset, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[Offset, Offset]


def in_c_order(spec: TensorSpec, memory: memoryview) -> Entry:
    """A tensor that lies in memory with its own strides; a view of that memory where it is in C order already."""
    item = ITEM_BYTES[spec.dtype]
    if spec.numel == 0:
        return Entry(spec.dtype, spec.shape, b"")
    raw = np.frombuffer(memory, dtype=RAW[item], count=spec.numel)
    strides = tuple(s * item for s in spec.stride)
    view = np.lib.stride_tricks.as_strided(raw, spec.shape, strides, writeable=False)
    if view.flags.c_contiguous:
        return Entry(spec.dtype, spec.shape, memory.cast("B")[: spec.size_bytes])
    return Entry(spec.dtype, spec.shape, view.tobytes())


def values(entry: Entry) -> "np.ndarray[Any, Any]":
    """The numbers of one tensor (bfloat16 as float32); a view of its bytes where numpy has the dtype."""
    raw = np.frombuffer(entry.data, dtype=RAW[ITEM_BYTES[entry.dtype]])
    if entry.dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32).reshape(entry.shape)
    return raw.view(entry.dtype).reshape(entry.shape)


def header(tensors: Mapping[str, Entry]) -> bytes:
    """What comes before the data; the data starts at a multiple of 8 bytes."""
    said: dict[str, object] = {METADATA: {"format": "pt"}}
    position = 0
    for name, entry in tensors.items():
        if name == METADATA:
            raise CheckpointError(f"A tensor cannot be called {METADATA}: safetensors files keep that name.")
        end = position + len(entry.data)
        said[name] = Described(SAFETENSORS_DTYPES[entry.dtype], entry.shape, (position, end))
        position = end
    encoded = msgspec.json.encode(said)
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(PREFIX_BYTES, "little") + encoded


def entries(content: memoryview, name: str) -> dict[str, Entry]:
    """The tensors of a whole file, as views of it; CheckpointError, with the file's name, when it is not one."""
    if len(content) < PREFIX_BYTES:
        raise CheckpointError(f"{name}: {len(content)} bytes are too few for a safetensors file.")
    size = int.from_bytes(content[:PREFIX_BYTES], "little")
    if size > JSON_LIMIT_BYTES:
        raise CheckpointError(f"{name}: its header claims {size} bytes; at most {JSON_LIMIT_BYTES} are read.")
    if size > len(content) - PREFIX_BYTES:
        raise CheckpointError(f"{name}: its header claims {size} bytes, but the file has {len(content)}.")
    described = decoded(content[PREFIX_BYTES : PREFIX_BYTES + size], dict[str, msgspec.Raw], name)
    decoded(described.pop(METADATA, msgspec.Raw(b"{}")), dict[str, str], name)
    tensors = {tensor: decoded(raw, Described, name) for tensor, raw in described.items()}
    data = content[PREFIX_BYTES + size :]
    _check(tensors, len(data), name)
    return {
        tensor: Entry(DTYPES[said.dtype], said.shape, data[said.data_offsets[0] : said.data_offsets[1]])
        for tensor, said in tensors.items()
    }


def _check(tensors: dict[str, Described], data_bytes: int, name: str) -> None:
    """Every tensor has the bytes its shape needs, and all of them together fill the data without hole or overlap."""
    position = 0
    for tensor, said in sorted(tensors.items(), key=lambda each: each[1].data_offsets):
        if said.dtype not in DTYPES:
            raise CheckpointError(f"{name}: {tensor} is {said.dtype}; paceline reads {', '.join(DTYPES)}.")
        needed = ITEM_BYTES[DTYPES[said.dtype]]
        for extent in said.shape:
            needed *= extent
        start, end = said.data_offsets
        if end - start != needed:
            raise CheckpointError(
                f"{name}: {tensor} of shape {list(said.shape)} needs {needed} bytes, its offsets give {end - start}."
            )
        if start != position:
            raise CheckpointError(f"{name}: {tensor} starts at byte {start} of the data, not at {position}.")
        position = end
    if position != data_bytes:
        raise CheckpointError(f"{name}: its tensors have {position} bytes, but {data_bytes} bytes of data are there.")
