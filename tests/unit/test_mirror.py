"""A run folder of another host comes back in pieces: no torn line, no half a checkpoint, nothing outside of it."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from small_checkpoint import write_step

from paceline import files
from paceline.checkpoint import read
from paceline.checkpoint.manifest import MANIFEST
from paceline.cluster.spec import Task
from paceline.errors import ProtocolError
from paceline.files import Unusable
from paceline.launchers import mirror as mirrors
from paceline.launchers.mirror import BLOCK_BYTES, Mirror
from paceline.launchers.pieces import Piece, keep, parts_of, sweep
from paceline.telemetry.ledger import RECORD_BYTES, Kind, Ledger, problem
from paceline.telemetry.ledger import read as read_ledger
from paceline.telemetry.paths import RunPaths

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


def test_what_was_brought_here_is_not_sent_back(pair: Pair) -> None:
    """Also in the middle of a run: a ps has moved, and everybody gets the checkpoint."""
    source = write_step(pair.here.parent / "driver", 100)
    add(pair.there / "logs" / "worker-1.log", b"mine\n")
    assert [piece.path for piece in pair.mirror.pieces()] == ["logs/worker-1.log"]
    for piece in mirrors.whole(source, mirrors.name_of(source)):
        pair.mirror.put(piece)
    pair.mirror.put(Piece("telemetry/worker-1.jsonl", 0, b"earlier\n"))
    assert (pair.there / "checkpoints" / STEP).is_dir() and pair.mirror.pieces() == []


def test_what_a_task_has_told_is_read_as_it_is_asked_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger may be larger than memory, and whoever asks supervises everybody."""
    monkeypatch.setattr(mirrors, "PIECE_BYTES", 4)
    add(pair.there / "telemetry" / "ps-0.jsonl", b"told\n")
    add(pair.there / "ledger" / "ps-0.bin", b"x" * 8)
    told = mirrors.told_by(RunPaths(pair.there), Task("ps", 0))
    assert next(told).data == b"told"
    add(pair.there / "ledger" / "ps-0.bin", b"more")  # it has not been read yet
    assert [(piece.path, piece.data) for piece in told] == [
        ("telemetry/ps-0.jsonl", b"\n"),
        *(("ledger/ps-0.bin", data) for data in (b"xxxx", b"xxxx", b"more")),
    ]


def test_two_who_send_a_checkpoint_of_one_name_do_not_mix_it(pair: Pair) -> None:
    source = write_step(pair.there / "checkpoints", 100)
    first = list(mirrors.whole(source, f"checkpoints/{STEP}"))
    for one, other in zip([first[0], *first], [*first, first[-1]], strict=True):  # one is a piece behind
        keep(pair.here, one, "worker:1")
        keep(pair.here, other, "worker:2")
    kept = read.examine(pair.here / "checkpoints" / STEP)
    assert kept.is_complete and all(pair.same(f"checkpoints/{STEP}/{path.name}") for path in source.iterdir())


def test_what_never_came_to_its_end_is_swept(pair: Pair) -> None:
    source = write_step(pair.there / "checkpoints", 100)
    keep(pair.here, next(mirrors.whole(source, f"checkpoints/{STEP}")), "lost")
    keep(pair.here, Piece("best.pt", 0, b"half"), "lost")
    assert len(list(pair.here.rglob(".coming-lost-*"))) == 2
    sweep(pair.here)
    assert list((pair.here / "checkpoints").iterdir()) == [] and not (pair.here / ".coming-lost-best.pt").exists()


def test_many_files_are_listed_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        (pair.there / f"picture-{number}").write_bytes(b"x")
    looks: list[Path] = []
    walk = mirrors.os.walk
    monkeypatch.setattr(mirrors.os, "walk", lambda root: looks.append(root) or walk(root))
    for _ in range(3):
        pair.mirror.finish()  # asked again and again, until nothing comes
        pair.carry()
    assert len(looks) == 1 and pair.same("picture-49")


def test_on_a_full_disk_nothing_is_left_out_in_silence(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    write = mirrors.os.pwrite
    monkeypatch.setattr(mirrors.os, "pwrite", lambda file, data, at: write(file, data[:3], at))
    keep(pair.here, Piece("best.pt", 0, b"0123456789", is_last=True))
    assert (pair.here / "best.pt").read_bytes() == b"0123456789"


def without_room(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The disk is full for the number-th write, half of which is done, and has room again after it."""
    write, calls = mirrors.os.pwrite, iter(range(10_000))

    def pwrite(file: int, data: bytes, at: int) -> int:
        if next(calls) == number:
            write(file, data[: len(data) // 2], at)
            raise OSError(28, "No space left on device")
        return write(file, data, at)

    monkeypatch.setattr(mirrors.os, "pwrite", pwrite)


@pytest.mark.parametrize("removes", [True, False])
def test_a_checkpoint_of_which_a_piece_could_not_be_written_never_gets_its_name(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, removes: bool
) -> None:
    """Neither with a hole in it, nor where the disk does not let the draft go."""
    monkeypatch.setattr(mirrors, "PIECE_BYTES", 64)
    source = write_step(pair.there / "checkpoints", 100)
    pieces = list(mirrors.whole(source, f"checkpoints/{STEP}"))
    for number, failing in enumerate(pieces):
        with monkeypatch.context() as patched:
            without_room(patched, number)
            if not removes:
                patched.setattr(shutil, "rmtree", lambda *_, **__: None)
            for piece in pieces:
                with suppress(OSError):
                    assert keep(pair.here, piece, f"host-{number}") is None, failing
    assert read.find(pair.here / "checkpoints") == []
    made = [keep(pair.here, piece, "host-0") for piece in pieces]  # it is sent again
    assert made[-1] is not None and read.examine(made[-1]).is_complete


@pytest.mark.parametrize("number", [0, 1, 2])
def test_nor_does_any_other_file(pair: Pair, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    without_room(monkeypatch, number)
    for offset in (0, 4, 8):
        with suppress(OSError):
            keep(pair.here, Piece("best.pt", offset, b"0123", is_last=offset == 8))
    assert list(pair.here.iterdir()) == []


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


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "private.log").write_text("mine\n")
    return folder


NAMES = ["logs/worker-0.log", "ledger/ps-0.bin", "best.pt", f"checkpoints/{STEP}/state.json", "pictures/one.png"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at", ["its folder", "a dangling folder"])
def test_no_piece_is_written_through_a_linked_folder(pair: Pair, outside: Path, name: str, at: str) -> None:
    top = Path(name).parts[0]
    pair.here.mkdir()
    (pair.here / top).symlink_to(outside if at == "its folder" else outside / "none")
    if top == name:
        keep(pair.here, Piece(name, 0, b"x", True))  # a file of that name takes the link's place
        assert (pair.here / name).read_bytes() == b"x" and not (pair.here / name).is_symlink()
    else:
        with pytest.raises(Unusable, match=f"{top}: it is a symbolic link"):
            keep(pair.here, Piece(name, 0, b"x", True))
    assert sorted(path.name for path in outside.iterdir()) == ["private.log"]


@pytest.mark.parametrize("target", ["private.log", "new.log"])
@pytest.mark.parametrize("name", ["logs/worker-0.log", "ledger/ps-0.bin"])
def test_no_piece_is_written_through_a_linked_file(pair: Pair, outside: Path, name: str, target: str) -> None:
    (pair.here / name).parent.mkdir(parents=True)
    (pair.here / name).symlink_to(outside / target)
    with pytest.raises(Unusable, match="it is a symbolic link"):
        keep(pair.here, Piece(name, 0, b"x"))
    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("private.log", "mine\n")]


def test_no_checkpoint_is_written_through_a_linked_draft(pair: Pair, outside: Path) -> None:
    (pair.here / "checkpoints").mkdir(parents=True)
    (pair.here / "checkpoints" / f".coming-a-{STEP}").symlink_to(outside)
    with pytest.raises(Unusable):
        keep(pair.here, Piece(f"checkpoints/{STEP}/state.json", 0, b"x"), "a")
    assert keep(pair.here, Piece(f"checkpoints/{STEP}/state.json", 0, b"x"), "a") is None, "the link is gone"
    assert sorted(path.name for path in outside.iterdir()) == ["private.log"]


def test_a_folder_that_becomes_a_link_in_between_is_not_followed(
    pair: Pair, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (outside / "worker-0.log").write_text("theirs\n")
    plain = files.open_in

    def swapped(folder: int, *rest: Any) -> int:
        (pair.here / "logs").rename(pair.here / "away")
        (pair.here / "logs").symlink_to(outside)
        return plain(folder, *rest)

    monkeypatch.setattr(files, "open_in", swapped)
    keep(pair.here, Piece("logs/worker-0.log", 0, b"x"))
    assert (outside / "worker-0.log").read_text() == "theirs\n"
    assert (pair.here / "away" / "worker-0.log").read_bytes() == b"x", "it went where the folder is"


def test_a_sender_does_not_choose_the_size_of_a_file(pair: Pair) -> None:
    ledger = pair.here / "ledger" / "ps-0.bin"
    for offset in (1, 1 << 40):
        with pytest.raises(OSError, match="the piece begins at"):
            keep(pair.here, Piece("ledger/ps-0.bin", offset, b"x"))
    assert ledger.stat().st_size == 0
    keep(pair.here, Piece("ledger/ps-0.bin", 0, bytes(96)))
    keep(pair.here, Piece("ledger/ps-0.bin", 32, b"x" * 32))
    assert ledger.stat().st_size == 64, "it may go back"


@pytest.mark.parametrize("name", ["Secret", "CONFIG.json"])
def test_own_files_are_not_sent_under_other_letters(name: str) -> None:
    with pytest.raises(ProtocolError):
        parts_of(name)


def test_links_are_not_read_and_are_named(pair: Pair, outside: Path) -> None:
    step = write_step(pair.there / "checkpoints", 100)
    (outside / "state.json").write_bytes((step / "state.json").read_bytes())
    (step / "state.json").unlink()
    (step / "state.json").symlink_to(outside / "state.json")
    (pair.there / "logs" / "worker-0.log").symlink_to(outside / "private.log")
    (pair.there / "ledger" / "ps-0.bin").symlink_to(outside / "private.log")
    (pair.there / "telemetry").rmdir()
    (pair.there / "telemetry").symlink_to(outside)
    (outside / "ps-0.jsonl").write_text("{}\n")
    pair.mirror.finish()
    pair.carry()
    assert not [path for path in pair.here.rglob("*") if path.is_file()]
    left = pair.mirror.left()
    assert {"logs/worker-0.log", "ledger/ps-0.bin", "telemetry", f"checkpoints/{STEP}/state.json"} <= set(left)
