"""What cannot be written is told on a pipe: once a file, never waiting, merged where it is the same for many."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.telemetry import losses
from paceline.telemetry.ledger import RECORD_BYTES, Kind, Ledger, records_of
from paceline.telemetry.losses import Loss, Losses
from paceline.telemetry.sink import Sink

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Losses]:
    ends = Losses()
    monkeypatch.setattr(losses, "_told", set())
    monkeypatch.setattr(losses, "_pipe", ends.writer)
    yield ends
    ends.close()


def test_once_until_it_could_be_written_again(heard: Losses, tmp_path: Path) -> None:
    for _ in range(1000):
        losses.tell(tmp_path / "a", FULL, "lost")
    assert heard.new() == [Loss(file=str(tmp_path / "a"), why="No space left on device", lost="lost")]
    losses.written(tmp_path / "a")
    losses.tell(tmp_path / "a", FULL, "lost")
    assert len(heard.new()) == 1 and heard.new() == []


def test_nobody_reads_and_nobody_waits(heard: Losses, tmp_path: Path) -> None:
    for number in range(5000):  # more than a pipe holds
        losses.tell(tmp_path / f"file-{number:08}", FULL, "x" * 400)
    heard.close()  # what came by then is still told
    assert len(heard.new()) > 10 and heard.new() == []


def test_lines_name_some_files_of_each_reason() -> None:
    found = [Loss(file=f"r/{n}.log", why="Disk full", lost="prints are lost") for n in range(9)]
    found.append(Loss(file="r/ledger/ps-0.bin", why="Input/output error", lost="it ends"))
    assert losses.lines(found) == [
        "paceline: r/0.log, r/1.log, r/2.log and 6 more cannot be written (Disk full): prints are lost",
        "paceline: r/ledger/ps-0.bin cannot be written (Input/output error): it ends",
    ]


def test_records_and_ledgers_that_do_not_fit_are_told(
    heard: Losses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    sink = Sink(tmp_path / "file" / "ps-0.jsonl")  # below a file nothing can be made
    for _ in range(10):
        sink.tick(task="ps:0")
    sink.close()
    assert [Path(loss.file).name for loss in heard.new()] == ["ps-0.jsonl"]

    ledger = Ledger(tmp_path / "ps-0.bin")

    def is_full(*args: object) -> None:
        raise FULL

    monkeypatch.setattr(os, "posix_fallocate", is_full, raising=False)
    monkeypatch.setattr(os, "ftruncate", is_full)
    while not ledger.is_full:
        ledger.write(Kind.PULL)
    ledger.write(Kind.PULL)
    monkeypatch.undo()
    [loss] = heard.new()
    assert Path(loss.file).name == "ps-0.bin" and "verify" in loss.lost
    ledger.close()
    *_, last = records_of((tmp_path / "ps-0.bin").read_bytes())
    assert last.kind == Kind.FULL and (tmp_path / "ps-0.bin").stat().st_size % RECORD_BYTES == 0


def test_a_task_takes_the_pipe_over_and_its_own_children_do_not_get_it() -> None:
    ends = Losses()
    program = (
        "import os\nfrom paceline.telemetry import losses\nlosses.begin(os.environ.pop(losses.VARIABLE))\n"
        "assert not os.get_inheritable(losses._pipe)\n"
        "losses.tell('/x/a.log', OSError(5, 'Input/output error'), 'lost')\n"
    )
    environ = {**os.environ, losses.VARIABLE: str(ends.writer)}
    subprocess.run([sys.executable, "-c", program], env=environ, pass_fds=(ends.writer,), check=True, timeout=60)
    assert ends.new() == [Loss(file="/x/a.log", why="Input/output error", lost="lost")]
    ends.close()


def test_a_task_started_by_hand_prints_it() -> None:
    program = "from paceline.telemetry import losses as l\nl.begin('')\nl.tell('a.log', OSError(5, 'bad'), 'lost')\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == "paceline: a.log cannot be written (bad): lost\n"
