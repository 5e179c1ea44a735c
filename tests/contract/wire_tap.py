"""WHAT is seen on the wire? A stranger between two tasks, who reads everything and may change it."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from lane_pairs import TIMEOUT_S, free_address

from paceline.transport.base import split

Change = Callable[[bytes, int], bytes]  # a piece and the position of its first byte -> what goes on


class Tap:
    """Carries every connection on to `target`; `seen` holds both directions."""

    def __init__(self, target: str, change_up: Change | None = None) -> None:
        self.address = free_address()
        self.seen = bytearray()
        self._target = split(target)
        self._change_up = change_up
        self._lock = threading.Lock()
        self._socks: list[socket.socket] = []
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(split(self.address))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here = self._listener.accept()[0]
                there = socket.create_connection(self._target, TIMEOUT_S)
                there.settimeout(None)
                self._socks += [here, there]
                threading.Thread(target=self._carry, args=(here, there, self._change_up), daemon=True).start()
                threading.Thread(target=self._carry, args=(there, here, None), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, change: Change | None) -> None:
        position = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    self.seen += data
                sink.sendall(change(data, position) if change else data)
                position += len(data)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in [self._listener, *self._socks]:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@contextmanager
def tapped(target: str, change_up: Change | None = None) -> Iterator[Tap]:
    tap = Tap(target, change_up)
    try:
        yield tap
    finally:
        tap.close()
