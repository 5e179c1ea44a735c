"""WHERE does a ps keep what must outlive its process? In named pieces of shared memory that somebody else holds too.

Used by server/shard and server/durable. The supervisor holds them (launchers/keeper has the other side of the talk);
without one nothing outlives the ps, and nothing is spent on it. It knows names and bytes, not what they mean.
"""

import array
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, Protocol

import msgspec

from paceline.params.arena import Arena

MESSAGE_BYTES = 1 << 16
ANSWER_S = 120.0  # that a start may take until all pieces have come, or a word until the kernel takes it


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a ps wants of the keeper."""

    op: Literal["keep", "free", "give"]
    name: str = ""
    size_bytes: int = 0


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the keeper has, with its descriptor; `end`: there is no more."""

    name: str = ""
    size_bytes: int = 0
    end: bool = False


class Memory(Protocol):
    """`is_kept`: what lies here is still there when this process is gone, and its successor finds it."""

    is_kept: bool

    def arena(self, name: str, size_bytes: int) -> Arena:
        """The piece of that name and size: the one an earlier life left, or a new one, zeroed."""
        ...

    def names(self) -> list[str]:
        """What there is."""
        ...

    def found(self, name: str) -> Arena | None:
        """What an earlier life left under that name, if it did."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """These bytes under that name, instead of what was there, at once."""
        ...

    def free(self, name: str) -> None:
        """Nobody needs that piece any more."""
        ...


class Unkept:
    """Nobody holds it: pieces are plain shared memory."""

    is_kept = False

    def arena(self, name: str, size_bytes: int) -> Arena:
        return Arena.shared(size_bytes)

    def names(self) -> list[str]:
        return []

    def found(self, name: str) -> Arena | None:
        return None

    def put(self, name: str, data: bytes) -> None:
        return

    def free(self, name: str) -> None:
        return


class Kept:
    """Every piece is handed to the keeper before it is used. Asked only with the ps' lock held."""

    is_kept = True

    def __init__(self, keeper: socket.socket) -> None:
        self._keeper = keeper
        self._keeper.settimeout(ANSWER_S)
        self._pieces: dict[str, Arena] = {}
        self._take_all()

    def _take_all(self) -> None:
        """What an earlier life left."""
        self._keeper.send(msgspec.msgpack.encode(Said("give")))
        while True:
            data, fds, _, _ = socket.recv_fds(self._keeper, MESSAGE_BYTES, 1)
            piece = msgspec.msgpack.decode(data, type=Piece)
            if piece.end:
                return
            self._pieces[piece.name] = Arena.opened(fds[0], piece.size_bytes, is_writable=True)

    def arena(self, name: str, size_bytes: int) -> Arena:
        known = self._pieces.get(name)
        if known is None or known.size_bytes != size_bytes:
            if known is not None:
                known.close()
            known = Arena.shared(size_bytes)
            self._keep(name, known)
        return known

    def names(self) -> list[str]:
        return list(self._pieces)

    def found(self, name: str) -> Arena | None:
        return self._pieces.get(name)

    def put(self, name: str, data: bytes) -> None:
        before = self._pieces.get(name)
        if before is not None:
            before.close()
        piece = Arena.shared(len(data))
        piece.memory[:] = data
        self._keep(name, piece)
        piece.close()

    def _keep(self, name: str, piece: Arena) -> None:
        assert piece.fd is not None
        message = msgspec.msgpack.encode(Said("keep", name, piece.size_bytes))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [piece.fd]))]
        self._say(message, rights)
        self._pieces[name] = piece

    def free(self, name: str) -> None:
        piece = self._pieces.pop(name, None)
        if piece is not None:
            piece.close()
            self._say(msgspec.msgpack.encode(Said("free", name)))

    def _say(self, message: bytes, rights: "Sequence[tuple[int, int, array.array[int]]]" = ()) -> None:
        """What was sent is the kernel's, with its descriptor: the keeper reads it also after our death. So there is no
        answer to wait for, and a launcher that is stopped stops nobody. One that is gone takes this process along in a
        moment, by the kernel."""
        with suppress(ConnectionError):
            self._keeper.sendmsg([message], rights)
