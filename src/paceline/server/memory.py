"""Named pieces of memory of a ps, which outlive its process if a keeper holds them too.

Used by server/numbers and server/journal. The keeper is in the supervisor (launchers/keeper has the other side of the
protocol); without one nothing outlives the ps. Names and bytes are all that is known here, not what they mean.
"""

import array
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

import msgspec

from paceline.params.arena import Arena

MESSAGE_BYTES = 1 << 16
ANSWER_S = 120.0  # limit until all pieces have come, or until the kernel takes a message


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request of a ps to the keeper."""

    op: Literal["keep", "free", "give"]
    name: str = ""
    size_bytes: int = 0


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece that the keeper has; its descriptor comes with it. `end`: there are no more."""

    name: str = ""
    size_bytes: int = 0
    end: bool = False


class Memory:
    """Named pieces of memory; those of this class end with the process.

    `is_kept`: the pieces outlive the process, and its successor finds them.
    """

    is_kept = False

    def arena(self, name: str, size_bytes: int) -> Arena:
        """Return the piece of that name and size as shared memory: the one an earlier process left, or zeros."""
        return Arena.shared(size_bytes)

    def own(self, name: str, size_bytes: int) -> memoryview:
        """Return the same for a piece that is never handed to another task, so it needs no descriptor here."""
        return Arena.private(size_bytes).memory

    def names(self) -> list[str]:
        """Return the names of all pieces that outlive the process."""
        return []

    def found(self, name: str) -> Arena | None:
        """Return the piece of that name, if there is one that outlives the process."""
        return None

    def put(self, name: str, data: bytes) -> None:
        """Replace the piece of that name by these bytes, at once."""

    def free(self, name: str) -> None:
        """Free the piece of that name."""


class KeptMemory(Memory):
    """Memory whose every piece is handed to the keeper before it is used. The caller must hold the lock of the ps."""

    is_kept = True

    def __init__(self, keeper: socket.socket) -> None:
        self._keeper = keeper
        self._keeper.settimeout(ANSWER_S)
        self._pieces: dict[str, Arena] = {}
        self._take_all()

    def _take_all(self) -> None:
        """Receive the pieces that an earlier process left."""
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

    def own(self, name: str, size_bytes: int) -> memoryview:
        arena = self.arena(name, size_bytes)
        arena.close()
        return arena.memory

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
        """Send a request. It needs no answer: the kernel has it, with its descriptor, and the keeper reads it even when
        this process is dead; so a launcher that is stopped does not stop a ps. If the launcher is gone, the kernel ends
        this process in a moment."""
        with suppress(ConnectionError):
            self._keeper.sendmsg([message], rights)
