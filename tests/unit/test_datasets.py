"""DO the data arrive whole? Embedded MNIST, folders, damaged files, the download, and the small models."""

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from paceline import datasets
from paceline.datasets import catalogue, download, idx, mnist
from paceline.datasets.catalogue import Listed, Remote
from paceline.datasets.download import fetch
from paceline.errors import PacelineError, UsageError

CONTENT = bytes(range(256)) * 4096  # 1 MiB
CONTENT_MD5 = hashlib.md5(CONTENT).hexdigest()


# --- MNIST ----------------------------------------------------------------------------------------


def small_idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


def small_set(folder: Path, *, gz: bool, images: int = 3) -> None:
    """A set of MNIST's format, small enough to write in a test."""
    folder.mkdir(parents=True)
    for name in mnist.MD5:
        if "images" in name:
            content = small_idx(np.arange(images * 784).reshape(images, 28, 28) % 256)
        else:
            content = small_idx(np.arange(images) % 10)
        path = folder / (name + ".gz" if gz else name)
        path.write_bytes(gzip.compress(content) if gz else content)


@pytest.fixture(scope="module")
def embedded() -> mnist.Mnist:
    return mnist.load()


def test_the_embedded_set_is_mnist(embedded: mnist.Mnist) -> None:
    assert embedded.train_x.shape == (60_000, 784) and embedded.test_x.shape == (10_000, 784)
    assert embedded.train_x.dtype == np.float32 and embedded.train_y.dtype == np.int64
    assert embedded.train_x.min() == 0.0 and embedded.train_x.max() == 1.0
    assert embedded.train_y[:5].tolist() == [5, 0, 4, 1, 9]
    assert embedded.test_y[:5].tolist() == [7, 2, 1, 0, 4]
    assert np.bincount(embedded.train_y).tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]


def test_the_split_is_tensorflows(embedded: mnist.Mnist) -> None:
    split = embedded.tensorflow_split()
    assert len(split.train_x) == len(split.train_y) == 55_000
    assert len(split.validation_x) == len(split.validation_y) == 5_000
    assert np.array_equal(split.validation_y, embedded.train_y[:5_000])
    assert np.array_equal(split.train_x[0], embedded.train_x[5_000])
    assert split.test_x is embedded.test_x


def test_a_small_set_cannot_be_split(tmp_path: Path) -> None:
    small_set(tmp_path / "set", gz=False)
    with pytest.raises(UsageError, match="3 training images"):
        mnist.load(tmp_path / "set").tensorflow_split()


def test_loading_needs_no_torch() -> None:
    code = "import sys; from paceline.datasets import mnist; sys.exit('torch' in sys.modules)"
    package_root = str(Path(datasets.__file__).parents[2])
    environ = {**os.environ, "PYTHONPATH": package_root}
    assert subprocess.run([sys.executable, "-c", code], env=environ, timeout=120).returncode == 0


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("below", ["", "raw", "MNIST/raw"])
def test_a_folder_is_read(tmp_path: Path, below: str, gz: bool) -> None:
    small_set(tmp_path / "set" / below, gz=gz)
    loaded = mnist.load(str(tmp_path / "set"))
    assert loaded.train_x.shape == (3, 784) and loaded.test_y.tolist() == [0, 1, 2]
    assert loaded.train_x[0, 255] == 1.0 and loaded.train_x[0, 51] == np.float32(51) / np.float32(255)


def test_an_empty_folder_is_refused_with_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no MNIST in .*train-images-idx3-ubyte.*MNIST/raw"):
        mnist.load(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    small_set(tmp_path / "set", gz=True)
    (tmp_path / "set" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UsageError, match="lacks t10k-labels-idx1-ubyte "):
        mnist.load(tmp_path / "set")


@pytest.mark.parametrize("keep", [0, 3, 9, 100])
@pytest.mark.parametrize("gz", [False, True])
def test_a_file_cut_short_is_named(tmp_path: Path, gz: bool, keep: int) -> None:
    small_set(tmp_path / "set", gz=gz)
    path = next((tmp_path / "set").glob("train-images*"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UsageError, match="train-images-idx3-ubyte"):
        mnist.load(tmp_path / "set")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (small_idx(np.zeros((3, 28, 28))) + b"\0", "holds more"),
        (small_idx(np.zeros((3, 27, 28))), "not images of 28 x 28"),
        (small_idx(np.zeros((4, 28, 28))), "labels for the 4 images"),
        (bytes([0, 0, 8, 3]) + b"\xff" * 12, "the most is"),
        (b"\x89PNG not an idx file", "not an IDX file"),
        (bytes([0, 0, 0x0D, 3]) + bytes(12), "not an IDX file"),
    ],
)
def test_damaged_images_are_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    small_set(tmp_path / "set", gz=False)
    (tmp_path / "set" / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(UsageError, match=sentence):
        mnist.load(tmp_path / "set")


def test_a_label_beyond_nine_is_refused(tmp_path: Path) -> None:
    small_set(tmp_path / "set", gz=False)
    (tmp_path / "set" / "train-labels-idx1-ubyte").write_bytes(small_idx(np.array([1, 2, 10])))
    with pytest.raises(UsageError, match="label 10"):
        mnist.load(tmp_path / "set")


def test_a_flipped_bit_in_the_embedded_set_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "mnist_files"
    shutil.copytree(mnist.EMBEDDED, copy)
    labels = copy / "t10k-labels-idx1-ubyte.gz"
    content = bytearray(labels.read_bytes())
    content[4] ^= 1  # the time stamp in the gzip header: only the MD5 sum sees it
    labels.write_bytes(content)
    monkeypatch.setattr(mnist, "EMBEDDED", copy)
    assert len(idx.read(labels)) == 10_000
    with pytest.raises(PacelineError, match=r"t10k-labels.*damaged.*install paceline again"):
        mnist.load()


# --- download -------------------------------------------------------------------------------------


class Files(ThreadingHTTPServer):
    """A server of CONTENT at any path, whose manners a test can change; it notes each request's Range."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.honours_range = True
        self.shifts_range_by = 0
        self.sends_at_most: int | None = None
        self.says_length = True
        self.ranges: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/set.bin"


class Handler(BaseHTTPRequestHandler):
    server: Files

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range")
        server.ranges.append(wanted)
        if self.path == "/missing":
            self.send_error(404)
            return
        begin = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and server.honours_range else 0
        if begin >= len(server.content):
            self.send_error(416)
            return
        self.send_response(206 if wanted and server.honours_range else 200)
        if wanted and server.honours_range:
            first = begin + server.shifts_range_by
            self.send_header("Content-Range", f"bytes {first}-{len(server.content) - 1}/{len(server.content)}")
        if server.says_length:
            self.send_header("Content-Length", str(len(server.content) - begin))
        self.end_headers()
        self.wfile.write(server.content[begin:][: server.sends_at_most])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Files() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(timeout=10)


def part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


@pytest.mark.parametrize("size", [None, len(CONTENT)])
@pytest.mark.parametrize("says_length", [True, False])
def test_a_file_is_fetched(server: Files, tmp_path: Path, says_length: bool, size: int | None) -> None:
    server.says_length = says_length
    path = tmp_path / "new" / "folder" / "set.bin"
    assert fetch(server.url, path, CONTENT_MD5, size) == path
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == ["set.bin"]


def test_a_file_that_is_there_is_not_fetched_again(server: Files, tmp_path: Path) -> None:
    path = tmp_path / "set.bin"
    path.write_bytes(CONTENT)
    fetch(server.url, path, CONTENT_MD5)
    assert server.ranges == []


def test_a_damaged_file_that_is_there_is_replaced(server: Files, tmp_path: Path) -> None:
    path = tmp_path / "set.bin"
    path.write_bytes(b"damaged")
    fetch(server.url, path, CONTENT_MD5)
    assert path.read_bytes() == CONTENT


def test_half_a_file_is_completed(server: Files, tmp_path: Path) -> None:
    path = tmp_path / "set.bin"
    part_of(path).write_bytes(CONTENT[:500_000])
    fetch(server.url, path, CONTENT_MD5)
    assert server.ranges == ["bytes=500000-"]
    assert path.read_bytes() == CONTENT and not part_of(path).exists()


def test_a_server_that_ignores_range_sends_all_again(server: Files, tmp_path: Path) -> None:
    server.honours_range = False
    path = tmp_path / "set.bin"
    part_of(path).write_bytes(CONTENT[:500_000])
    fetch(server.url, path, CONTENT_MD5)
    assert server.ranges == ["bytes=500000-"] and path.read_bytes() == CONTENT


@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_a_complete_part_is_only_checked(server: Files, tmp_path: Path, size: int | None) -> None:
    path = tmp_path / "set.bin"
    part_of(path).write_bytes(CONTENT)
    fetch(server.url, path, CONTENT_MD5, size)
    assert path.read_bytes() == CONTENT
    assert server.ranges == ([] if size else [f"bytes={len(CONTENT)}-"])


def test_a_connection_cut_keeps_the_part_and_the_next_try_goes_on(server: Files, tmp_path: Path) -> None:
    path = tmp_path / "set.bin"
    server.sends_at_most = 300_000
    with pytest.raises(PacelineError, match=f"300000 of {len(CONTENT)} bytes.*next try"):
        fetch(server.url, path, CONTENT_MD5)
    assert part_of(path).read_bytes() == CONTENT[:300_000] and not path.exists()
    server.sends_at_most = None
    fetch(server.url, path, CONTENT_MD5)
    assert server.ranges == [None, "bytes=300000-"] and path.read_bytes() == CONTENT


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(server: Files, tmp_path: Path) -> None:
    path = tmp_path / "set.bin"
    with pytest.raises(PacelineError, match=f"MD5 {CONTENT_MD5} instead of {'0' * 32}"):
        fetch(server.url, path, "0" * 32)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_part_is_removed_and_the_next_try_is_whole(server: Files, tmp_path: Path) -> None:
    path = tmp_path / "set.bin"
    part_of(path).write_bytes(b"x" * 500_000)
    with pytest.raises(PacelineError, match="nothing was kept"):
        fetch(server.url, path, CONTENT_MD5)
    assert list(tmp_path.iterdir()) == []
    fetch(server.url, path, CONTENT_MD5)
    assert path.read_bytes() == CONTENT


def test_a_part_longer_than_the_file_begins_again(server: Files, tmp_path: Path) -> None:
    path = tmp_path / "set.bin"
    part_of(path).write_bytes(CONTENT + b"x")
    fetch(server.url, path, CONTENT_MD5, len(CONTENT))
    assert server.ranges == [None] and path.read_bytes() == CONTENT


def test_another_size_is_refused_before_the_transfer(server: Files, tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=f"has {len(CONTENT)} bytes, expected were 5"):
        fetch(server.url, tmp_path / "set.bin", CONTENT_MD5, 5)
    assert list(tmp_path.iterdir()) == []


def test_a_range_that_was_not_asked_for_is_refused(server: Files, tmp_path: Path) -> None:
    server.shifts_range_by = 1
    part_of(tmp_path / "set.bin").write_bytes(CONTENT[:500_000])
    with pytest.raises(PacelineError, match="range that was not asked for"):
        fetch(server.url, tmp_path / "set.bin", CONTENT_MD5)


def test_a_missing_address_is_named(server: Files, tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"/missing could not be fetched: .*404"):
        fetch(server.url.replace("/set.bin", "/missing"), tmp_path / "set.bin", CONTENT_MD5)


def test_a_server_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(PacelineError, match=r"127.0.0.1:9/ could not be fetched"):
        fetch("http://127.0.0.1:9/", tmp_path / "set.bin", CONTENT_MD5)


def test_only_http_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="only http and https"):
        fetch("file:///etc/hostname", tmp_path / "set.bin", CONTENT_MD5)


def test_two_at_once_fetch_once(server: Files, tmp_path: Path) -> None:
    path = tmp_path / "set.bin"
    threads = [threading.Thread(target=fetch, args=(server.url, path, CONTENT_MD5)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert server.ranges == [None] and path.read_bytes() == CONTENT


def test_a_pipe_gets_plain_lines(server: Files, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fetch(server.url, tmp_path / "set.bin", CONTENT_MD5)
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert out == "" and lines[0] == "set.bin: 0.0 of 1.0 MB" and lines[-1] == "set.bin: 1.0 of 1.0 MB"
    assert 3 <= len(lines) <= 12 and "\x1b" not in err


def test_a_terminal_gets_a_bar(
    server: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fetch(server.url, tmp_path / "set.bin", CONTENT_MD5)
    assert "set.bin" in capfd.readouterr().err and (tmp_path / "set.bin").read_bytes() == CONTENT


# --- catalogue ------------------------------------------------------------------------------------


def test_get_fetches_each_file_once(server: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = tuple(Remote(f"{server.url}/{name}", CONTENT_MD5, len(CONTENT)) for name in ("a", "b"))
    monkeypatch.setitem(catalogue.CATALOGUE, "small", Listed("Small/raw", files))
    for _ in range(2):
        assert datasets.get("small", data_dir=tmp_path) == tmp_path / "Small" / "raw"
    assert server.ranges == [None, None]
    assert sorted(p.name for p in (tmp_path / "Small" / "raw").iterdir()) == ["a", "b"]


def test_the_embedded_set_is_never_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_fetch", lambda *_: pytest.fail("a download was begun"))
    assert mnist.load(datasets.get("mnist")).test_x.shape == (10_000, 784)


def test_the_catalogue_is_well_formed() -> None:
    assert set(datasets.CATALOGUE) == {"fashion_mnist", "cifar10"}
    for listed in datasets.CATALOGUE.values():
        for file in listed.files:
            assert file.url.startswith("https://") and re.fullmatch("[0-9a-f]{32}", file.md5)
            assert "python" not in file.name  # that version of CIFAR-10 is made of pickles
    names = {file.name.removesuffix(".gz") for file in datasets.CATALOGUE["fashion_mnist"].files}
    assert names == set(mnist.MD5)


def test_what_cannot_be_got_is_said() -> None:
    with pytest.raises(UsageError, match="did you mean 'fashion_mnist'"):
        datasets.get("fashion-mnist", data_dir="data")
    with pytest.raises(UsageError, match="known are mnist, fashion_mnist, cifar10"):
        datasets.get("zzz", data_dir="data")
    with pytest.raises(UsageError, match="data_dir="):
        datasets.get("cifar10")


# --- models ---------------------------------------------------------------------------------------


def test_the_model_of_document_000_is_seeded() -> None:
    torch = pytest.importorskip("torch")
    from paceline.models.mlp import document_000

    model, same, other = document_000(1), document_000(1), document_000(2)
    assert [tuple(p.shape) for p in model.parameters()] == [(100, 784), (100,), (10, 100), (10,)]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    assert not torch.equal(model[0].weight, other[0].weight)
    assert not model[0].bias.any() and not model[2].bias.any()
    assert abs(float(model[0].weight.detach().std()) - 1) < 0.01 and isinstance(model[1], torch.nn.Sigmoid)


def test_the_model_and_the_loss_of_document_002() -> None:
    torch = pytest.importorskip("torch")
    from paceline.models.mlp import document_002, summed_cross_entropy

    model = document_002(hidden=25)
    for layer, deviation in ((model[0], 1 / 28), (model[2], 1 / 5)):
        weight = layer.weight.detach()
        assert float(weight.abs().max()) <= 2 * deviation and not layer.bias.any()
        assert 0.7 * deviation < float(weight.std()) < deviation, "truncated, so a little narrower"
    logits = torch.tensor([[0.0, 0.0], [1000.0, 0.0]], requires_grad=True)
    loss = summed_cross_entropy(logits, torch.tensor([0, 1]))
    loss.backward()
    assert loss.item() == pytest.approx(0.6931 + 23.0259, abs=1e-3)
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_an_unknown_activation_is_refused() -> None:
    pytest.importorskip("torch")
    from paceline.models.mlp import mlp

    with pytest.raises(UsageError, match="relu, sigmoid"):
        mlp(activation="tanh")
