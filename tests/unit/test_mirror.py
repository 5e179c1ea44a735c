"""A run folder of another host comes back in pieces: no torn line, no half a checkpoint, nothing outside of it."""

from pathlib import Path

import pytest
from small_checkpoint import write_step

from paceline.checkpoint import read
from paceline.checkpoint.manifest import MANIFEST
from paceline.errors import ProtocolError
from paceline.launchers import mirror as mirrors
from paceline.launchers.mirror import BLOCK_BYTES, Mirror, Piece, keep
from paceline.telemetry.ledger import RECORD_BYTES, Kind, Ledger, problem
from paceline.telemetry.ledger import read as read_ledger

STEP = "step-00000100"


class Pair:
    """A folder there, and its copy here."""

    def __init__(self, base: Path) -> None:
        self.there, self.here = base / "there", base / "here"
        for folder in ("logs", "telemetry", "ledger", "checkpoints"):
            (self.there / folder).mkdir(parents=True)
        self.mirror = Mirror(self.there)

    def carry(self) -> list[Path]:
        """All that is new; the checkpoints that are complete with it come back."""
        done = []
        while pieces := self.mirror.pieces():
            done += [path for piece in pieces if (path := keep(self.here, piece)) is not None]
        return done

    def same(self, name: str) -> bool:
        return (self.there / name).read_bytes() == (self.here / name).read_bytes()


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def add(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_a_log_comes_as_it_grows(pair: Pair) -> None:
    log = pair.there / "logs" / "worker-0.log"
    for part in (b"one\n", b"half", b" of a line\n", b"x" * (mirrors.PIECE_BYTES * 2 + 5)):
        add(log, part)
        pair.carry()
        assert pair.same("logs/worker-0.log")
    assert pair.mirror.pieces() == []


def test_a_log_that_was_begun_anew_is_told_again(pair: Pair) -> None:
    log = pair.there / "logs" / "ps-0.log"
    add(log, b"the first one\n")
    pair.carry()
    log.write_bytes(b"again\n")
    pair.carry()
    assert (pair.here / "logs" / "ps-0.log").read_bytes() == b"the first one\nagain\n"


def test_telemetry_comes_in_whole_lines_until_the_end(pair: Pair) -> None:
    there, here = (root / "telemetry" / "ps-0.jsonl" for root in (pair.there, pair.here))
    add(there, b'{"a":1}\n{"b"')
    pair.carry()
    assert here.read_bytes() == b'{"a":1}\n'
    add(here, b'{"of":"the launcher"}\n')
    add(there, b":2}\nhalf")
    pair.carry()
    assert here.read_bytes() == b'{"a":1}\n{"of":"the launcher"}\n{"b":2}\n'
    pair.mirror.finish()
    pair.carry()
    assert here.read_bytes().endswith(b'{"b":2}\nhalf')


def test_a_piece_of_telemetry_ends_with_a_line(pair: Pair) -> None:
    add(pair.there / "telemetry" / "ps-0.jsonl", b'{"of":"a ps"}\n' * (mirrors.PIECE_BYTES // 10))
    pieces = pair.mirror.pieces(limit_bytes=mirrors.PIECE_BYTES * 9)
    assert len(pieces) > 1 and all(piece.data.endswith(b"\n") for piece in pieces)


def test_what_tensorboard_reads_comes_while_it_grows(pair: Pair) -> None:
    name = "tensorboard/events.out.tfevents.1"
    (pair.there / "tensorboard").mkdir()
    for part in (b"one", b"two"):
        add(pair.there / name, part)
        pair.carry()
        assert pair.same(name)
    pair.mirror.finish()
    assert pair.mirror.pieces() == []


def test_of_a_ledger_only_whole_records_come(pair: Pair) -> None:
    path, copy = pair.there / "ledger" / "ps-0.bin", pair.here / "ledger" / "ps-0.bin"
    book = Ledger(path)
    for version in range(5000):
        book.write(Kind.APPLY, version=version)
        if version in (10, 3000):
            pair.carry()
            assert copy.stat().st_size == (version + 1) * RECORD_BYTES < path.stat().st_size
    pair.carry()
    assert [record.version for record in read_ledger(copy)] == list(range(5000)) and not problem(copy.read_bytes())
    book.close()


@pytest.mark.parametrize("kept_records", [1, BLOCK_BYTES // RECORD_BYTES, 3000])
def test_a_ps_that_goes_back_in_its_ledger(pair: Pair, kept_records: int) -> None:
    path, copy = pair.there / "ledger" / "ps-0.bin", pair.here / "ledger" / "ps-0.bin"
    for start, position in ((0, None), (7000, kept_records * RECORD_BYTES)):
        book = Ledger(path, position)
        for version in range(start, start + 6000):
            book.write(Kind.APPLY, version=version)
        pair.carry()
    pair.mirror.finish()
    pair.carry()
    book.close()
    assert copy.read_bytes() == path.read_bytes()


def test_a_ledger_that_only_lost_its_end(pair: Pair) -> None:
    path, copy = pair.there / "ledger" / "ps-0.bin", pair.here / "ledger" / "ps-0.bin"
    book = Ledger(path)
    for version in range(2 * BLOCK_BYTES // RECORD_BYTES):
        book.write(Kind.APPLY, version=version)
    pair.carry()
    book.close()
    Ledger(path, BLOCK_BYTES).close()
    pair.carry()
    assert copy.stat().st_size == BLOCK_BYTES and copy.read_bytes() == path.read_bytes()


def test_a_checkpoint_has_its_name_only_when_it_is_complete(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "PIECE_BYTES", 64)
    write_step(pair.there / "checkpoints", 100)
    pieces = [piece for _ in range(10_000) for piece in pair.mirror.pieces(1)]
    assert len(pieces) > 10 and pieces[-1].path == f"checkpoints/step-00000100/{MANIFEST}" and pieces[-1].is_last
    for piece in pieces[:-1]:
        assert keep(pair.here, piece) is None and read.find(pair.here / "checkpoints") == []
    made = keep(pair.here, pieces[-1])
    assert made == pair.here / "checkpoints" / "step-00000100"
    read.load(made)
    assert [path.name for path in made.parent.iterdir()] == ["step-00000100"]


def test_one_that_is_being_written_is_left_alone(pair: Pair) -> None:
    folder = pair.there / "checkpoints"
    write_step(folder, 100)
    (folder / "step-00000100").rename(folder / ".step-00000100.77-1")
    assert pair.mirror.pieces() == []
    torn = write_step(folder, 200)
    (torn / "model.safetensors").write_bytes(b"short")
    assert pair.mirror.pieces() == []


def test_the_newest_checkpoint_comes_first_and_a_new_one_of_the_same_step_too(pair: Pair) -> None:
    folder = pair.there / "checkpoints"
    for step in (100, 200):
        write_step(folder, step)
    assert [path.name for path in pair.carry()] == ["step-00000200", "step-00000100"]
    write_step(folder, 200, seed=5, lineage=1)
    assert [path.name for path in pair.carry()] == ["step-00000200"]
    assert read.load(pair.here / "checkpoints" / "step-00000200").state.lineage == 1


def test_a_checkpoint_that_is_removed_on_its_way(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors, "PIECE_BYTES", 64)
    gone = write_step(pair.there / "checkpoints", 100)
    for piece in pair.mirror.pieces(200):
        keep(pair.here, piece)
    gone.rename(gone.with_name(".gone"))
    write_step(pair.there / "checkpoints", 200)
    assert [path.name for path in pair.carry()] == ["step-00000200"]
    assert read.newest(pair.here / "checkpoints") == pair.here / "checkpoints" / "step-00000200"


def test_what_the_script_left_comes_at_the_end_and_the_rest_of_a_run_folder_never(pair: Pair) -> None:
    (pair.there / "plots").mkdir()
    (pair.there / "plots" / "loss.png").write_bytes(b"p" * (mirrors.PIECE_BYTES + 1))
    (pair.there / "empty.txt").touch()
    for name in ("secret", "config.json", "key.pem"):
        (pair.there / name).write_text("x")
    assert pair.mirror.pieces() == []
    pair.mirror.finish()
    pair.carry()
    assert pair.same("plots/loss.png") and pair.same("empty.txt")
    assert sorted(path.name for path in pair.here.iterdir()) == ["empty.txt", "plots"]


@pytest.mark.parametrize(
    "name",
    ["mine/logs/x.log", "logs/notes.txt", "checkpoints/best.pt", "checkpoints/mine/a.pt", "ledger/x", "telemetry/a"],
)
def test_no_name_of_ours_hides_what_the_script_left(pair: Pair, name: str) -> None:
    path = pair.there / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    pair.mirror.finish()
    pair.carry()
    assert pair.same(name) and pair.mirror.left() == []


def test_what_cannot_be_sent_is_named(pair: Pair) -> None:
    (pair.there / "link.pt").symlink_to("/etc/hostname")
    (pair.there / "folder").symlink_to("/etc")
    (pair.there / ".hidden").touch()
    inner = write_step(pair.there / "checkpoints", 100) / "mine" / "x"
    inner.parent.mkdir()
    inner.touch()
    for ours in ("secret", ".coming-x", "checkpoints/.step-00000200.77-1"):
        (pair.there / ours).touch()
    pair.mirror.finish()
    pair.carry()
    assert pair.mirror.left() == [".hidden", "checkpoints/step-00000100/mine/x", "folder", "link.pt"]


def test_what_is_known_already_is_skipped(pair: Pair) -> None:
    add(pair.there / "telemetry" / "ps-0.jsonl", b"old\n")
    write_step(pair.there / "checkpoints", 100)
    book = Ledger(pair.there / "ledger" / "ps-0.bin")
    book.write(Kind.START)
    pair.mirror.skip()
    assert pair.mirror.pieces() == []
    add(pair.there / "telemetry" / "ps-0.jsonl", b"new\n")
    book.write(Kind.MODE)
    paths = [(piece.path, piece.offset) for piece in pair.mirror.pieces()]
    assert paths == [("telemetry/ps-0.jsonl", 4), ("ledger/ps-0.bin", RECORD_BYTES)]
    book.close()


def test_files_that_grow_do_not_wait_for_large_ones(pair: Pair) -> None:
    write_step(pair.there / "checkpoints", 100)
    add(pair.there / "logs" / "ps-0.log", b"now\n")
    assert [piece.path for piece in pair.mirror.pieces(with_large=False)] == ["logs/ps-0.log"]
    assert pair.mirror.pieces(with_large=False) == []
    assert {piece.path.split("/")[0] for piece in pair.mirror.pieces()} == {"checkpoints"}


@pytest.mark.parametrize(
    "path", ["../x", "/etc/x", "logs/../../x", "", "a/.b", "secret", ".ssh", f"checkpoints/{STEP}/a/b", "config.json"]
)
def test_nothing_is_written_elsewhere(tmp_path: Path, path: str) -> None:
    with pytest.raises(ProtocolError):
        keep(tmp_path / "run", Piece(path, 0, b"x"))
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
