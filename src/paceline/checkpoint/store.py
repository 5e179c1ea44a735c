"""HOW is a checkpoint written? Into a hidden folder, hashed, synced, and renamed as a whole; never half there.

Called by the worker that saves, with bytes that a ps gave. Independent of the number of ps. Never touches the previous
checkpoint before the new one is in place; a full disk is a CheckpointError that leaves nothing behind.

    checkpoints/step-00001200/ model.safetensors optimizer.safetensors [ema.safetensors] [workers.safetensors]
                               state.json MANIFEST.json

1. `.step-00001200.<pid>-<n>` is made and locked: others see that its writer lives.
2. Every file is written in pieces, hashed on the way, and synced.
3. MANIFEST.json, with those sizes and hashes, is written last and synced; so is the folder.
4. A checkpoint of the same step, if there is one, is set aside as `.step-00001200.older`.
5. The folder is renamed to step-00001200, and its parent synced: from here on it is there.
6. What was set aside is removed.
"""

import errno
import fcntl
import hashlib
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint import state as states
from paceline.checkpoint.manifest import AVERAGES, MANIFEST, MODEL, OPTIMIZER, STATE_JSON, WORKERS, FileHash
from paceline.checkpoint.state import State
from paceline.checkpoint.tensors import Entry, header
from paceline.errors import CheckpointError

PIECE_BYTES = 4 << 20
_numbers = itertools.count(1)


def write(
    folder: Path,
    model: Mapping[str, Entry],
    optimizer: Mapping[str, Entry],
    state: State,
    averages: Mapping[str, Entry] | None = None,
    workers: Mapping[str, Entry] | None = None,
) -> Path:
    """checkpoints/ -> checkpoints/step-N, complete or not there at all. Returns the new folder."""
    files = {MODEL: model, OPTIMIZER: optimizer, AVERAGES: averages, WORKERS: workers}
    tensors = {name: given for name, given in files.items() if given is not None}
    try:
        _make(folder)
        sweep(folder)
        with _hidden(folder, manifests.folder_name(state.global_step)) as temporary:
            _fill(temporary, tensors, state)
            return _put_in_place(temporary, folder, state.global_step)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoint of step {state.global_step} could not be written to {folder}: "
            f"{error.strerror or error}. Those that were there are still there."
        ) from error


def is_full(error: CheckpointError) -> bool:
    """Whether it could not be written for want of room, on the disk or in a quota."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def write_tensors(path: Path, tensors: Mapping[str, Entry]) -> FileHash:
    """One safetensors file, synced; what was written is also what was hashed."""
    return _write_file(path, itertools.chain([header(tensors)], (entry.data for entry in tensors.values())))


def sweep(folder: Path) -> None:
    """Remove what writers that died left behind; a checkpoint that one of them had set aside gets its name back."""
    for path in sorted(folder.glob(".step-*")):
        step = manifests.step_of(path)
        if step is None:
            if not _is_written(path):
                shutil.rmtree(path, ignore_errors=True)
        elif (folder / manifests.folder_name(step)).exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.rename(path, folder / manifests.folder_name(step))
            _sync_folder(folder)


@contextmanager
def _hidden(folder: Path, name: str) -> Iterator[Path]:
    """A folder of this writer alone (1), which is gone afterwards unless it was renamed."""
    temporary = folder / f".{name}.{os.getpid()}-{next(_numbers)}"
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that had our number and died
    os.mkdir(temporary)
    lock = -1
    try:
        lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # some network file systems cannot
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _is_written(temporary: Path) -> bool:
    """Does its writer live? Or can nobody tell?"""
    try:
        fd = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _fill(temporary: Path, tensors: Mapping[str, Mapping[str, Entry]], state: State) -> None:
    """2 and 3."""
    hashes = {name: write_tensors(temporary / name, given) for name, given in tensors.items()}
    hashes[STATE_JSON] = _write_file(temporary / STATE_JSON, [states.encode(state)])
    manifest = manifests.made(state.global_step, state.lineage, hashes)
    _write_file(temporary / MANIFEST, [manifests.encode(manifest)])
    _sync_folder(temporary)


def _put_in_place(temporary: Path, folder: Path, step: int) -> Path:
    """4, 5 and 6."""
    final = folder / manifests.folder_name(step)
    aside = folder / manifests.aside_name(step)
    if final.exists():
        os.rename(final, aside)
    try:
        os.rename(temporary, final)
        _sync_folder(folder)
    except BaseException:
        with suppress(FileNotFoundError):
            os.rename(final, temporary)  # in place, but not for good
        with suppress(FileNotFoundError):
            os.rename(aside, final)
        raise
    shutil.rmtree(aside, ignore_errors=True)
    return final


def _write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileHash:
    """The parts one after the other, in pieces, so that nothing is copied whole and other threads get their turn."""
    digest, size_bytes = hashlib.sha256(), 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for part in parts:
            rest = memoryview(part)
            size_bytes += rest.nbytes
            while rest:
                piece = rest[:PIECE_BYTES]
                written = os.write(fd, piece)
                digest.update(piece[:written])
                rest = rest[written:]
        os.fsync(fd)
    finally:
        os.close(fd)
    return FileHash(size_bytes, digest.hexdigest())


def _make(folder: Path) -> None:
    """The folder and those above it, each entered into its parent for good."""
    if folder.is_dir():
        return
    _make(folder.parent)
    with suppress(FileExistsError):
        os.mkdir(folder)
    _sync_folder(folder.parent)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EROFS):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(fd)
