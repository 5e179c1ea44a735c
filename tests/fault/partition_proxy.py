"""WHAT lies between a worker and a ps? A proxy that a test tells to swallow bytes, in one direction or both, or to cut.

Used by test_hangs.py. To TCP everything looks healthy meanwhile: that is what a partition in the middle looks like.
"""

import socket
import threading
from contextlib import suppress

from paceline.transport.base import split

PIECE_BYTES = 1 << 16


class Proxy:
    """Forwards to one address; `swallowed` counts bytes that never arrived."""

    def __init__(self, target: str) -> None:
        self._target = split(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.swallows: set[str] = set()  # "up": to the ps, "down": to the worker
        self.swallowed = 0
        self.has_swallowed = threading.Event()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True, name="proxy").start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()  # nobody listens there yet
                    continue
                self._pairs.append((near, far))
                for direction, source, sink in (("up", near, far), ("down", far, near)):
                    threading.Thread(
                        target=self._pump, args=(direction, source, sink), daemon=True, name="proxy"
                    ).start()

    def _pump(self, direction: str, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                if direction in self.swallows:
                    self.swallowed += len(data)
                    self.has_swallowed.set()
                else:
                    sink.sendall(data)
        if direction not in self.swallows:  # the end of a connection does not cross a partition either
            for end in (source, sink):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for pair in self._pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
