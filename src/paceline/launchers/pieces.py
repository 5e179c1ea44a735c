"""WHERE does a piece of a run folder belong? What is carried how, and `keep`, which puts a piece in its place.

Called by who hears a launchers/mirror of another host: on the driver, and there, where the driver sends files.
Must never make a checkpoint look complete before it is, and never write outside of the run folder: no link is followed.
"""

import errno
import os
import shutil
from contextlib import suppress
from enum import Enum
from pathlib import Path, PurePosixPath

import msgspec

from paceline import files
from paceline.checkpoint import read
from paceline.checkpoint.manifest import MANIFEST, aside_name, step_of
from paceline.cluster import moved
from paceline.errors import ProtocolError
from paceline.transport.tls import CERTIFICATE, PRIVATE_KEY

LOGS, TELEMETRY, LEDGERS, CHECKPOINTS = "logs", "telemetry", "ledger", "checkpoints"
TENSORBOARD, EVENTS = "tensorboard", "tfevents"
GROWING = {LOGS: ".log", TELEMETRY: ".jsonl"}
COMING = ".coming-"  # how the name of what is not complete yet begins
STEP_DRAFT, SUMMARY_DRAFT = ".step-", ".summary.json."  # and of what is not written to its end
OWN = {"config.json", "cluster.json", "summary.json", "secret", moved.FILE, moved.LOCK, CERTIFICATE, PRIVATE_KEY}


class Kind(Enum):
    """How a file of a run folder is carried."""

    GROWS = "what is new of it"
    LEDGER = "its records"
    CHECKPOINT = "with the others of its folder"
    OTHER = "whole, at the end"
    NEVER = "not at all"


class Piece(msgspec.Struct, frozen=True):
    """Some bytes of a file of the run folder."""

    path: str  # below the run folder, with slashes
    offset: int
    data: bytes
    is_last: bool = False  # of a file that is carried whole


def keep(root: Path | str, piece: Piece, sender: str = "") -> Path | None:
    """Put a piece where it belongs; a checkpoint that is complete with it comes back, when it has its name. Several
    senders may be in the middle of files of one name: each has its own drafts. OSError: the disk is full, or a symbolic
    link lies in the way."""
    parts = parts_of(piece.path)
    kind = kind_of(parts)
    if kind is Kind.CHECKPOINT:
        return _keep_checkpoint(root, parts, piece, sender)
    folder = files.folder_below(root, parts[:-1], makes=True)
    try:
        if kind is Kind.GROWS:
            with os.fdopen(files.open_in(folder, parts[-1], os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
                file.write(piece.data)
        elif kind is Kind.LEDGER:
            _put(folder, parts[-1], piece)
        else:
            draft = draft_name(parts[-1], sender)
            if _put_next(folder, draft, piece) and piece.is_last:
                os.replace(draft, parts[-1], src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)
    return None


def kind_of(parts: tuple[str, ...]) -> Kind:
    """How the file at this path below a run folder is carried; both sides ask.

    >>> kind_of(("logs", "ps-0.log")).name, kind_of(("mine", "logs", "ps-0.log")).name
    ('GROWS', 'OTHER')
    >>> kind_of(("checkpoints", "step-00000010", "MANIFEST.json")).name, kind_of(("checkpoints", "best.pt")).name
    ('CHECKPOINT', 'OTHER')
    """
    top, name, depth = parts[0], parts[-1], len(parts)
    if any(part.startswith(".") for part in parts) or (depth == 1 and top.casefold() in OWN):  # macOS: Secret is secret
        return Kind.NEVER
    if top == CHECKPOINTS and depth > 2 and step_of(Path(parts[1])) is not None:
        return Kind.CHECKPOINT if depth == 3 else Kind.NEVER
    if depth == 2 and (name.endswith(GROWING.get(top, "/")) or (top == TENSORBOARD and EVENTS in name)):
        return Kind.GROWS
    return Kind.LEDGER if depth == 2 and top == LEDGERS and name.endswith(".bin") else Kind.OTHER


def is_ours(parts: tuple[str, ...]) -> bool:
    """Whether what is never carried is known where it would be carried to, or is half of something.

    >>> is_ours(("secret",)), is_ours(("checkpoints", ".step-00000010.77-1", "state.json")), is_ours((".notes",))
    (True, True, False)
    """
    is_draft = any(part.startswith((COMING, SUMMARY_DRAFT)) for part in parts)
    return is_draft or parts[0] in OWN or (parts[0] == CHECKPOINTS and parts[1].startswith(STEP_DRAFT))


def parts_of(text: str) -> tuple[str, ...]:
    """The parts of a piece's path; ProtocolError for one that no mirror sends."""
    path = PurePosixPath(text)
    parts = path.parts
    is_strange = path.is_absolute() or not parts or any(part.startswith(".") or "\0" in part for part in parts)
    if is_strange or kind_of(parts) is Kind.NEVER:
        raise ProtocolError(f"a piece of {text!r}, which is no file that a host may send")
    return parts


def _put(folder: int, name: str, piece: Piece) -> None:
    """Write the bytes at their place and end the file there. Refuse to begin behind its end: the sender could choose
    the size of the hole."""
    file = files.open_in(folder, name, os.O_WRONLY | os.O_CREAT)
    try:
        size = os.fstat(file).st_size
        if piece.offset > size:
            raise OSError(errno.EINVAL, f"it has {size} bytes here, and the piece begins at {piece.offset}")
        rest, at = memoryview(piece.data), piece.offset
        while rest:  # on a full disk less is written than was asked for, before that is told
            count = os.pwrite(file, rest, at)
            rest, at = rest[count:], at + count
        os.ftruncate(file, piece.offset + len(piece.data))
        if piece.is_last:
            os.fsync(file)
    finally:
        os.close(file)


def _put_next(folder: int, name: str, piece: Piece) -> bool:
    """Append a piece to a draft, and return whether it was the next one. If it is not, or cannot be written, remove the
    draft: with a hole it would look whole. Later pieces of it are dropped; the first failure was told."""
    is_next = not piece.offset or piece.offset == _size(folder, name)
    try:
        if is_next:
            _put(folder, name, piece)
    except OSError:
        _remove_in(folder, name)
        raise
    if not is_next:
        _remove_in(folder, name)
    return is_next


def _size(folder: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    except OSError:
        return 0


def draft_name(name: str, sender: str) -> str:
    """What is not complete yet is called so.

    >>> draft_name("step-00000010", "worker:1"), draft_name("best.pt", "")
    ('.coming-worker_1-step-00000010', '.coming-best.pt')
    """
    told = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in sender)
    return f"{COMING}{told}{'-' if told else ''}{name}"


def sweep(root: Path | str) -> None:
    """Nothing comes any more: what is half there is of no use to anybody."""
    for path in Path(root).rglob(f"{COMING}*"):
        _remove(path)


def _remove(draft: Path) -> None:
    """As far as the disk allows."""
    if draft.is_dir() and not draft.is_symlink():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        with suppress(OSError):
            draft.unlink()


def _remove_in(folder: int, name: str) -> None:
    """Remove a file, a link, or a folder with all that is in it, from an open folder."""
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        shutil.rmtree(name, ignore_errors=True, dir_fd=folder)


def _keep_checkpoint(root: Path | str, parts: tuple[str, ...], piece: Piece, sender: str) -> Path | None:
    """Into a hidden folder, which gets its name when all that its manifest lists is there."""
    top, name, file = parts
    final, step = Path(root, top, name), step_of(Path(name))
    if step is None:
        raise ProtocolError(f"a piece of {piece.path!r}, which is no checkpoint")
    draft = draft_name(name, sender)
    checkpoints = files.folder_below(root, (top,), makes=True)
    try:
        if not _put_in_draft(checkpoints, draft, file, piece) or file != MANIFEST or not piece.is_last:
            return None
        if not read.examine(final.with_name(draft)).is_complete:  # another of that name came in between, or too little
            _remove_in(checkpoints, draft)
            return None
        aside = aside_name(step)
        with suppress(FileNotFoundError):
            os.rename(name, aside, src_dir_fd=checkpoints, dst_dir_fd=checkpoints)
        os.rename(draft, name, src_dir_fd=checkpoints, dst_dir_fd=checkpoints)
        _remove_in(checkpoints, aside)
        return final
    finally:
        os.close(checkpoints)


def _put_in_draft(checkpoints: int, draft: str, file: str, piece: Piece) -> bool:
    """Put a piece into the draft of a checkpoint; if that fails, or the draft is a link, remove the whole draft."""
    inside = None
    try:
        inside = files.folder_in(checkpoints, draft, makes=True)
        is_in = _put_next(inside, file, piece)
    except OSError:
        _remove_in(checkpoints, draft)
        raise
    finally:
        if inside is not None:
            os.close(inside)
    if not is_in:
        _remove_in(checkpoints, draft)
    return is_in
