"""HOW does a run folder on another host come back? Piece by piece, while it grows.

Called by hosts/agent and ray/actors, which send pieces in order; launchers/pieces puts them in their place.
Must never send half a checkpoint as a whole one, nor anything twice that has not changed.

- logs, telemetry and TensorBoard's files only grow: what is new is added to the end there; telemetry in whole lines,
  because the launcher adds lines of its own. So several hosts may tell of one task, one after the other.
- a ledger is a mapped file, longer than what was written, and a ps that was started again goes back in it: whole
  records, at their place; what was sent and has changed since is sent again.
- a checkpoint is carried when it is complete, the newest first, MANIFEST.json last: then it gets its name.
- any other file that the script left in the folder, wherever, is carried whole, after finish(); no hidden ones.
- no symbolic link is followed, wherever it is, because it could lead out of the folder: `left` names it.
"""

import hashlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from paceline import files
from paceline.checkpoint import read
from paceline.checkpoint.manifest import MANIFEST, MANIFEST_LIMIT_BYTES, folder_name
from paceline.cluster.spec import Task
from paceline.launchers.pieces import (
    CHECKPOINTS,
    LEDGERS,
    LOGS,
    TELEMETRY,
    TENSORBOARD,
    Kind,
    Piece,
    is_ours,
    keep,
    kind_of,
    parts_of,
)
from paceline.telemetry import ledger
from paceline.telemetry.paths import RunPaths

PIECE_BYTES = 256 << 10
LIMIT_BYTES = 1 << 20
BLOCK_BYTES = 64 << 10  # of a ledger; a multiple of its records

Coming = tuple[Path, Iterator[Piece]]


class Mirror:
    """What is new in a run folder since the last call.

    >>> list(Mirror("/nowhere").pieces())
    []
    """

    def __init__(self, root: Path | str) -> None:
        self._root = Path(root)
        self._sent: dict[Path, int] = {}  # how far, of files that grow
        self._blocks: dict[Path, list[bytes]] = {}  # of ledgers: the digests of what was sent
        self._cut: set[Path] = set()  # ledgers of which less is true than was sent
        self._carried: dict[Path, object] = {}  # by what one sees that it has changed
        self._coming: Coming | None = None  # a checkpoint, or another file, that is on its way
        self._half: set[Path] = set()  # what could not be read to its end
        self._is_over = False
        self._rest: list[Path] = []  # other files, then

    def skip(self, names: Collection[str] | None = None) -> None:
        """Mark what is there now as already sent: all of it, or the files and checkpoints of these names."""

        def of(paths: list[Path]) -> list[Path]:
            return [path for path in paths if names is None or self._name(path) in names]

        for path in of(self._growing()):
            self._sent[path] = path.stat().st_size
        for path in of(self._ledgers()):
            self._blocks[path] = self._digests(path, self._end_of(path))
            self._sent[path] = self._end_of(path)
        for folder in of(self._checkpoints()):
            self._carried[folder] = self._manifest(folder)
        for path in of(self._others()):
            self._carried[path] = _stamp(path)

    def put(self, piece: Piece) -> None:
        """Keep a piece that the other side has sent, and mark it as already sent."""
        made = keep(self._root, piece)
        if made is not None or kind_of(parts_of(piece.path)) is not Kind.CHECKPOINT:
            self.skip([self._name(made) if made is not None else piece.path])

    def finish(self) -> None:
        """All tasks have ended: from now on half lines and other files count, and ledgers are compared as a whole."""
        if self._is_over:
            return
        self._is_over, self._rest = True, self._others()
        for path in self._ledgers():
            self._rewind(path, is_whole=True)

    def pieces(self, limit_bytes: int = LIMIT_BYTES, with_large: bool = True) -> list[Piece]:
        """Up to about so many bytes that are new; an empty list: nothing is, now. Without `with_large` only of files
        that grow."""
        found, size_bytes = [], 0
        for piece in self._news(with_large):
            found.append(piece)
            size_bytes += len(piece.data)
            if size_bytes >= limit_bytes:
                break
        return found

    def _news(self, with_large: bool) -> Iterator[Piece]:
        """What is noted as sent is so before it is yielded: nobody may ask for more."""
        for path in self._growing():
            yield from self._grown(path)
        for path in self._ledgers():
            yield from self._written(path)
        while with_large and (coming := self._coming or self._next_large()) is not None:
            self._coming, (path, rest) = coming, coming
            while (piece := next(rest, None)) is not None:  # it goes on at the next call, if this one ends here
                (self._half.discard if piece.is_last else self._half.add)(path)
                yield piece
            self._coming = None

    def _grown(self, path: Path) -> Iterator[Piece]:
        is_lines = path.parent.name == TELEMETRY and not self._is_over
        while data := self._read(path, self._from(path)):
            end = data.rfind(b"\n") + 1
            if is_lines and (end or len(data) < PIECE_BYTES):  # a line may be longer than a piece
                data = data[:end]
            if not data:
                return
            offset = self._from(path)
            self._sent[path] = offset + len(data)
            yield Piece(self._name(path), offset, data)

    def _from(self, path: Path) -> int:
        """Where what is new begins: at the start again in a file that was cut."""
        sent = self._sent.get(path, 0)
        try:
            return sent if path.stat().st_size >= sent else 0
        except OSError:
            return sent

    def _written(self, path: Path) -> Iterator[Piece]:
        self._rewind(path)
        end = self._end_of(path)
        if path in self._cut and end <= self._sent[path]:
            yield Piece(self._name(path), end, b"")
        self._cut.discard(path)
        while (offset := self._sent.get(path, 0)) < end:
            start = offset // BLOCK_BYTES * BLOCK_BYTES
            block = self._read(path, start, min(BLOCK_BYTES, end - start))
            if len(block) <= offset - start:
                return
            self._blocks.setdefault(path, [])[start // BLOCK_BYTES :] = [_digest(block)]
            self._sent[path] = start + len(block)
            yield Piece(self._name(path), offset, block[offset - start :])

    def _rewind(self, path: Path, is_whole: bool = False) -> None:
        """Go back to where the ledger differs from what was sent; looked at are its last block, or all of them."""
        sent, known = self._sent.get(path, 0), self._blocks.get(path, [])
        if not known:
            return
        last = len(known) - 1
        if not is_whole and _digest(self._read(path, last * BLOCK_BYTES, sent - last * BLOCK_BYTES)) == known[last]:
            return
        same = [old == new for old, new in zip(known, self._digests(path, sent), strict=False)]
        if not all(same) or len(same) < len(known):
            first = same.index(False) if False in same else len(same)
            self._sent[path] = first * BLOCK_BYTES
            self._cut.add(path)
            del known[first:]

    def _next_large(self) -> Coming | None:
        """What is carried next: it counts as carried from here on, though it may be removed on its way."""
        for folder in self._checkpoints():
            if self._carried.get(folder) != (manifest := self._manifest(folder)):
                self._carried[folder] = manifest
                return self._begin(folder)
        while self._rest:
            path = self._rest.pop(0)
            if self._carried.get(path) != (stamp := _stamp(path)):
                self._carried[path] = stamp
                return self._begin(path)
        return None

    def _begin(self, path: Path) -> Coming:
        self._half.add(path)
        return path, whole(path, self._name(path), self._root)

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()

    def left(self) -> list[str]:
        """After the last piece: what of the folder was not sent, and is not ours; only here it can be found."""
        half = [path for path in self._half if path.exists()]
        return sorted(map(self._name, [*half, *filter(self._is_left, self._all())]))

    def _is_left(self, path: Path) -> bool:
        parts, kind = path.relative_to(self._root).parts, kind_of(path.relative_to(self._root).parts)
        if kind is Kind.NEVER:
            return not is_ours(parts)
        return path.is_symlink() or (kind is Kind.OTHER and not path.is_file())

    def _read(self, path: Path, offset: int, count: int = PIECE_BYTES) -> bytes:
        return _read(self._root, path, offset, count)

    def _end_of(self, path: Path) -> int:
        """Return where the whole records of a ledger end."""
        try:
            with files.reading(self._root, path) as file:
                return ledger.end_of(file.fileno())
        except OSError:
            return 0

    def _digests(self, path: Path, size_bytes: int) -> list[bytes]:
        """Return the digest of every block of a ledger, up to this size."""
        starts = range(0, size_bytes, BLOCK_BYTES)
        return [_digest(self._read(path, start, min(BLOCK_BYTES, size_bytes - start))) for start in starts]

    def _manifest(self, folder: Path) -> bytes:
        """Read the manifest, which differs between checkpoints of the same step."""
        return self._read(folder / MANIFEST, 0)

    def _growing(self) -> list[Path]:
        found = [path for name in (LOGS, TELEMETRY, TENSORBOARD) for path in sorted((self._root / name).glob("*"))]
        return [path for path in found if kind_of((path.parent.name, path.name)) is Kind.GROWS]

    def _ledgers(self) -> list[Path]:
        found = sorted((self._root / LEDGERS).glob("*"))
        return [path for path in found if kind_of((LEDGERS, path.name)) is Kind.LEDGER]

    def _checkpoints(self) -> list[Path]:
        """The complete ones, the newest first."""
        found = read.find(self._root / CHECKPOINTS)
        return [each.path for each in found if each.is_complete and not each.path.name.startswith(".")]

    def _others(self) -> list[Path]:
        """What a script has put into the run folder by itself."""
        files = [path for path in self._all() if path.is_file() and not path.is_symlink()]
        return [path for path in files if kind_of(path.relative_to(self._root).parts) is Kind.OTHER]

    def _all(self) -> list[Path]:
        """Everything in the folder that is no folder itself."""
        found = []
        for folder, inner, names in os.walk(self._root):
            inner.sort()
            links = [name for name in inner if Path(folder, name).is_symlink()]
            found += [Path(folder, name) for name in sorted([*names, *links])]
        return found


def whole(what: Path, name: str, root: Path | None = None) -> Iterator[Piece]:
    """Yield all pieces of a file, or of a checkpoint, whose manifest comes last; `name` is its path in a run folder.
    Follow no link below `root`; without one, below the checkpoint itself."""
    is_folder = what.is_dir()
    root = root or (what if is_folder else what.parent)
    for path in _files_of(what) if is_folder else [what]:
        try:
            size, offset = path.lstat().st_size, 0
        except OSError:  # it was removed meanwhile
            return
        while offset < size or not offset:
            data = _read(root, path, offset, MANIFEST_LIMIT_BYTES if path.name == MANIFEST else PIECE_BYTES)
            if not data and size:
                return
            yield Piece(f"{name}/{path.name}" if is_folder else name, offset, data, offset + len(data) >= size)
            offset += max(1, len(data))


def told_by(paths: RunPaths, task: Task) -> Iterator[Piece]:
    """What a task has told so far, behind which it goes on elsewhere; read when it is asked for: it may be large."""
    for path in (paths.telemetry(task), paths.ledger(task)):
        if path.exists():
            yield from whole(path, path.relative_to(paths.root).as_posix(), paths.root)


def name_of(checkpoint: Path) -> str:
    """Of a checkpoint in any run folder, wherever it lies."""
    return f"{CHECKPOINTS}/{folder_name(read.examine(checkpoint).global_step)}"


def _digest(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=8).digest()


def _read(root: Path, path: Path, offset: int, count: int = PIECE_BYTES) -> bytes:
    """Read a part of a file below the root; nothing if it is gone, or lies behind a link."""
    try:
        with files.reading(root, path) as file:
            file.seek(offset)
            return file.read(count)
    except OSError:
        return b""


def _files_of(folder: Path) -> list[Path]:
    try:
        found = [path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
        return sorted(found, key=lambda path: path.name == MANIFEST)
    except OSError:
        return []


def _stamp(path: Path) -> tuple[int, int]:
    """By which a change of a file is seen."""
    try:
        told = path.lstat()
        return told.st_size, told.st_mtime_ns
    except OSError:
        return 0, 0
