"""What happened to every gradient: what was written is read back, whoever was killed, restarted or out of disk."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.telemetry import ledger, ledgers
from paceline.telemetry.ledger import GROW_RECORDS, RECORD_BYTES, Kind, Ledger, Record


def pulls(count: int, first: int = 1) -> list[Record]:
    return [Record(Kind.PULL, 0, 1, 65537, 0, 7 * n, 0, 2, n) for n in range(first, first + count)]


def fill(written: Ledger, records: list[Record]) -> None:
    for record in records:
        written.write(*record[:-1])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger" / "ps-0.bin"


def test_what_was_written_is_read_back(path: Path) -> None:
    written = Ledger(path)
    largest = Record(Kind.DISCARD, 255, 2**16 - 1, 2**32 - 1, 2**64 - 1, 2**64 - 1, 2**16 - 1, 2**16 - 1, 6)
    fill(written, [*pulls(5), largest])
    written.close()
    assert ledger.read(path) == [*pulls(5), largest]
    assert path.stat().st_size == 6 * RECORD_BYTES


def test_a_killed_writer_leaves_all_it_wrote(path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from paceline.telemetry.ledger import Kind, Ledger\n"
        "written = Ledger(Path(sys.argv[1]))\n"
        "for n in range(1, 100): written.write(Kind.PULL, 0, 1, 65537, 0, 7 * n, 0, 2)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=60).returncode == -9
    assert ledger.read(path) == pulls(99), "without close or flush"
    Ledger(path).close()
    assert ledger.read(path) == pulls(99), "and whoever comes after keeps them"


def test_it_grows_from_piece_to_piece(path: Path) -> None:
    written = Ledger(path)
    fill(written, pulls(2 * GROW_RECORDS + 10))
    assert written.position == (2 * GROW_RECORDS + 10) * RECORD_BYTES
    written.close()
    assert ledger.read(path) == pulls(2 * GROW_RECORDS + 10)


@pytest.mark.parametrize("before", [0, 1, 5, GROW_RECORDS - 1, GROW_RECORDS, GROW_RECORDS + 1])
@pytest.mark.parametrize("is_closed", [True, False])
def test_whoever_starts_again_appends(before: int, is_closed: bool, path: Path) -> None:
    first = Ledger(path)
    fill(first, pulls(before))
    if is_closed:
        first.close()
    second = Ledger(path)
    assert second.position == before * RECORD_BYTES
    fill(second, pulls(3, before + 1))
    assert ledger.read(path) == pulls(before + 3)


@pytest.mark.parametrize("kept", [0, 3, GROW_RECORDS - 1, GROW_RECORDS, GROW_RECORDS + 3])
def test_what_will_be_done_again_is_written_once(kept: int, path: Path) -> None:
    first = Ledger(path)
    fill(first, pulls(GROW_RECORDS + 5))
    second = Ledger(path, position=kept * RECORD_BYTES)
    assert ledger.read(path) == pulls(kept), "gone as soon as it is opened: it may die again"
    again = [record._replace(outcome=1) for record in pulls(2, kept + 1)]
    fill(second, again)
    assert ledger.read(path) == [*pulls(kept), *again]


def test_a_torn_record_is_none(path: Path) -> None:
    written = Ledger(path)
    fill(written, pulls(4))
    with path.open("r+b") as file:
        file.seek(4 * RECORD_BYTES)
        file.write(ledger.pack(pulls(1, 5)[0])[:-4])  # all but its number
    assert ledger.read(path) == pulls(4)
    second = Ledger(path)
    fill(second, [Record(Kind.START, 0, 3, 2)])
    assert ledger.read(path)[4:] == [Record(Kind.START, 0, 3, 2, number=5)], "nothing of the torn one is left"


def test_a_file_cut_in_the_middle_of_a_record_is_read_up_to_it(path: Path) -> None:
    written = Ledger(path)
    fill(written, pulls(4))
    written.close()
    os.truncate(path, 4 * RECORD_BYTES - 1)
    assert ledger.read(path) == pulls(3)
    assert Ledger(path).position == 3 * RECORD_BYTES


def test_a_full_disk_is_told_in_the_last_record(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Ledger(path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    fill(written, pulls(GROW_RECORDS + 10))
    assert written.is_full
    written.close()
    records = ledger.read(path)
    assert records[:-1] == pulls(GROW_RECORDS - 1)
    assert records[-1] == Record(Kind.FULL, number=GROW_RECORDS)


def test_ledgers_are_set_aside_for_another_start(tmp_path: Path) -> None:
    for start in (1, 2):
        for name in ("ps-0", "worker-0"):
            written = Ledger(tmp_path / "ledger" / f"{name}.bin")
            fill(written, pulls(start))
            written.close()
        ledgers.set_aside(tmp_path)
    ledgers.set_aside(tmp_path)
    found = {str(p.relative_to(tmp_path)): len(ledger.read(p)) for p in (tmp_path / "ledger").rglob("*.bin")}
    assert found == {
        "ledger/earlier-1/ps-0.bin": 1,
        "ledger/earlier-1/worker-0.bin": 1,
        "ledger/earlier-2/ps-0.bin": 2,
        "ledger/earlier-2/worker-0.bin": 2,
    }


def test_a_linked_ledger_is_not_read_and_is_said(tmp_path: Path) -> None:
    book = Ledger(tmp_path / "other" / "ps-0.bin")
    book.write(Kind.START)
    book.close()
    run = tmp_path / "run"
    (run / "ledger").mkdir(parents=True)
    (run / "ledger" / "ps-0.bin").symlink_to(tmp_path / "other" / "ps-0.bin")
    assert ["symbolic link" in line for line in ledgers.verdict_of(run).damaged] == [True]
