"""Which gradients made which update: what was written is read back, also when its writer never closed the file."""

from pathlib import Path

from paceline.telemetry import ledger
from paceline.telemetry.ledger import GROW_RECORDS, Applied, Ledger


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written = Ledger(tmp_path / "ledger" / "ps-0.bin")
    records = [Applied(version, 10 + version, 3, version % 2, 1 + version % 3) for version in range(1, 20)]
    for record in records:
        written.write(*record)
    written.close()
    assert ledger.read(tmp_path / "ledger" / "ps-0.bin") == records


def test_a_killed_writer_leaves_all_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "ps-0.bin"
    written = Ledger(path)
    written.write(1, 1, 1, 0, 1)
    assert ledger.read(path) == [Applied(1, 1, 1, 0, 1)], "without close or flush"


def test_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "ps-0.bin"
    written = Ledger(path)
    for version in range(1, GROW_RECORDS + 10):
        written.write(version, version, 1, 0, 1)
    written.close()
    assert [record.version for record in ledger.read(path)] == list(range(1, GROW_RECORDS + 10))
