"""HOW does a file get here? An HTTP download that goes on where it stopped, is checked, then renamed.

Called by datasets/catalogue. Must never leave a file under its final name whose checksum is wrong.

1. A file with the right checksum is left alone.  2. One process at a time downloads into a folder.
3. Bytes that an earlier try left in `<name>.part` are not asked for again (HTTP Range), if the server can.
4. The end of the stream too early keeps the part for the next try.  5. A wrong checksum removes the part.
6. The part is renamed to the final name.
"""

import fcntl
import hashlib
import http.client
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from paceline.datasets.progress import shown
from paceline.errors import PacelineError, UsageError

CHUNK_BYTES = 1 << 18
TIMEOUT_S = 30.0


class _Answer(msgspec.Struct, frozen=True):
    """What the server will send: from which byte on, and the whole file's length (None: it does not say)."""

    begins_at: int
    total_bytes: int | None


def fetch(url: str, path: Path, md5: str, size: int | None = None) -> Path:
    """`path`, holding the bytes of `url` with this MD5 sum (and size); downloads only what is missing."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise UsageError(f"{url} cannot be fetched: only http and https addresses can")
    try:
        if path.is_file() and md5_of(path) == md5:  # 1
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(path.parent):  # 2
            if path.is_file() and md5_of(path) == md5:  # another process was faster
                return path
            _fetch(url, path, md5, size)
    except (OSError, http.client.HTTPException) as error:
        raise PacelineError(f"{url} could not be fetched: {error or type(error).__name__}") from error
    return path


def md5_of(path: Path) -> str:
    """The file's MD5 sum, read piece by piece."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _fetch(url: str, path: Path, md5: str, size: int | None) -> None:
    part = path.with_name(path.name + ".part")
    _receive(url, part, size)
    found = md5_of(part)
    if found != md5:  # 5
        part.unlink()
        raise PacelineError(f"{url} sent bytes with MD5 {found} instead of {md5}: nothing was kept")
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(part, path)  # 6


def _receive(url: str, part: Path, size: int | None) -> None:
    """Brings `part` to its full length; raises when the stream ends before."""
    have = part.stat().st_size if part.exists() else 0
    if size is not None and have == size:
        return
    if size is not None and have > size:
        part.unlink()
        have = 0
    headers = {"Range": f"bytes={have}-"} if have else {}  # 3
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        if have and error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # the part is complete already, or wrong: its checksum tells
        raise
    with response:
        answer = _understood(url, response, have)
        if None not in (size, answer.total_bytes) and answer.total_bytes != size:
            raise PacelineError(f"{url} has {answer.total_bytes} bytes, expected were {size}")
        _store(url, response, part, answer)


def _understood(url: str, response: http.client.HTTPResponse, have: int) -> _Answer:
    if response.status == HTTPStatus.OK:  # also from a server that ignores Range
        return _Answer(0, response.length)
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
    if response.status != HTTPStatus.PARTIAL_CONTENT or not match or int(match[1]) != have:
        raise PacelineError(f"{url} answered {response.status} with a range that was not asked for")
    return _Answer(have, None if match[2] == "*" else int(match[2]))


def _store(url: str, response: http.client.HTTPResponse, part: Path, answer: _Answer) -> None:
    done = answer.begins_at
    with (
        part.open("ab" if answer.begins_at else "wb") as file,
        shown(part.stem, answer.begins_at, answer.total_bytes) as advance,
    ):
        while piece := response.read(CHUNK_BYTES):
            file.write(piece)
            done += len(piece)
            advance(len(piece))
    if answer.total_bytes is not None and done < answer.total_bytes:  # 4
        raise PacelineError(
            f"{url} ended after {done} of {answer.total_bytes} bytes; they are kept, the next try goes on"
        )


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Holds a lock on the folder itself: nothing is left behind, and the lock of a killed process is free."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process downloads into {folder}: waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
