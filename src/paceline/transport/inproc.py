"""The inproc lane: ps and workers as threads of one process, for tests, notebooks and the smallest runs.

Frames are sent over a socket pair; arenas are handed over as objects.
"""

import queue
import socket
import threading
from collections.abc import Sequence
from typing import ClassVar

from paceline.errors import ConnectionLost
from paceline.params.arena import Arena
from paceline.transport.base import QueueListener, Stream

_LISTENERS: dict[str, "InprocListener"] = {}
_LOCK = threading.Lock()


class InprocStream(Stream):
    shares_memory: ClassVar[bool] = True
    lane: ClassVar[str] = "inproc"

    def __init__(
        self, sock: socket.socket, given: "queue.SimpleQueue[Arena]", taken: "queue.SimpleQueue[Arena]"
    ) -> None:
        super().__init__(sock)
        self._given = given
        self._taken = taken

    def send_arenas(self, arenas: Sequence[Arena]) -> None:
        for arena in arenas:
            self._given.put(arena)

    def recv_arenas(self, sizes: Sequence[int], writable: Sequence[bool]) -> list[Arena]:
        try:
            return [self._taken.get(timeout=10) for _ in sizes]
        except queue.Empty as error:
            raise ConnectionLost("the other side closed the connection before it handed its memory over") from error


class InprocListener(QueueListener):
    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        with _LOCK:
            _LISTENERS[address] = self

    def offer(self) -> Stream:
        """Make a pair of streams; return the client's end, and let accept() return the other."""
        ours, theirs = socket.socketpair()
        down: queue.SimpleQueue[Arena] = queue.SimpleQueue()
        up: queue.SimpleQueue[Arena] = queue.SimpleQueue()
        self._waiting.put(InprocStream(ours, down, up))
        return InprocStream(theirs, up, down)

    def close(self) -> None:
        with _LOCK:
            if _LISTENERS.get(self._address) is self:
                del _LISTENERS[self._address]
        self._waiting.put(None)


class InprocLane:
    name: ClassVar[str] = "inproc"

    @staticmethod
    def listen(address: str) -> InprocListener:
        return InprocListener(address)

    @staticmethod
    def connect(address: str, timeout_s: float) -> Stream:
        with _LOCK:
            listener = _LISTENERS.get(address)
        if listener is None:
            raise ConnectionLost(f"no ps in this process serves {address}")
        return listener.offer()
