"""WHAT is in a checkpoint, and can it be believed? Found, mapped and checked, without a framework.

Called by the chief that resumes and by `paceline ckpt`. Never changes a file, never runs what it reads, never allocates
what a file merely claims, never follows a symbolic link below the folder that it was given: a damaged checkpoint is
refused with a sentence that names the file, and the one before it is taken (`newest` by size alone, `load_newest` by
hash).
"""

import hashlib
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline import files
from paceline.checkpoint import manifest as manifests
from paceline.checkpoint import state as states
from paceline.checkpoint.manifest import (
    AVERAGES,
    JSON_LIMIT_BYTES,
    MANIFEST,
    MANIFEST_LIMIT_BYTES,
    MODEL,
    OPTIMIZER,
    STATE_JSON,
    TENSOR_FILES,
    WORKERS,
    FileHash,
    Manifest,
)
from paceline.checkpoint.state import State
from paceline.checkpoint.tensors import Entry, entries
from paceline.errors import CheckpointError

Warn = Callable[[str], None]
TOLD = 4  # damaged checkpoints that an error names


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint whose every byte was checked; tensors are views of mapped files, valid as long as they are held."""

    path: Path
    state: State
    manifest: Manifest
    model: dict[str, Entry]
    optimizer: dict[str, Entry]  # "<tensor>.<slot>"
    averages: dict[str, Entry] | None  # ema.safetensors
    workers: dict[str, Entry] | None  # workers.safetensors: random states and buffers


class Found(msgspec.Struct, frozen=True):
    """A folder that looks like a checkpoint; `problem` says why it is not one ("" when it is, as far as sizes tell)."""

    path: Path
    global_step: int
    lineage: int = -1  # -1: its manifest cannot be read
    problem: str = ""
    manifest: Manifest | None = None

    @property
    def is_complete(self) -> bool:
        return not self.problem


def find(folder: Path) -> list[Found]:
    """Every checkpoint of a checkpoints/ folder, the newest first: by lineage, then by step; damaged ones at the end.

    A checkpoint that was set aside by a writer that died counts when its step has no other.
    """
    try:
        paths = [path for path in folder.iterdir() if manifests.step_of(path) is not None and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps: dict[int, Found] = {}
    for path in sorted(paths, key=lambda path: path.name.startswith(".")):  # those set aside come last
        found = (
            Found(path, manifests.step_of(path) or 0, problem=f"{files.LINK}.") if path.is_symlink() else examine(path)
        )
        before = steps.get(found.global_step)
        if before is None or (found.is_complete and not before.is_complete):
            steps[found.global_step] = found
    return sorted(steps.values(), key=lambda f: (f.is_complete, f.lineage, f.global_step), reverse=True)


def examine(path: Path) -> Found:
    """One folder by its manifest and the sizes of its files; nothing is hashed."""
    step, lineage = manifests.step_of(path), -1
    try:
        manifest = read_manifest(path)
        lineage = manifest.lineage
        for name, said in manifest.files.items():
            _check_size(path, name, said)
    except CheckpointError as error:
        return Found(path, step or 0, lineage, problem=str(error))
    if step is not None and manifest.global_step != step:
        problem = f"{MANIFEST}: it is of step {manifest.global_step}, the folder is not."
        return Found(path, step, lineage, problem=problem)
    return Found(path, manifest.global_step, lineage, manifest=manifest)


def newest(folder: Path, warn: Warn | None = None) -> Path | None:
    """The newest complete checkpoint by manifest and sizes; `warn` hears of each newer folder that is damaged."""
    found = find(folder)
    best = next((each for each in found if each.is_complete), None)
    for each in found if warn else []:
        if warn and not each.is_complete and (best is None or each.global_step > best.global_step):
            warn(_skipped(each.path, each.problem))
    return best.path if best else None


def named(path: Path) -> Path | None:
    """The checkpoint that `--resume PATH` means: this one, or the newest of this run or folder."""
    if (path / MANIFEST).exists():
        return path.resolve()  # it may be a link
    return newest(folder_in(path))


def folder_in(path: Path) -> Path:
    """Where the checkpoints of a run folder are; another folder has them itself."""
    inside = path / "checkpoints"
    return inside if inside.is_dir() else path


def load_newest(folder: Path, warn: Warn | None = None) -> Loaded | None:
    """The newest checkpoint whose every hash is right, loaded. None when there is none; when all are damaged that is a
    CheckpointError, for whoever goes on without them should have said so."""
    newest(folder, warn)  # says what is incomplete
    problems = []
    found = find(folder)
    for each in found:
        try:
            if each.is_complete:
                return _load(each.path)
            problems.append(f"{each.path.name} ({each.problem.rstrip('.')})")
        except CheckpointError as error:
            problems.append(f"{each.path.name} ({str(error).rstrip('.')})")
            if warn:
                warn(_skipped(each.path, str(error)))
    if len(found) == 1:
        raise CheckpointError(f"The only checkpoint in {folder} is damaged: {problems[0]}.")
    if found:
        told = ", ".join([*problems[:TOLD], *(["…"] if len(problems) > TOLD else [])])
        raise CheckpointError(f"No checkpoint in {folder} can be used: all {len(found)} are damaged: {told}.")
    return None


def load(path: Path) -> Loaded:
    """One checkpoint, every file hashed; CheckpointError names the first that is not what was written."""
    try:
        return _load(path.resolve())  # the user may name a link
    except CheckpointError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be used: {error}") from None


def _load(path: Path) -> Loaded:
    path = path.absolute()
    manifest = read_manifest(path)
    contents = {name: _whole(path, name, said) for name, said in manifest.files.items()}
    tensors = {name: entries(contents[name], name) for name in contents if name in TENSOR_FILES}
    return Loaded(
        path=path,
        state=_state(contents[STATE_JSON], manifest),
        manifest=manifest,
        model=tensors[MODEL],
        optimizer=tensors[OPTIMIZER],
        averages=tensors.get(AVERAGES),
        workers=tensors.get(WORKERS),
    )


def state_of(path: Path) -> State | None:
    """Read the state.json of one checkpoint; return None if its size or hash is not what was written."""
    try:
        manifest = read_manifest(path)
        return _state(_whole(path, STATE_JSON, manifest.files[STATE_JSON]), manifest)
    except (CheckpointError, KeyError):
        return None


def newest_whole(folder: Path) -> Found | None:
    """Return the newest checkpoint whose every hash is right, if there is one."""
    return next((each for each in find(folder) if each.is_complete and not verify(each.path)), None)


def verify(path: Path) -> list[str]:
    """Everything that is wrong with one checkpoint, a sentence a file; empty when it is what was written."""
    path = path.resolve()  # the user may name a link
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    step = manifests.step_of(path)
    if step is not None and step != manifest.global_step:
        problems.append(f"{MANIFEST}: it is of step {manifest.global_step}, the folder is not.")
    for name, said in manifest.files.items():
        try:
            content = _whole(path, name, said)
            if name in TENSOR_FILES:
                entries(content, name)
            else:
                _state(content, manifest)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def read_manifest(path: Path) -> Manifest:
    """The manifest of one checkpoint, checked; CheckpointError when there is none or it cannot be believed."""
    content = _mapped(path, MANIFEST)
    if len(content) > MANIFEST_LIMIT_BYTES:
        raise CheckpointError(
            f"{MANIFEST}: {len(content)} bytes are too many; at most {MANIFEST_LIMIT_BYTES} are read."
        )
    return manifests.decode(bytes(content))


def _state(content: memoryview, manifest: Manifest) -> State:
    if len(content) > JSON_LIMIT_BYTES:
        raise CheckpointError(f"{STATE_JSON}: {len(content)} bytes are too many; at most {JSON_LIMIT_BYTES} are read.")
    state = states.decode(content)
    if (state.global_step, state.lineage) != (manifest.global_step, manifest.lineage):
        raise CheckpointError(
            f"{STATE_JSON}: it is of step {state.global_step}, lineage {state.lineage}; {MANIFEST} not."
        )
    return state


def _whole(folder: Path, name: str, said: FileHash) -> memoryview:
    """A file's bytes, when their number and hash are what the manifest says."""
    content = _mapped(folder, name)
    if len(content) != said.size_bytes:
        raise CheckpointError(f"{name}: it has {len(content)} bytes, {said.size_bytes} were written.")
    if hashlib.sha256(content).hexdigest() != said.sha256:
        raise CheckpointError(f"{name}: its bytes are not what was written: the hash differs.")
    return content


def _check_size(folder: Path, name: str, said: FileHash) -> None:
    fd = _opened(folder, name)
    try:
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    if size != said.size_bytes:
        raise CheckpointError(f"{name}: it has {size} bytes, {said.size_bytes} were written.")


def _mapped(folder: Path, name: str) -> memoryview:
    """A plain file's bytes, mapped; never waits (a pipe of that name would)."""
    fd = _opened(folder, name)
    try:
        size = os.fstat(fd).st_size
        return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    except (OSError, ValueError) as error:  # ValueError: it shrank in between
        raise CheckpointError(f"{name}: it could not be read: {error}.") from None
    finally:
        os.close(fd)


def _opened(folder: Path, name: str) -> int:
    folder = folder.absolute()
    try:
        return files.open_below(folder.parent, (folder.name, name), os.O_RDONLY)
    except FileNotFoundError:
        raise CheckpointError(f"{name}: it is missing.") from None
    except files.Unusable as error:
        raise CheckpointError(f"{name}: {error.why}.") from None
    except OSError as error:
        raise CheckpointError(f"{name}: it could not be read: {error.strerror}.") from None


def _skipped(path: Path, problem: str) -> str:
    return f"The checkpoint {path} is damaged and left out: {problem}"
