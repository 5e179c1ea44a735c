"""The tcp lane: blocking sockets between hosts, straight from and into tensor memory.

Chosen when the two tasks do not share a kernel and a network namespace, or forced with --lane tcp.
"""

import socket
from contextlib import suppress
from typing import ClassVar

from paceline.errors import ConnectionLost
from paceline.transport.base import Stream, split


class TcpStream(Stream):
    lane: ClassVar[str] = "tcp"

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class TcpListener:
    def __init__(self, address: str) -> None:
        host, port = split(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._sock.bind((host, port))
        self._sock.listen(128)

    def accept(self) -> Stream:
        try:
            return TcpStream(self._sock.accept()[0])
        except OSError as error:
            raise ConnectionLost(f"the listener was closed: {error}") from error

    def close(self) -> None:
        close_listener(self._sock)


class TcpLane:
    name: ClassVar[str] = "tcp"

    @staticmethod
    def listen(address: str) -> TcpListener:
        return TcpListener(address)

    @staticmethod
    def connect(address: str, timeout_s: float) -> Stream:
        try:
            sock = socket.create_connection(split(address), timeout=timeout_s)
        except OSError as error:
            raise ConnectionLost(f"no connection to {address}: {error}") from error
        sock.settimeout(None)
        return TcpStream(sock)


def close_listener(sock: socket.socket) -> None:
    """Close a listening socket so that a blocked accept returns."""
    with suppress(OSError):  # not every system lets a listener be shut down; closing is what counts
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
