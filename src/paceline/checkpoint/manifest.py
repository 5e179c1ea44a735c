"""WHICH files make a checkpoint, and are they whole? MANIFEST.json: the format, and size and hash of every other file.

Written last by checkpoint/store, read first by checkpoint/read. Pure: bytes in, values out; what is malformed, newer
than this paceline, or names a file that no checkpoint has is refused with a sentence, never guessed at.
"""

import hashlib
import re
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from paceline.errors import CheckpointError

FORMAT = 1  # grows when an older paceline would read a checkpoint wrongly

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
AVERAGES = "ema.safetensors"
WORKERS = "workers.safetensors"
STATE_JSON = "state.json"
MANIFEST = "MANIFEST.json"
TENSOR_FILES = (MODEL, OPTIMIZER, AVERAGES, WORKERS)
NEEDED = (MODEL, OPTIMIZER, STATE_JSON)

MANIFEST_LIMIT_BYTES = 1 << 20
JSON_LIMIT_BYTES = 100 << 20

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class FileHash(msgspec.Struct, frozen=True):
    size_bytes: Count
    sha256: Digest


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What MANIFEST.json says. `sha256` is of the manifest itself, so that a damaged one is named as such."""

    format: Count
    global_step: Count
    lineage: Count
    files: dict[str, FileHash]
    sha256: Digest

    @property
    def size_bytes(self) -> int:
        return sum(said.size_bytes for said in self.files.values())


def made(global_step: int, lineage: int, files: dict[str, FileHash]) -> Manifest:
    """The manifest of these files, in the format of today."""
    digest = _digest(FORMAT, global_step, lineage, files)
    return Manifest(format=FORMAT, global_step=global_step, lineage=lineage, files=files, sha256=digest)


def encode(manifest: Manifest) -> bytes:
    """The bytes of MANIFEST.json."""
    return msgspec.json.format(msgspec.json.encode(manifest))


def decode(content: bytes) -> Manifest:
    """What MANIFEST.json says; CheckpointError when it cannot be believed."""
    version = decoded(content, _Version, MANIFEST).format
    if version > FORMAT:
        raise CheckpointError(
            f"{MANIFEST}: format {version} was written by a newer paceline; this one reads format {FORMAT}: upgrade it."
        )
    if version < 1:
        raise CheckpointError(f"{MANIFEST}: there is no format {version}; the first is 1.")
    manifest = decoded(content, Manifest, MANIFEST)
    unknown = manifest.files.keys() - {*TENSOR_FILES, STATE_JSON}
    if unknown:
        raise CheckpointError(f"{MANIFEST}: {min(unknown)!r} is no file of a checkpoint.")
    missing = [name for name in NEEDED if name not in manifest.files]
    if missing:
        raise CheckpointError(f"{MANIFEST}: it does not list {missing[0]}, which every checkpoint has.")
    if manifest.sha256 != _digest(version, manifest.global_step, manifest.lineage, manifest.files):
        raise CheckpointError(f"{MANIFEST}: it is not what was written: its own hash differs.")
    return manifest


def decoded(content: bytes | memoryview, type: type[T], name: str) -> T:
    """JSON of a given type; CheckpointError with the file's name when it is something else."""
    try:
        return msgspec.json.decode(content, type=type)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise CheckpointError(f"{name}: it is not the JSON that paceline writes there: {error}.") from None


def folder_name(global_step: int) -> str:
    """The folder of a step's checkpoint.

    >>> folder_name(1200)
    'step-00001200'
    """
    return f"step-{global_step:08d}"


def aside_name(global_step: int) -> str:
    """Where a checkpoint lies while its step is written once more; it counts as long as the new one is not there."""
    return f".{folder_name(global_step)}.older"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name, also of one set aside; None: not such a name.

    >>> step_of(Path("step-00001200")), step_of(Path(".step-00001200.older")), step_of(Path(".step-00001200.77-1"))
    (1200, 1200, None)
    """
    match = re.fullmatch(r"step-([0-9]{8,18})|\.step-([0-9]{8,18})\.older", folder.name)
    return int(match[1] or match[2]) if match else None


class _Version(msgspec.Struct, frozen=True):
    format: Count


def _digest(format: int, global_step: int, lineage: int, files: dict[str, FileHash]) -> str:
    said = [format, global_step, lineage, sorted((name, f.size_bytes, f.sha256) for name, f in files.items())]
    return hashlib.sha256(msgspec.json.encode(said)).hexdigest()
