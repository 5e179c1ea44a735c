"""Open files below a folder, and follow no symbolic link on the way.

Used for files of run folders and checkpoints: a script may have put a link there, and what another host sends, or what
is read, would lie outside of the folder. The folder itself is the user's choice and may be a link. Never waits (a pipe
of that name would), and opens plain files only.
"""

import errno
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

SMALL_BYTES = 1 << 20
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
HARD_LINK = "it has another name, too (a hard link), and what is written there would be in both"
LINK = "it is a symbolic link, and none is followed there"


class Unusable(OSError):
    """A file that was refused for what it is: a link, a pipe, too large."""

    def __init__(self, number: int, name: str, why: str) -> None:
        super().__init__(number, f"{name}: {why}")
        self.why = why


def as_json(value: object, enc_hook: Callable[[object], object] | None = None) -> bytes:
    """Encode a value as JSON; a name that is not text, as a file of another encoding has, with readable escapes.

    >>> print(as_json({"run_dir": "gr\\udcf6", "ü": 1}).decode())
    {"run_dir":"gr\\\\udcf6","ü":1}
    """
    try:
        return msgspec.json.encode(value, enc_hook=enc_hook)
    except UnicodeEncodeError:
        pass

    def plain(each: object) -> object:
        if isinstance(each, msgspec.Raw):  # encoded already
            return msgspec.json.decode(each)
        if enc_hook is None:
            raise TypeError(f"no JSON is made of {type(each).__name__}")
        return enc_hook(each)

    return msgspec.json.encode(as_text(msgspec.to_builtins(value, enc_hook=plain)))


def as_text(value: Any) -> Any:
    """Return the same value, in whose strings an escape stands for each byte that is not text."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {as_text(key): as_text(each) for key, each in value.items()}
    return [as_text(each) for each in value] if isinstance(value, list | tuple) else value


def folder_below(root: Path | str, parts: Sequence[str], makes: bool = False) -> int:
    """Open the folder root/parts; `makes` creates the folders that are missing."""
    if makes:
        os.makedirs(root, exist_ok=True)
    folder = os.open(root, FOLDER)
    for part in parts:
        try:
            inner = folder_in(folder, part, makes)
        finally:
            os.close(folder)
        folder = inner
    return folder


def folder_in(folder: int, name: str, makes: bool = False) -> int:
    """Open a folder in an open folder; `makes` creates one that is missing."""
    try:
        if makes:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=folder)
        return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        raise _explained(error, name, folder) from None


def open_in(folder: int, name: str, flags: int, mode: int = 0o644) -> int:
    """Open a plain file in an open folder."""
    try:
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=folder)
    except OSError as error:
        raise _explained(error, name, folder) from None
    told = os.fstat(file)
    is_written = bool(flags & (os.O_WRONLY | os.O_RDWR))
    why = "it is not a plain file" if not stat.S_ISREG(told.st_mode) else ""
    why = why or (HARD_LINK if is_written and told.st_nlink > 1 else "")
    if why:
        os.close(file)
        raise Unusable(errno.EINVAL, name, why)
    return file


def open_below(root: Path | str, parts: Sequence[str], flags: int, makes_folders: bool = False) -> int:
    """Open the plain file root/parts."""
    folder = folder_below(root, parts[:-1], makes_folders)
    try:
        return open_in(folder, parts[-1], flags)
    finally:
        os.close(folder)


def reading(root: Path | str, path: Path) -> BinaryIO:
    """Open a plain file that lies below the root, to read it."""
    return os.fdopen(open_below(root, path.relative_to(root).parts, os.O_RDONLY), "rb")


def content(root: Path | str, name: str, limit_bytes: int = SMALL_BYTES) -> bytes:
    """Read a small plain file of a folder."""
    with os.fdopen(open_below(root, (name,), os.O_RDONLY), "rb") as file:
        found = file.read(limit_bytes + 1)
    if len(found) > limit_bytes:
        raise Unusable(errno.EFBIG, name, f"it is larger than {limit_bytes} bytes")
    return found


def appending(root: Path | str, path: Path) -> BinaryIO:
    """Open a plain file that lies below the root, to add to it; it and its folders are made."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    file = open_below(root, path.relative_to(root).parts, flags, makes_folders=True)
    return os.fdopen(file, "ab", buffering=0)


def _explained(error: OSError, name: str, folder: int) -> OSError:
    """Return the same error, or one that names the link where that is the reason (systems use two numbers for it)."""
    try:
        is_link = stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        is_link = False
    return Unusable(errno.ELOOP, name, LINK) if is_link else error
