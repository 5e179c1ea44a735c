"""WHAT does an IDX file hold? Reads the format of MNIST (`*-ubyte`, plain or gzip) into a numpy array.

Called by datasets/mnist. Must never trust the header further than the bytes that really follow it.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from paceline.errors import UsageError

UNSIGNED_BYTES = 0x08
MAX_DIMENSIONS = 4
MAX_BYTES = 1 << 28  # five times the images of MNIST: a damaged header must not claim the memory


def read(path: Path) -> npt.NDArray[np.uint8]:
    """The array in `path`; a UsageError names the file when it is missing, cut short or of another format."""
    try:
        with _opened(path) as file:
            shape = _shape(path, file)
            expected_bytes = math.prod(shape)
            data = file.read(expected_bytes + 1)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} is damaged or cannot be read: {error}") from error
    if len(data) != expected_bytes:
        relation = "fewer" if len(data) < expected_bytes else "more"
        raise UsageError(f"{path} is damaged: its header says {expected_bytes} bytes, it holds {relation}")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def _opened(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _shape(path: Path, file: BinaryIO) -> tuple[int, ...]:
    """Magic bytes 0, 0, type, number of dimensions; then each dimension as a big-endian 32-bit number."""
    magic = file.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] != UNSIGNED_BYTES or not 1 <= magic[3] <= MAX_DIMENSIONS:
        raise UsageError(f"{path} is not an IDX file of unsigned bytes (it begins with {magic.hex() or 'nothing'})")
    sizes = file.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise UsageError(f"{path} is damaged: it ends inside its header")
    shape = struct.unpack(f">{magic[3]}I", sizes)
    if math.prod(shape) > MAX_BYTES:
        raise UsageError(f"{path} is damaged: its header says {math.prod(shape)} bytes, the most is {MAX_BYTES}")
    return shape
