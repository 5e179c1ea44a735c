"""WHAT of a folder must not travel with it? Run folders, and the keys that tasks prove themselves with, at any depth.

Called by hosts/syncing and ray/on_ray, which copy the user's folder to other machines. Must never leave out code: of a
folder that holds some only the keys stay here. A secret under another name is not known for one.
"""

import os
import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from paceline.transport.tls import CERTIFICATE, PRIVATE_KEY

SECRET = "secret"
WITH_SECRET = {"cluster.json", SECRET}  # are only in a run folder
WITHOUT, BESIDE = {"cluster.json", "config.json"}, {"logs", "telemetry"}  # and so are these with one of those folders
KEYS = frozenset({SECRET, CERTIFICATE, PRIVATE_KEY})


def private_below(folder: Path, unread: Collection[str] = (), follows_links: bool = False) -> list[str]:
    """What stays here, by its path in `folder`. `unread`: what is not copied anyway, as patterns of names at any depth
    or as "/path"; `follows_links`: as the one who copies does.

    >>> private_below(Path("/nowhere"))
    []
    """

    def found(below: str, above: frozenset[str]) -> Iterator[str]:
        """`above`: the folders that this one lies in; a link back to one of them has no end, and stays here, too."""
        real = os.path.realpath(folder / below)
        if real in above:
            yield below
            return
        files, folders = set[str](), list[str]()
        for entry in _entries(folder / below):
            path = os.path.join(below, entry.name)
            if any(fnmatchcase(entry.name, pattern) or f"/{path}" == pattern for pattern in unread):
                continue
            if _is_folder(entry, follows_links):
                folders.append(path)
            else:
                files.add(entry.name)
        if below and is_run(files, {os.path.basename(path) for path in folders}):
            yield below
            return
        yield from (os.path.join(below, name) for name in keys_among(files))
        for path in folders:
            yield from found(path, above | {real})

    return sorted(found("", frozenset()))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Of a folder that cannot be read nothing is copied, either."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str], follows_links: bool) -> bool:
    try:
        return entry.is_dir(follow_symlinks=follows_links)
    except OSError:  # a link to itself
        return False


def is_run(files: set[str], folders: set[str]) -> bool:
    """Whether a folder that has these is a run folder, and holds no code.

    >>> is_run({"cluster.json", "config.json"}, {"logs"}), is_run({"cluster.json", "config.json"}, {"data"})
    (True, False)
    """
    if any(name.endswith(".py") for name in files):
        return False
    return files >= WITH_SECRET or (files >= WITHOUT and not BESIDE.isdisjoint(folders))


def keys_among(files: set[str]) -> set[str]:
    """Those of a folder's files that are keys: a secret, and a key beside its certificate or a secret.

    >>> sorted(keys_among({"secret", "key.pem", "train.py"})), keys_among({"certificate.pem", "train.py"})
    (['key.pem', 'secret'], set())
    """
    found = files & KEYS
    return found if SECRET in found or found == {CERTIFICATE, PRIVATE_KEY} else set()


def for_rsync(path: str) -> str:
    r"""A pattern of rsync that means this path alone. A backslash is one of its signs only where there are others.

    >>> print(for_rsync("out/run[1]"), for_rsync(r"a\b"), for_rsync(r"a\b*"))
    /out/run\[1] /a\b /a\\b\*
    """
    return "/" + (re.sub(r"([\\*?\[])", r"\\\1", path) if re.search(r"[*?\[]", path) else path)


def for_gitignore(path: str) -> str:
    r"""A line of a .gitignore, which is what Ray reads, that means this path alone; "?" is any one character.

    >>> print(for_gitignore("out/run[1]"), for_gitignore("ends so "))
    /out/run\[1\] /ends?so?
    """
    return "/" + re.sub(r"([\\*?\[\]])", r"\\\1", re.sub(r"\s", "\0", path)).replace("\0", "?")
