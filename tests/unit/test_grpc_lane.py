"""WHAT does the lane grpc refuse, and what do its pipes keep? Without a connection; the contract has the rest."""

import pytest

from paceline.cluster.listening import lanes
from paceline.cluster.settings import Settings
from paceline.cluster.validate import check_ops
from paceline.errors import ConnectionLost, UsageError
from paceline.transport import grpc
from paceline.transport.grpc import PIPE_BYTES, Pipe


def test_without_the_extra_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs gRPC, which is not installed here: pip install 'paceline\[grpc\]'\."):
        check_ops(Settings(run_id="r", lane="grpc"))
    check_ops(Settings(run_id="r", lane="tcp"))


@pytest.mark.usefixtures("grpc")
def test_tls_is_not_for_grpc() -> None:
    with pytest.raises(UsageError, match="--tls is made for lane tcp, and not for --lane grpc"):
        check_ops(Settings(run_id="r", lane="grpc", tls=True))


def test_who_controls_a_run_of_this_host_comes_in_by_shared_memory() -> None:
    assert lanes("grpc")[-1] == "grpc" and set(lanes("grpc")) <= {"shm", "grpc"}


def test_a_pipe_gives_bytes_in_order_and_what_was_put_in_before_the_end() -> None:
    pipe, into = Pipe(), memoryview(bytearray(5))
    for part in (b"abc", b"defg"):
        assert pipe.put(part, None)
    assert pipe.take_into(into, None) == 5 and bytes(into) == b"abcde"
    pipe.end()
    with pytest.raises(ConnectionLost):
        pipe.put(b"late", None)
    assert not pipe.is_over and pipe.take_into(into, None) == 2 and bytes(into[:2]) == b"fg"
    assert pipe.is_over and pipe.take_into(into, None) == 0 and pipe.take() == b""


def test_a_pipe_takes_no_more_than_it_has_room_for() -> None:
    pipe, into = Pipe(), memoryview(bytearray(1))
    assert pipe.take_into(into, 0.001) == -1
    assert pipe.put(bytes(PIPE_BYTES), 0.001) and not pipe.put(b"more", 0.001)
    assert len(pipe.take()) == PIPE_BYTES and pipe.put(b"more", 0.001)
