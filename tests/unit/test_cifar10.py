"""ARE the photographs read as they were written? CIFAR-10's binary format, its archive, distortion, and pictures."""

import io
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from paceline.datasets import catalogue, cifar10, distort, picture, shapes
from paceline.datasets.catalogue import Listed, Remote
from paceline.datasets.download import md5_of
from paceline.errors import UsageError

ARCHIVE = "cifar-10-binary.tar.gz"
NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens


@pytest.fixture(scope="module")
def small() -> cifar10.Cifar10:
    return cifar10.synthetic(seed=3, train=50, test=20)


def packed(folder: Path, **extra: bytes) -> Path:
    """The archive as its authors made it, of a small made-up set, with further members first."""
    place = cifar10.write_synthetic(folder / "made", seed=3, train=50, test=20)
    path = folder / ARCHIVE
    with tarfile.open(path, "w:gz") as archive:
        for name, content in extra.items():
            member = tarfile.TarInfo(name.replace("_SLASH_", "/"))
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        archive.add(place, arcname=cifar10.FOLDER)
    return path


def listed(monkeypatch: pytest.MonkeyPatch, md5: str) -> None:
    remote = Remote(f"{NOWHERE}/{ARCHIVE}", md5)
    monkeypatch.setitem(catalogue.CATALOGUE, "cifar10", Listed(folder="CIFAR10", files=(remote,)))


def same(one: cifar10.Cifar10, other: cifar10.Cifar10) -> bool:
    names = ("train_x", "train_y", "test_x", "test_y")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


# --- the format -------------------------------------------------------------------------------------------------------


def test_a_record_is_label_red_green_blue() -> None:
    red, green, blue = (np.arange(1024, dtype=np.uint8) + shift for shift in (0, 1, 2))
    record = bytes([7]) + b"".join(plane.astype(np.uint8).tobytes() for plane in (red, green, blue))
    images, labels = cifar10.parse(record * 2, "batch")
    assert images.shape == (2, 3, 32, 32) and labels.tolist() == [7, 7]
    assert images[0, 0, 0, :4].tolist() == [0, 1, 2, 3], "row by row"
    assert (images[1, 0, 1, 0], images[1, 1, 0, 0], images[1, 2, 0, 0]) == (32, 1, 2)
    assert cifar10.to_records(images, labels) == record * 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "0 bytes are no records of 3073"),
        (bytes(3072), "3072 bytes are no records"),
        (bytes(3073) + b"\0", "3074 bytes are no records"),
        (bytes([10]) + bytes(3072), "label 10"),
    ],
)
def test_another_format_is_refused(content: bytes, sentence: str) -> None:
    with pytest.raises(UsageError, match=f"batch.*{sentence}"):
        cifar10.parse(content, "batch")


def test_the_made_up_set_depends_on_its_seed_alone(small: cifar10.Cifar10) -> None:
    assert same(small, cifar10.synthetic(seed=3, train=50, test=20))
    assert not same(small, cifar10.synthetic(seed=4, train=50, test=20))
    assert small.train_x.dtype == np.uint8 and small.train_y.dtype == np.int64
    assert np.bincount(small.train_y).tolist() == [5] * 10 and len(shapes.SHAPES) == cifar10.CLASSES
    files = {small.train_x[first : first + 10].tobytes() for first in range(0, 50, 10)}
    assert len(files) == 5, "no file is another one again"


@pytest.mark.parametrize(("train", "test"), [(0, 1), (7, 1), (5, 0)])
def test_a_set_that_has_no_equal_files_is_refused(train: int, test: int) -> None:
    with pytest.raises(UsageError, match="five equal training files"):
        cifar10.synthetic(train=train, test=test)


# --- folders and archives ---------------------------------------------------------------------------------------------


def test_six_files_are_read_from_a_folder(tmp_path: Path, small: cifar10.Cifar10) -> None:
    place = cifar10.write_synthetic(tmp_path, seed=3, train=50, test=20)
    assert sorted(path.name for path in place.iterdir()) == sorted(cifar10.FILES)
    for folder in (tmp_path, place):
        loaded = cifar10.load(folder)
        assert same(loaded, small) and loaded.source == str(place)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    place = cifar10.write_synthetic(tmp_path, train=50, test=20)
    (place / "data_batch_3.bin").unlink()
    with pytest.raises(UsageError, match=r"lacks data_batch_3\.bin"):
        cifar10.load(tmp_path)


@pytest.mark.parametrize("below", [".", "CIFAR10"])
def test_the_archive_is_read_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: cifar10.Cifar10, below: str
) -> None:
    path = packed(tmp_path)
    (tmp_path / "data" / below).mkdir(parents=True)
    listed(monkeypatch, md5_of(path))
    path = path.rename(tmp_path / "data" / below / ARCHIVE)
    loaded = cifar10.load(tmp_path / "data")
    assert same(loaded, small) and loaded.source == str(path)
    assert [each.name for each in path.parent.iterdir()] == [ARCHIVE], "nothing is unpacked"


def test_only_the_six_members_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: cifar10.Cifar10) -> None:
    path = packed(tmp_path, **{".._SLASH_.._SLASH_escape.bin": b"x", "batches.meta.txt": b"airplane\n"})
    listed(monkeypatch, md5_of(path))
    assert same(cifar10.load(tmp_path), small)
    assert not list(tmp_path.parent.rglob("escape.bin"))


def test_a_damaged_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = packed(tmp_path)
    listed(monkeypatch, md5_of(path))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"is damaged: its MD5 sum is \w+, not \w+; remove it"):
        cifar10.load(tmp_path)


def test_an_archive_of_other_things_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / ARCHIVE
    with tarfile.open(path, "w:gz"):
        pass
    listed(monkeypatch, md5_of(path))
    with pytest.raises(UsageError, match=r"lacks data_batch_1\.bin"):
        cifar10.load(tmp_path)
    path.write_bytes(b"not an archive")
    listed(monkeypatch, md5_of(path))
    with pytest.raises(UsageError, match="damaged or cannot be read"):
        cifar10.load(tmp_path)


def test_offline_a_named_folder_gets_no_other_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed(monkeypatch, "0" * 32)
    with pytest.raises(UsageError, match=r"could not be fetched.*or name no folder: then a set is made up"):
        cifar10.load(tmp_path)


# --- what is done to an image -----------------------------------------------------------------------------------------


def test_distortion_crops_mirrors_and_whitens(small: cifar10.Cifar10) -> None:
    seen = distort.distorted(small.train_x, np.random.default_rng(1))
    assert seen.shape == (50, 3, 24, 24) and seen.dtype == np.float32
    assert abs(seen.mean(axis=(1, 2, 3))).max() < 1e-4 and abs(seen.std(axis=(1, 2, 3)) - 1).max() < 1e-3
    again = distort.distorted(small.train_x, np.random.default_rng(1))
    assert np.array_equal(seen, again)
    assert not np.array_equal(seen, distort.distorted(small.train_x, np.random.default_rng(2)))


def test_every_crop_and_both_sides_come_up() -> None:
    """An image that knows where its pixels are: what is left of it after the crop says which piece it was."""
    rows, columns = np.mgrid[0:32, 0:32].astype(np.uint8)
    image = np.stack([rows, columns, np.zeros_like(rows)])
    seen = distort.distorted(np.repeat(image[None], 2000, axis=0), np.random.default_rng(0))
    to_the_right = seen[:, 1, 0, -1] > seen[:, 1, 0, 0]
    assert 0.4 < to_the_right.mean() < 0.6, "half of them are mirrored"
    assert (seen[:, 0, -1, 0] > seen[:, 0, 0, 0]).all(), "none stands on its head"
    assert len({each.tobytes() for each in seen}) == 2000


def test_a_test_image_is_the_middle(small: cifar10.Cifar10) -> None:
    seen = distort.centred(small.test_x)
    middle = small.test_x[:, :, 4:28, 4:28].astype(np.float32)
    assert np.array_equal(seen, distort.whitened(middle))


# --- pictures ---------------------------------------------------------------------------------------------------------


def pixels_of(content: bytes) -> np.ndarray:
    """A decoder of the PNGs that we write: no filter, one block of data; sums are checked."""
    assert content[:8] == picture.SIGNATURE
    chunks, rest = {}, content[8:]
    while rest:
        size = struct.unpack(">I", rest[:4])[0]
        kind, data = rest[4:8], rest[8 : 8 + size]
        assert struct.unpack(">I", rest[8 + size : 12 + size])[0] == zlib.crc32(kind + data)
        chunks[kind], rest = data, rest[12 + size :]
    width, height, depth, colours, *others = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, others) == (8, [0, 0, 0]) and list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    channels = {0: 1, 2: 3}[colours]
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, channels)


def test_rows_of_images_become_a_png(tmp_path: Path) -> None:
    dark, light = np.zeros((3, 4, 4)), np.full((2, 4, 4), 2.0)
    path = picture.save_rows(tmp_path / "new" / "rows.png", [dark, light], zoom=1)
    image = pixels_of(path.read_bytes())[:, :, 0]
    assert image.shape == (2 + 2 * 6, 2 + 3 * 6)
    assert (image[2:6, 2:6] == 0).all() and (image[8:12, 8:12] == 255).all(), "what is above 1 is white"
    assert (image[8:12, 14:18] == picture.GREY).all(), "the second row has two images"


def test_grey_and_colour_go_together(tmp_path: Path) -> None:
    red = np.zeros((1, 3, 2, 2))
    red[:, 0] = 1
    image = pixels_of(picture.save_rows(tmp_path / "rows.png", [red, np.ones((1, 6, 6))], zoom=2).read_bytes())
    assert image.shape == (2 * (2 + 2 * 8), 2 * (2 + 8), 3)
    assert image[8, 8].tolist() == [255, 0, 0] and image[4, 4].tolist() == [picture.GREY] * 3, (
        "small ones in the middle"
    )
    assert image[24, 8].tolist() == [255] * 3
