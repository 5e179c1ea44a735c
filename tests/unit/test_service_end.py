"""End a ps: not while a worker that went away may still come, but at once, with the error, when it has failed."""

import time
from contextlib import suppress
from types import SimpleNamespace

import msgspec
import pytest

from paceline.cluster.membership import Phase
from paceline.errors import ConnectionLost
from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec
from paceline.server.control.config import PsConfig
from paceline.server.control.rewinding import BACK_S
from paceline.server.core import Peer, Sends
from paceline.server.service import Service
from paceline.wire.frames import Frame, Kind
from paceline.wire.messages import AskStatus, encode

REJOIN_S = 50.0


@pytest.fixture
def service() -> Service:
    """A ps that was started again; nobody is connected."""
    config = PsConfig(0, 1, 2, "r", make_mode(ModeSpec(), 2), "bytes", lease_s=5.0, rejoin_s=REJOIN_S)
    return Service(config, b"1" * 32, lambda of, report: None)


@pytest.mark.parametrize(
    ("phases", "is_over"),
    [
        ((Phase.GONE, Phase.GONE), False),
        ((Phase.GONE, Phase.LOST), False),
        ((Phase.GONE, Phase.CLOSED), False),
        ((Phase.TRAINING, Phase.CLOSED), False),
        ((Phase.CLOSED, Phase.LOST), True),
        ((Phase.CLOSED, Phase.CLOSED), True),
    ],
)
def test_it_waits_for_those_who_were_away_before(service: Service, phases: tuple[Phase, ...], is_over: bool) -> None:
    for worker, phase in enumerate(phases):
        service.core.control.members.recall(worker, phase, 1, time.monotonic())
    assert service._is_over() is is_over


def test_but_not_for_ever(service: Service) -> None:
    for worker in (0, 1):
        service.core.control.members.recall(worker, Phase.GONE, 1, time.monotonic())
    service.core.control.began_s -= REJOIN_S
    assert service._is_over()


def test_a_restored_ps_ends_at_once_when_all_have_closed(service: Service) -> None:
    """Those who were fenced may take a while to come back; who has closed since needs none."""
    service.core.control.rewinding.over_s = time.monotonic() + BACK_S
    service.core.control.members.expected = 0
    service.core.control.members.recall(0, Phase.CLOSED, 2, time.monotonic())
    assert not service._is_over()  # nobody knows of worker:1
    service.core.control.members.recall(1, Phase.CLOSED, 2, time.monotonic())
    assert service._is_over()


def test_a_restored_ps_ends_when_its_launcher_says_that_all_workers_have(service: Service) -> None:
    service.core.control.rewinding.over_s = time.monotonic() + BACK_S
    service.core.control.members.expected = 0
    service.core.control.members.recall(0, Phase.CLOSED, 2, time.monotonic())
    service.release()
    assert service._is_over()


def test_what_cannot_be_decoded_is_told_once_with_who_sent_it(service: Service) -> None:
    """A worker whose messages we do not understand comes again and again: the log says why, not how often."""
    told: list[str] = []
    service.on_refusal = told.append
    for _ in range(3):
        tail = msgspec.msgpack.encode({"type": "Steps", "total": 2.5})
        frame = Frame(Kind.COLD, 0, 0, 0, 0, len(tail), 0, 0, 0, tail=tail)
        channel = SimpleNamespace(recv=lambda frame=frame: frame, bytes_in=0, bytes_out=0)
        peer = Peer(channel)  # type: ignore[arg-type]
        service.core.control.keys[peer.id] = 1, 1
        service._serve(peer)
    assert len(told) == 1
    assert "worker:1" in told[0]
    assert "a message that does not parse" in told[0]


def test_a_bug_ends_the_ps_also_when_the_one_who_asked_is_gone(service: Service) -> None:
    """State and numbers may disagree: what the others do next must not build on them."""

    def is_gone(message: object) -> None:
        raise ConnectionLost("closed")

    def breaks(*of: object) -> Sends:
        raise ValueError("a bug")

    service.requests.handle = breaks  # type: ignore[method-assign]
    tail = encode(AskStatus())
    frame = Frame(Kind.COLD, 0, 0, 0, 0, len(tail), 0, 0, 0, tail=tail)
    channel = SimpleNamespace(recv=lambda: frame, say=is_gone, bytes_in=0, bytes_out=0)
    service._serve(Peer(channel))  # type: ignore[arg-type]
    assert isinstance(service._failure, ValueError) and service._over.is_set()


def test_nothing_is_decided_after_what_could_not_be_written_down(service: Service) -> None:
    """A full disk, say: a journal that is written later would hold what was decided, and its update is not made."""

    def is_full(*of: object) -> None:
        raise OSError("no space left on device")

    core = service.core
    core.ledger = SimpleNamespace(decided=is_full)  # type: ignore[assignment]
    with pytest.raises(OSError, match="no space"):
        core.perform([])
    core.ledger = None
    with pytest.raises(ConnectionLost, match="is ending"):
        core.perform([])


def test_the_error_of_the_thread_that_failed_is_the_error_of_the_ps(service: Service) -> None:
    """Leases are looked at while another thread fails: the ps must not end with what follows from that."""
    service.core.is_broken = True
    service._failure = ValueError("the cause")
    with pytest.raises(ValueError, match="the cause"):
        service.run(lambda core: None)
    service._failure = None
    service._over.clear()
    with suppress(ConnectionLost):
        service._wake_after(0.0)
        service._wake_when_due()
    assert service._failure is None and service._over.is_set()
