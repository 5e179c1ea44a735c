"""Ask a ps for anything, in any order, as a client that knows the secret: it does or refuses it, and lives on.

A handler that raises something else than a PacelineError ends the ps (server/service), so nothing else may come out.
"""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fuzz_wire import MESSAGES

from paceline.errors import PacelineError, ProtocolError
from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec
from paceline.params import arena
from paceline.server.control.config import PsConfig
from paceline.server.core import Core, Peer
from paceline.server.requests import Requests
from paceline.transport.security import Role
from paceline.wire import messages as m
from paceline.wire.frames import Frame, Kind

PLAIN = [*MESSAGES, m.Pause(), m.Resume(), m.Ready(), m.AskStatus(), m.AskDecisions(), m.Assign("parameters")]
NO_BULK = Frame(Kind.COLD, 0, 0, 0, 0, 0, 0, 0, 0)
SIZES = [0, 1, 64, 128, 2**31, 2**63]
NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 255, 65536, 2**31, 2**63 - 1]) | st.integers(-(2**63), 2**64 - 1)
LEAF = (
    NUMBERS
    | st.floats()
    | st.sampled_from(["", "r", "sync", "local", "worker", "float64", "ema", "slots", "x" * 50])
    | st.none()
)


class Client:
    """One connection, whose payload has the size it claims, as far as memory lasts."""

    bytes_in = bytes_out = 0
    shares_memory = False

    def __init__(self, role: Role) -> None:
        self.role = role
        self.stream = self

    def say(self, message: object, bulk: Sequence[object] = ()) -> None:
        m.encode(message)  # type: ignore[arg-type]

    def recv_bulk(self, frame: Frame, into: memoryview) -> None:
        if frame.bulk_bytes != into.nbytes:
            raise ProtocolError("another size")

    def shutdown(self) -> None:
        pass

    def set_send_timeout(self, seconds: float) -> None:
        pass


def changed(message: m.Message, data: st.DataObject) -> m.Message | None:
    """The message with one of its leaves replaced; None when it is none of ours any more."""
    tree = msgspec.to_builtins(message)
    paths = list(leaves(tree))
    for _ in range(data.draw(st.integers(0, 2)) if paths else 0):
        *way, last = data.draw(st.sampled_from(paths))
        node = tree
        for step in way:
            node = node[step]
        node[last] = data.draw(LEAF)
    try:
        return m.decode(msgspec.msgpack.encode(tree))
    except (ProtocolError, OverflowError):
        return None


def leaves(tree: object, way: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        return [way] if way and way != ("type",) else []
    return [leaf for key, value in items for leaf in leaves(value, (*way, key))]


@settings(max_examples=settings.default.max_examples // 4)  # type: ignore[union-attr]
@given(st.data(), st.sampled_from(["async", "sync", "bounded"]))
def test_no_request_ends_a_ps(data: st.DataObject, mode: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "_free_bytes", lambda: 1 << 20)
        core = Core(PsConfig(0, 1, 2, "r", make_mode(ModeSpec(name=mode), 2), "bytes", 60.0))
        requests = Requests(core, lambda task, report: None)
        roles = [Role.WORKER, Role.WORKER, data.draw(st.sampled_from(Role))]
        peers = [Peer(Client(role)) for role in roles]  # type: ignore[arg-type]
        core.peers = {peer.id: peer for peer in peers}
        if data.draw(st.booleans()):  # a model is there, and whoever asks may be its worker
            requests.handle(peers[0], msgspec.structs.replace(MESSAGES[0], mode=mode), NO_BULK)
            requests.handle(peers[0], m.Init(), NO_BULK._replace(bulk_bytes=128))
        for _ in range(data.draw(st.integers(1, 12))):
            peer = data.draw(st.sampled_from(peers))
            message = changed(data.draw(st.sampled_from(PLAIN)), data)
            if isinstance(message, m.Join) and message.mode == "async":
                message = msgspec.structs.replace(message, mode=mode)
            if message is None:
                continue
            size = data.draw(st.sampled_from(SIZES))
            try:
                requests.handle(peer, message, NO_BULK._replace(bulk_bytes=size))
            except PacelineError:
                continue
