"""HOW does one look at images? A table of them as a PNG file, written with nothing but zlib.

Called by demos and scripts. Must never need a library that only draws.
"""

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

GAP = 2  # pixels between images
GREY = 96
SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOUR_TYPES = {1: 0, 3: 2}  # channels -> PNG's number for grey and RGB

Rows = Sequence[npt.NDArray[np.floating]]


def save_rows(path: str | Path, rows: Rows, zoom: int = 2) -> Path:
    """Write rows of images to `path`. A row is (number, height, width) or (number, channels, height, width), with
    numbers from 0 (black) to 1; what lies outside is cut off. Returns the path.
    """
    table = _table([np.asarray(row) for row in rows])
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(table.repeat(zoom, axis=0).repeat(zoom, axis=1)))
    return path


def png(image: npt.NDArray[np.uint8]) -> bytes:
    """A PNG file of (height, width, 1 or 3) bytes.

    >>> png(np.zeros((2, 3, 1), np.uint8))[:8] == SIGNATURE
    True
    """
    height, width, channels = image.shape
    header = struct.pack(">IIBBBBB", width, height, 8, COLOUR_TYPES[channels], 0, 0, 0)
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = image.reshape(height, -1)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")
    return SIGNATURE + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _table(rows: Sequence[npt.NDArray[np.floating]]) -> npt.NDArray[np.uint8]:
    """One image of all, with grey between them; a cell is as big as the biggest image."""
    shaped = [row[:, None] if row.ndim == 3 else row for row in rows]
    height, width = (max(row.shape[axis] for row in shaped) for axis in (2, 3))
    columns = max(len(row) for row in shaped)
    channels = max(row.shape[1] for row in shaped)
    size = len(rows) * (height + GAP) + GAP, columns * (width + GAP) + GAP
    table = np.full((*size, channels), GREY, np.uint8)
    for number, row in enumerate(shaped):
        for place, image in enumerate(row):
            top = GAP + number * (height + GAP) + (height - image.shape[1]) // 2
            left = GAP + place * (width + GAP) + (width - image.shape[2]) // 2
            inked = (image.clip(0, 1) * 255).round().astype(np.uint8)
            table[top : top + image.shape[1], left : left + image.shape[2]] = np.moveaxis(inked, 0, -1)
    return table
