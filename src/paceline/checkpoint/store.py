"""HOW is a checkpoint written? Into a temporary folder, hashed, synced, and renamed as a whole; never half there.

Called by the worker that ends last and by ctx.save, with bytes that a ps gave. Independent of the number of ps.

    checkpoints/step-00001200/ model.safetensors optimizer.safetensors [ema.safetensors] state.json MANIFEST.json
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

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
RAW = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}


class Entry(msgspec.Struct, frozen=True):
    """One tensor as it goes into a file; `data` is in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class State(msgspec.Struct, frozen=True):
    """What is not a tensor: state.json."""

    run_id: str
    global_step: int
    mode: str
    optimizer: str
    groups: list[dict[str, object]]
    paceline: str


class FileHash(msgspec.Struct, frozen=True):
    size_bytes: int
    sha256: str


def in_c_order(spec: TensorSpec, memory: memoryview) -> Entry:
    """A tensor that lies in memory with its own strides, as C-ordered bytes."""
    item = ITEM_BYTES[spec.dtype]
    if spec.numel == 0:
        return Entry(spec.dtype, spec.shape, b"")
    raw = np.frombuffer(memory, dtype=RAW[item], count=spec.numel)
    strides = tuple(s * item for s in spec.stride)
    view = np.lib.stride_tricks.as_strided(raw, spec.shape, strides, writeable=False)
    return Entry(spec.dtype, spec.shape, view.tobytes())


def write(
    folder: Path,
    model: Mapping[str, Entry],
    optimizer: Mapping[str, Entry],
    state: State,
    averages: Mapping[str, Entry] | None = None,
) -> Path:
    """checkpoints/ -> checkpoints/step-N, complete or not there at all. Returns the new folder."""
    final = folder / f"step-{state.global_step:08d}"
    temporary = folder / f".{final.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _write_tensors(temporary / "model.safetensors", model)
    _write_tensors(temporary / "optimizer.safetensors", optimizer)
    if averages is not None:
        _write_tensors(temporary / "ema.safetensors", averages)
    (temporary / "state.json").write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    manifest = {file.name: _hash(file) for file in sorted(temporary.iterdir())}
    (temporary / "MANIFEST.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    for file in temporary.iterdir():
        _sync(file)
    older = folder / f".{final.name}.older"
    shutil.rmtree(older, ignore_errors=True)
    if final.exists():
        os.rename(final, older)  # never removed before the new one is there
    os.rename(temporary, final)
    _sync(folder)
    shutil.rmtree(older, ignore_errors=True)
    return final


def _write_tensors(path: Path, tensors: Mapping[str, Entry]) -> None:
    """The safetensors format: header size, JSON header, data. Written here, because the library's functions want a
    framework's tensors and these bytes belong to none; a test reads the files back with the library."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, entry in tensors.items():
        offsets = [position, position + len(entry.data)]
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": offsets,
        }
        position = offsets[1]
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for entry in tensors.values():
            file.write(entry.data)


def _hash(path: Path) -> FileHash:
    with path.open("rb") as file:
        return FileHash(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
