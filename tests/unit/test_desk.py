"""WHAT does a ps make of cold requests? Without sockets: a stand-in for the connection."""

from paceline.modes import make as make_mode
from paceline.server.core import Core, Peer, PsConfig
from paceline.server.desk import Desk
from paceline.wire import messages as m
from paceline.wire.frames import Frame, Kind

LEASE_S = 5.0


class Said:
    """A channel that keeps what was said."""

    def __init__(self) -> None:
        self.messages: list[object] = []

    def say(self, message: object) -> None:
        self.messages.append(message)


def test_attaching_is_a_sign_of_life() -> None:
    """Between joining and the first heartbeat a busy ps may have needed longer than a lease to make its shard."""
    config = PsConfig(
        index=0,
        num_ps=1,
        num_workers=1,
        run_id="r",
        mode=make_mode("async", None),
        placement="bytes",
        lease_s=LEASE_S,
    )
    core = Core(config)
    desk = Desk(core, lambda task, report: None)
    core.members.join(0, incarnation=1, now_s=-1000.0)
    assert core.members.expired(0.0, LEASE_S) == [(0, 1)]
    said = Said()
    desk.handle(Peer(said), m.Attach(0, 1), Frame(Kind.COLD, 0, 0, 0, 0, 0, 0, 0, 0, 0))  # type: ignore[arg-type]
    assert said.messages == [m.Done()]
    assert core.members.expired(core.members[0].heard_s, LEASE_S) == []
    assert core.members[0].heard_s > -1000.0
