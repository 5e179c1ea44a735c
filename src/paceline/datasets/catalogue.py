"""WHICH sets are known? Names, public addresses and MD5 sums of the sets that are fetched when asked for.

Called by scripts and demos through `paceline.datasets.get`. Must never fetch what lies in the folder already.
"""

import difflib
from pathlib import Path

import msgspec

from paceline.datasets import mnist
from paceline.datasets.download import fetch
from paceline.errors import UsageError


class Remote(msgspec.Struct, frozen=True):
    """One file of a set: its address, its published MD5 sum, and its size where that is published too."""

    url: str
    md5: str
    size_bytes: int | None = None

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


class Listed(msgspec.Struct, frozen=True):
    """A set that is not embedded: the folder below `data_dir` that torchvision also uses, and its files."""

    folder: str
    files: tuple[Remote, ...]


_FASHION = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"

CATALOGUE: dict[str, Listed] = {
    "fashion_mnist": Listed(
        folder="FashionMNIST/raw",
        files=(
            Remote(f"{_FASHION}/train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            Remote(f"{_FASHION}/train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
            Remote(f"{_FASHION}/t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
            Remote(f"{_FASHION}/t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
    ),
    # The binary version: the one for Python is made of pickles, which paceline never opens.
    "cifar10": Listed(
        folder="CIFAR10",
        files=(
            Remote(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "c32a1d4ab5d03f1284b67883e8d87530",
                170_052_171,
            ),
        ),
    ),
}


def get(name: str, data_dir: str | Path | None = None) -> Path:
    """The folder that holds the checked files of set `name`; what is missing there is downloaded now.

    `mnist.load(get("fashion_mnist", data_dir="data"))` gives its arrays. The embedded set needs no folder.

    >>> get("mnist").name
    'mnist_files'
    """
    if name == "mnist" and data_dir is None:
        return mnist.EMBEDDED
    if name == "mnist":
        raise UsageError("mnist is embedded and needs no data_dir; paceline.datasets.mnist.load(DIR) reads a folder")
    if name not in CATALOGUE:
        known = ["mnist", *CATALOGUE]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        raise UsageError(f"no set is called {name!r}: {hint}")
    if data_dir is None:
        raise UsageError(f"{name} is not embedded: say with data_dir= where it shall be kept")
    listed = CATALOGUE[name]
    folder = Path(data_dir) / listed.folder
    for file in listed.files:
        fetch(file.url, folder / file.name, file.md5, file.size_bytes)
    return folder
