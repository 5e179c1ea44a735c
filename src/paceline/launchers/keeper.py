"""WHO holds a ps's memory while it is being started again? The supervisor: descriptors of memfds, handed over a socket.

Called by launchers/supervisor, one Keeper a ps task; server/memory is the other side. Must never look into the memory.

The ps says over a SOCK_SEQPACKET pair, a msgpack message each: 1. keep NAME (with one descriptor; a known name is
replaced at once); 2. free NAME; 3. give, answered by a message with a descriptor for
every piece, and then the end. Each start of the ps has a pair of its own; the descriptors stay over all of them.
"""

import os
import socket
import threading
from contextlib import suppress

import msgspec

from paceline.params.arena import has_shared_memory
from paceline.server.memory import KeptMemory, Memory, Piece, Said

VARIABLE = "PACELINE_KEEPER_FD"
MAX_MESSAGE = 4096
CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # no other task shall hold a ps's memory
DRAIN_S = 5.0  # a ps that died may have said a last thing that was not read yet


class Keeper:
    """The memory of one ps task, over all its starts.

    >>> keeper = Keeper("ps:0")
    >>> keeper.names
    []
    """

    def __init__(self, task: str) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._pieces: dict[str, tuple[int, int]] = {}  # name -> (descriptor, size)
        self._serving: threading.Thread | None = None
        self._side: socket.socket | None = None

    @property
    def names(self) -> list[str]:
        """What is kept."""
        with self._lock:
            return list(self._pieces)

    def connect(self) -> socket.socket:
        """The ps's end of a new pair; whoever starts the ps passes it on, and closes it here."""
        self._end_serving()
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._side = mine
        self._serving = threading.Thread(target=self._serve, args=(mine,), daemon=True, name=f"keeper-{self._task}")
        self._serving.start()
        return theirs

    def forget(self) -> None:
        """Let go of all memory: the next start is an empty one."""
        self._end_serving()
        with self._lock:
            for descriptor, _ in self._pieces.values():
                os.close(descriptor)
            self._pieces.clear()

    def close(self) -> None:
        """The run is over."""
        self.forget()

    def _end_serving(self) -> None:
        """What a dead ps has said is taken in first: it may have been about memory that the next one needs."""
        if self._serving is None or self._side is None:
            return
        self._serving.join(DRAIN_S)
        if self._serving.is_alive():  # somebody else still has the other end
            with suppress(OSError):
                self._side.shutdown(socket.SHUT_RDWR)
            self._serving.join(DRAIN_S)
        self._serving = self._side = None

    def _serve(self, side: socket.socket) -> None:
        said = msgspec.msgpack.Decoder(Said)
        with side:
            while True:
                try:
                    message, descriptors, _, _ = socket.recv_fds(side, MAX_MESSAGE, 1, CLOSE_ON_EXEC)
                    if not message:
                        return
                    self._answer(side, said.decode(message), descriptors)
                except (ConnectionResetError, BrokenPipeError):
                    continue  # it died with an answer unread; what it had said before still comes
                except (OSError, msgspec.MsgspecError):
                    return

    def _answer(self, side: socket.socket, said: Said, descriptors: list[int]) -> None:
        if said.op == "give":
            self._give(side)
            return
        with self._lock:
            before = self._pieces.pop(said.name, None)
            if said.op == "keep" and descriptors:
                self._pieces[said.name] = (descriptors.pop(), said.size_bytes)
        for descriptor in [*descriptors, *([before[0]] if before else [])]:
            os.close(descriptor)

    def _give(self, side: socket.socket) -> None:
        with self._lock:
            pieces = dict(self._pieces)
        for name, (descriptor, size_bytes) in pieces.items():
            socket.send_fds(side, [msgspec.msgpack.encode(Piece(name, size_bytes))], [descriptor])
        side.send(msgspec.msgpack.encode(Piece(end=True)))


def kept_memory() -> Memory:
    """In a ps: what it was started with, memory that a keeper holds, or plain memory."""
    number = os.environ.get(VARIABLE)
    if not number or not has_shared_memory():
        return Memory()
    return KeptMemory(socket.socket(fileno=int(number)))
