"""What a launcher and an agent say to each other comes through as it was said, or not at all."""

import io

import pytest

from paceline.cluster.settings import Settings
from paceline.cluster.spec import Task
from paceline.errors import ProtocolError
from paceline.launchers.entry import Program
from paceline.launchers.hosts import frames as f
from paceline.launchers.pieces import Piece

HELLO = f.Hello(
    version="1",
    settings=Settings(run_id="r", mode="sync"),
    program=Program(script="train.py", args=("--lr", "1")),
    ps=[Task("ps", 0)],
    secret=b"s" * 32,
    run_dir="runs/r",
    token=".t",
    num_workers=2,
)
TOLD = [
    HELLO,
    f.Start(Task("ps", 0), {"ps": ["a:1"], "worker": ["b:2"]}, 3, at="c:4"),
    f.Signal(Task("worker", 1), 15, is_all=True),
    f.Forget(Task("ps", 0)),
    f.Put(Piece("ledger/ps-0.bin", 32, b"\x00\xff")),
    f.Moved({"ps:0": "c:4"}),
    f.Beat(),
    f.End(),
]
HEARD = [
    f.Ready(host="h", cores=2, threads="1", cards=0, run_dir="/r", is_shared=False, spare_ports=[7]),
    f.Refused("no script"),
    f.Exited(Task("worker", 0), -9),
    f.News(Piece("logs/ps-0.log", 5, b"x", is_last=True)),
    f.Beat({"ps:0": "sleeping"}),
    f.Over(),
]


def test_all_that_is_said_is_heard() -> None:
    told, heard = (io.BytesIO(b"".join(map(f.frame, messages))) for messages in (TOLD, HEARD))
    assert [f.read_told(told) for _ in TOLD] == TOLD and f.read_told(told) is None
    assert [f.read_heard(heard) for _ in HEARD] == HEARD and f.read_heard(heard) is None


def test_half_a_frame_is_an_end() -> None:
    whole = f.frame(HELLO)
    for size in (1, 4, len(whole) - 1):
        assert f.read_told(io.BytesIO(whole[:size])) is None


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", f.frame(f.Over())])
def test_what_nobody_sends_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        f.read_told(io.BytesIO(data))


def test_what_a_login_shell_says_is_no_message() -> None:
    stream = io.BytesIO(b"Welcome!\n" + f.MAGIC + f.frame(f.Over()))
    assert f.skip_noise(stream) == b"Welcome!\n" and f.read_heard(stream) == f.Over()
    assert f.skip_noise(io.BytesIO(b"no agent here")) is None
    assert f.skip_noise(io.BytesIO(b"x" * (2 * f.LONGEST_NOISE))) is None


def test_the_secret_is_not_printed() -> None:
    assert "s" * 8 not in f"{HELLO!r} {HELLO}"
