"""The tcp lane: blocking sockets between hosts, straight from and into tensor memory.

Chosen when the two tasks do not share a kernel and a network namespace, or forced with --lane tcp.
"""

import os
import select
import socket
import struct
import sys
import threading
from contextlib import suppress
from typing import ClassVar

from paceline.errors import ConnectionLost, HostNotFound
from paceline.transport.base import SocketListener, Stream, bound, split

KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 20_000}  # s, s, times, ms

# If more threads receive this much than there are cores, each waits until all of it is there, or this long.
GATHER_BYTES = 1 << 20
GATHER_MS = 200

# Where the kernel's struct tcp_info has them: bytes received; bytes sent, and of those the ones sent again.
INFO_BYTES = 216
RECEIVED, SENT = struct.Struct("=Q"), struct.Struct("=QQ")
RECEIVED_AT, SENT_AT = 128, 200


class Reading:
    """Count the threads of this process that receive something large; on entry, tell if they outnumber the cores."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def __enter__(self) -> bool:
        with self._lock:
            self._count += 1
            return self._count > len(os.sched_getaffinity(0))

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1


_reading = Reading()


class TcpStream(Stream):
    lane: ClassVar[str] = "tcp"

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.write = sock.send
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanished is noticed, not waited for
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def recv_some(self, view: memoryview) -> int:
        if view.nbytes < GATHER_BYTES or sys.platform != "linux":
            return super().recv_some(view)
        with _reading as are_many:
            if are_many:
                self._gather(view.nbytes)
            return super().recv_some(view)

    def _gather(self, size_bytes: int) -> None:
        """Sleep until so much is there, instead of waking for each segment of 64 KiB: where readers share the cores,
        that costs as much as the bytes themselves (a reader with a core to itself is faster without). The read that
        follows may still get less."""
        with suppress(OSError, ValueError):  # the read that follows raises what is wrong
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)
            ready = select.poll()
            ready.register(self._sock, select.POLLIN)
            ready.poll(GATHER_MS)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def kernel_bytes(self) -> tuple[int, int] | None:
        return info_bytes(self._sock)


def info_bytes(sock: socket.socket) -> tuple[int, int] | None:
    """Return (sent, received) by TCP_INFO, each byte once; None on other systems, old kernels and closed sockets."""
    if sys.platform != "linux":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    except OSError:
        return None
    if len(info) < INFO_BYTES:
        return None
    sent, again = SENT.unpack_from(info, SENT_AT)
    return sent - again, RECEIVED.unpack_from(info, RECEIVED_AT)[0]


class TcpLane:
    name: ClassVar[str] = "tcp"

    @staticmethod
    def listen(address: str) -> SocketListener:
        return SocketListener(bound(address), TcpStream)

    @staticmethod
    def connect(address: str, timeout_s: float) -> Stream:
        try:
            sock = socket.create_connection(split(address), timeout=timeout_s)
        except socket.gaierror as error:
            host, why = split(address)[0], error.strerror
            raise HostNotFound(f"the host name {host!r} was not found; is it spelt right? ({why})") from error
        except OSError as error:
            raise ConnectionLost(f"no connection to {address}: {error}") from error
        sock.settimeout(None)
        return TcpStream(sock)
