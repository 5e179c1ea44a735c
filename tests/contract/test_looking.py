"""A ps looks for the next frame before it sleeps: with one worker, on its own host, and a core for each."""

import dataclasses
import socket
import threading
from contextlib import closing

import pytest
from test_limits import SECRET, join, serving

from paceline.cluster.discovery import may_look
from paceline.errors import ConnectionLost
from paceline.server import core
from paceline.transport import shm
from paceline.transport.channel import Channel, connect
from paceline.transport.shm import ShmStream
from paceline.wire import messages as m
from paceline.wire.frames import FRAME_BYTES, Kind

KEYS = (b"u" * 32, b"d" * 32)


def pair(look_s: float) -> tuple[Channel, Channel, socket.socket]:
    """Who sends, who looks, and the sender's socket."""
    ours, theirs = socket.socketpair()
    looking = ShmStream(theirs)
    looking.look_s = look_s
    return Channel(ShmStream(ours), KEYS), Channel(looking, KEYS[::-1]), ours


def test_a_frame_in_pieces_is_whole() -> None:
    """Also one whose second half comes after a read has timed out."""
    sender, looking, raw = pair(look_s=5.0)
    looking.stream.set_timeout(0.01)
    frame = bytes(sender._codec.pack(Kind.PUSH, 0, 1, 1, 0, b"", 7, 3, 0, 0))
    raw.sendall(frame[: FRAME_BYTES // 2])
    timer = threading.Timer(0.1, raw.sendall, (frame[FRAME_BYTES // 2 :],))
    timer.start()
    heard = looking.recv()
    timer.join(60)
    assert (heard.push_id, heard.version) == (7, 3)
    sender.close()
    looking.close()


def test_an_end_is_seen_while_looking() -> None:
    sender, looking, _ = pair(look_s=5.0)
    timer = threading.Timer(0.05, sender.close)
    timer.start()
    with pytest.raises(ConnectionLost):
        looking.recv()
    timer.join(60)
    looking.close()


def test_who_looks_in_vain_looks_less(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, looking, _ = pair(look_s=1e-3)
    looks = []
    monkeypatch.setattr(shm.os, "sched_yield", lambda: looks.append(1))
    view = memoryview(bytearray(FRAME_BYTES))
    counts = []
    for _ in range(100):
        before = len(looks)
        assert looking.stream.look(view) == 0
        counts.append(len(looks) > before)
    assert counts[0] and sum(counts) <= 7, "after 1, 2, 4, ... frames without a look"
    sender.send(Kind.PUSH, push_id=9)
    looking.stream._blind = 0  # type: ignore[attr-defined]
    assert looking.recv().push_id == 9 and looking.stream._vain == 1, "one that came is worth looking"  # type: ignore[attr-defined]
    sender.close()
    looking.close()


def test_only_with_one_worker_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "usable_cores", lambda: 2)
    with serving("shm", "tcp") as (address, ps):

        def looks() -> list[float]:
            return [ps.core.peers[c].channel.stream.look_s for c in ps.core.control.at.values()]

        with closing(connect(address, "shm", SECRET)) as first:
            assert isinstance(first.ask(join())[0], m.Joined)
            assert looks() == [core.LOOK_S]
            with closing(connect(address, "shm", SECRET)) as second:
                assert isinstance(second.ask(join(1))[0], m.Joined)
                assert looks() == [0.0, 0.0], "two would be in each other's way"
        with closing(connect(address, "tcp", SECRET)) as far:
            assert isinstance(far.ask(join())[0], m.Joined)
            assert looks()[-1] == 0.0, "being woken is little beside a cable"


def test_not_where_cores_are_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "usable_cores", lambda: 1)
    with serving("shm") as (address, ps), closing(connect(address, "shm", SECRET)) as worker:
        assert isinstance(worker.ask(join())[0], m.Joined)
        assert [ps.core.peers[c].channel.stream.look_s for c in ps.core.control.at.values()] == [0.0]


def test_whoever_wants_an_idle_core_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_look({}) and may_look({"PACELINE_LOOK": "1"}) and not may_look({"PACELINE_LOOK": "0"})
    monkeypatch.setattr(core, "usable_cores", lambda: 2)
    with serving("shm") as (address, ps), closing(connect(address, "shm", SECRET)) as worker:
        ps.core.config = dataclasses.replace(ps.core.config, may_look=False)
        assert isinstance(worker.ask(join())[0], m.Joined)
        assert [ps.core.peers[c].channel.stream.look_s for c in ps.core.control.at.values()] == [0.0]
