"""WHAT are the small photographs? CIFAR-10 in its original binary format, and a made-up set of the very same format.

Called by the demo cifar10, examples and tests. Must never import torch, never unpack an archive, and never touch the
network unless a folder is named.

A record is 3,073 bytes: the label, then 1,024 red, 1,024 green and 1,024 blue pixels, row by row.
"""

import tarfile
import zlib
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.datasets.catalogue import CATALOGUE, get
from paceline.datasets.download import md5_of
from paceline.datasets.shapes import draw
from paceline.errors import PacelineError, UsageError

SIDE = 32
CLASSES = 10
RECORD_BYTES = 1 + 3 * SIDE * SIDE
MAX_RECORDS = 10_000  # in a file of the original set
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
FILES = (*TRAIN_FILES, TEST_FILE)
FOLDER = "cifar-10-batches-bin"  # as the archive calls it

Images = npt.NDArray[np.uint8]  # (number, 3, 32, 32)
Labels = npt.NDArray[np.int64]


class Cifar10(msgspec.Struct, frozen=True, eq=False):
    """Images of 3 x 32 x 32 bytes, labels from 0 to 9, and where they come from."""

    train_x: Images
    train_y: Labels
    test_x: Images
    test_y: Labels
    source: str


def load(data_dir: str | Path | None = None) -> Cifar10:
    """The set in `data_dir`, downloaded into it when it is not there; without a folder, a made-up set, offline.

    `data_dir` may hold the archive of the binary version, whose MD5 sum is checked every time, or the six files that
    somebody unpacked from it, here or in their own folder.
    """
    if data_dir is None:
        return synthetic()
    folder = Path(data_dir)
    for place in (folder / FOLDER, folder):
        if any((place / name).is_file() for name in FILES):
            return _assembled({name: _bytes_of(place / name) for name in FILES}, str(place))
    archive = _archive(folder)
    return _assembled(_read_archive(archive), str(archive))


def synthetic(seed: int = 0, train: int = 5_000, test: int = 1_000) -> Cifar10:
    """A set that can be learned, made from a seed: its bytes go through the reader of the real one.

    >>> small = synthetic(train=10, test=5)
    >>> small.train_x.shape, small.test_y.shape, small.source
    ((10, 3, 32, 32), (5,), 'made up: ten kinds of shapes, seed 0')
    """
    if train < len(TRAIN_FILES) or train % len(TRAIN_FILES) or test < 1:
        raise UsageError(f"{train} and {test} images: a set has five equal training files and one for testing")
    counts = dict.fromkeys(TRAIN_FILES, train // len(TRAIN_FILES)) | {TEST_FILE: test}
    made = {name: records(count, seed * len(FILES) + number) for number, (name, count) in enumerate(counts.items())}
    return _assembled(made, f"made up: ten kinds of shapes, seed {seed}")


def write_synthetic(folder: str | Path, seed: int = 0, train: int = 5_000, test: int = 1_000) -> Path:
    """The made-up set as six files, for programs that read CIFAR-10 from a folder; returns that folder."""
    made, place = synthetic(seed, train, test), Path(folder) / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    labels = (*np.split(made.train_y, len(TRAIN_FILES)), made.test_y)
    images = (*np.split(made.train_x, len(TRAIN_FILES)), made.test_x)
    for name, y, x in zip(FILES, labels, images, strict=True):
        (place / name).write_bytes(to_records(x, y))
    return place


def records(count: int, seed: int) -> bytes:
    """So many records of drawn shapes; the same for the same seed."""
    generator = np.random.default_rng(seed)
    labels = generator.permutation(np.arange(count) % CLASSES)
    return to_records(draw(labels, SIDE, generator), labels)


def to_records(images: Images, labels: npt.NDArray[np.integer]) -> bytes:
    """Images and labels in the binary format."""
    flat = images.reshape(len(images), -1)
    return np.concatenate([labels.astype(np.uint8)[:, None], flat], axis=1).tobytes()


def parse(content: bytes, name: str) -> tuple[Images, Labels]:
    """Images and labels out of the binary format; a UsageError names the file when it is none."""
    if not content or len(content) % RECORD_BYTES:
        raise UsageError(
            f"{name} is damaged or not the binary version: its {len(content)} bytes are no records of {RECORD_BYTES}"
        )
    table = np.frombuffer(content, np.uint8).reshape(-1, RECORD_BYTES)
    labels = table[:, 0].astype(np.int64)
    if labels.max() >= CLASSES:
        raise UsageError(f"{name} holds the label {labels.max()}, the classes end at {CLASSES - 1}")
    return table[:, 1:].reshape(-1, 3, SIDE, SIDE), labels


def _assembled(contents: dict[str, bytes], source: str) -> Cifar10:
    parsed = {name: parse(content, name) for name, content in contents.items()}
    train_x = np.concatenate([parsed[name][0] for name in TRAIN_FILES])
    train_y = np.concatenate([parsed[name][1] for name in TRAIN_FILES])
    return Cifar10(train_x, train_y, *parsed[TEST_FILE], source)


def _bytes_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_RECORDS * RECORD_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"{path.parent} lacks {path.name}; the set is {', '.join(FILES)}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _archive(folder: Path) -> Path:
    """The checked archive in `folder` itself, or where paceline.datasets.get keeps it, and puts it."""
    (remote,) = CATALOGUE["cifar10"].files
    path = folder / remote.name
    if not path.is_file():
        try:
            return get("cifar10", folder) / remote.name
        except PacelineError as error:
            raise UsageError(f"{error}; put it there yourself, or name no folder: then a set is made up") from error
    found = md5_of(path)
    if found != remote.md5:
        raise UsageError(f"{path} is damaged: its MD5 sum is {found}, not {remote.md5}; remove it to fetch it again")
    return path


def _read_archive(path: Path) -> dict[str, bytes]:
    """The six files of the archive, read where they lie: nothing is unpacked, no other member is touched."""
    contents = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = member.name.removeprefix(f"{FOLDER}/")
                if name in FILES and member.isreg() and member.size <= MAX_RECORDS * RECORD_BYTES:
                    file = archive.extractfile(member)
                    contents[name] = file.read() if file is not None else b""
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise UsageError(f"{path} is damaged or cannot be read: {error}") from error
    lacking = [name for name in FILES if name not in contents]
    if lacking:
        raise UsageError(f"{path} lacks {', '.join(lacking)}")
    return contents
