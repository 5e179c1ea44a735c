"""WHAT are the digits? MNIST as numpy arrays, from the four files in the package or from a folder.

Called by demos, the lab and scripts. Must never import torch, and never touch the network.
"""

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.datasets import idx
from paceline.errors import PacelineError, UsageError

EMBEDDED = Path(__file__).with_name("mnist_files")
MD5 = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
PIXELS = 28 * 28
CLASSES = 10
VALIDATION = 5_000

Pixels = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


class Split(msgspec.Struct, frozen=True, eq=False):
    """Three parts, as TensorFlow's `read_data_sets` gives them: for MNIST 55,000, 5,000 and 10,000 images."""

    train_x: Pixels
    train_y: Labels
    validation_x: Pixels
    validation_y: Labels
    test_x: Pixels
    test_y: Labels


class Mnist(msgspec.Struct, frozen=True, eq=False):
    """Images as rows of 784 numbers from 0 to 1, labels as integers from 0 to 9."""

    train_x: Pixels
    train_y: Labels
    test_x: Pixels
    test_y: Labels

    def tensorflow_split(self) -> Split:
        """The first 5,000 training images are for validation, the rest for training (document 000)."""
        if len(self.train_x) <= VALIDATION:
            raise UsageError(f"{len(self.train_x)} training images leave none after {VALIDATION} for validation")
        return Split(
            train_x=self.train_x[VALIDATION:],
            train_y=self.train_y[VALIDATION:],
            validation_x=self.train_x[:VALIDATION],
            validation_y=self.train_y[:VALIDATION],
            test_x=self.test_x,
            test_y=self.test_y,
        )


def load(data_dir: str | Path | None = None) -> Mnist:
    """The embedded MNIST, or the set of the same format that lies in `data_dir`.

    `data_dir` may be torchvision's root (`DIR/MNIST/raw/…`) or hold the four files itself, `.gz` or not.
    The embedded files must have their published MD5 sums; those of `data_dir` must be well formed and fit
    each other.

    >>> load().train_x.shape
    (60000, 784)
    """
    paths = [_checked(name) for name in MD5] if data_dir is None else _found(Path(data_dir))
    train_x, train_y, test_x, test_y = paths
    return Mnist(*_pair(train_x, train_y), *_pair(test_x, test_y))


def _checked(name: str) -> Path:
    """The embedded file, after a look at its MD5 sum."""
    path = EMBEDDED / f"{name}.gz"
    try:
        md5 = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    except OSError as error:
        raise PacelineError(f"{path} of the embedded MNIST cannot be read, install paceline again: {error}") from error
    if md5 != MD5[name]:
        raise PacelineError(
            f"{path} of the embedded MNIST is damaged (MD5 {md5}, not {MD5[name]}): install paceline again"
        )
    return path


def _found(data_dir: Path) -> list[Path]:
    """The four files in the first folder that has any of them."""
    for folder in (data_dir / "MNIST" / "raw", data_dir / "raw", data_dir):
        places = {name: [folder / name, folder / f"{name}.gz"] for name in MD5}
        found = [path for choice in places.values() for path in choice if path.is_file()]
        if not found:
            continue
        missing = [name for name, choice in places.items() if not any(path.is_file() for path in choice)]
        if missing:
            raise UsageError(f"{folder} lacks {', '.join(missing)} (each may also end in .gz)")
        return [next(path for path in choice if path.is_file()) for choice in places.values()]
    raise UsageError(
        f"no MNIST in {data_dir}: expected {', '.join(MD5)} (or .gz) there or in MNIST/raw below it; "
        "leave the folder out to take the embedded set"
    )


def _pair(images_path: Path, labels_path: Path) -> tuple[Pixels, Labels]:
    images, labels = idx.read(images_path), idx.read(labels_path)
    if images.ndim != 3 or images.shape[1] * images.shape[2] != PIXELS:
        raise UsageError(f"{images_path} holds an array of shape {images.shape}, not images of 28 x 28")
    if labels.shape != images.shape[:1]:
        raise UsageError(f"{labels_path} holds {labels.shape} labels for the {len(images)} images of {images_path}")
    if labels.size and labels.max() >= CLASSES:
        raise UsageError(f"{labels_path} holds the label {labels.max()}, digits end at {CLASSES - 1}")
    rows = images.reshape(len(images), PIXELS)
    return np.divide(rows, np.float32(255), dtype=np.float32), labels.astype(np.int64)
