"""The shm lane: frames on an abstract Unix socket, gradients and parameters in memory that both sides map.

Chosen by default: an abstract name can be reached only within one network namespace of one kernel, so a client that
connects is on this host. The peer's user is checked; descriptors travel by SCM_RIGHTS and leave nothing behind.
"""

import os
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic, perf_counter
from typing import ClassVar

from paceline.errors import AuthenticationError, ConnectionLost
from paceline.params.arena import Arena, has_shared_memory
from paceline.transport.base import SocketListener, Stream, split

DISTURBED_S = 50e-6  # a spin that takes longer shares its core with another thread
MAX_BLIND = 256  # frames received without spinning, after spinning has failed again and again


class ShmStream(Stream):
    shares_memory: ClassVar[bool] = True
    lane: ClassVar[str] = "shm"

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.write = sock.send
        self._blind, self._vain = 0, 1  # frames to receive without spinning: now, and after the next failure
        check_same_user(sock)

    def look(self, view: memoryview) -> int:
        """Spin before sleeping, with exponential back-off: waking a thread takes longer than most waits here. Stop at
        once on a core that another thread wants."""
        if self._blind:
            self._blind -= 1
            return 0
        began_s = now_s = perf_counter()
        while now_s - began_s < self.look_s:
            try:
                count = self._sock.recv_into(view, 0, socket.MSG_DONTWAIT)
                self._vain = 1
                return count
            except BlockingIOError:
                before_s = now_s
                os.sched_yield()
                now_s = perf_counter()
                if now_s - before_s > DISTURBED_S:
                    break
            except OSError:
                return 0  # the read that follows raises what is wrong
        self._blind, self._vain = self._vain, min(2 * self._vain, MAX_BLIND)
        return 0

    def send_arenas(self, arenas: Sequence[Arena]) -> None:
        fds = [a.fd for a in arenas if a.fd is not None]
        try:
            socket.send_fds(self._sock, [b"a"], fds)
        except OSError as error:
            raise ConnectionLost(f"the connection ended while handing memory over: {error}") from error

    def recv_arenas(self, sizes: Sequence[int], writable: Sequence[bool]) -> list[Arena]:
        since_s = monotonic()
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, 1, len(sizes))
                break
            except BlockingIOError:
                self.check_silence(since_s)  # the reply is here, so the descriptors are on the way
            except OSError as error:
                raise ConnectionLost(f"the connection ended while taking memory over: {error}") from error
        are_whole = len(fds) == len(sizes) and all(
            os.fstat(fd).st_size >= size for fd, size in zip(fds, sizes, strict=True)
        )
        if not data or not are_whole:  # to touch memory that is not there would end this process
            for fd in fds:
                os.close(fd)
            raise ConnectionLost("the other side closed the connection before it handed its memory over")
        return [Arena.opened(fd, size, ok) for fd, size, ok in zip(fds, sizes, writable, strict=True)]


class ShmLane:
    name: ClassVar[str] = "shm"

    @staticmethod
    def listen(address: str) -> SocketListener:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(abstract_name(address))
            sock.listen(128)
        except OSError:
            sock.close()
            raise
        return SocketListener(sock, ShmStream)

    @staticmethod
    def connect(address: str, timeout_s: float) -> Stream:
        if not has_shared_memory():
            raise ConnectionLost("this system has no memory that two processes can share (memfd)")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(abstract_name(address))
        except OSError as error:
            sock.close()
            raise ConnectionLost(f"nobody on this host serves {address}: {error}") from error
        try:
            return ShmStream(sock)
        except AuthenticationError as error:
            sock.close()
            raise ConnectionLost(f"not by shared memory: {error}") from error


def abstract_name(address: str) -> str:
    """Return the abstract socket's name for a TCP address, resolved, so that localhost and 127.0.0.1 are one."""
    host, port = split(address)
    with suppress(OSError):  # an unknown host is not this one; the connection will fail
        host = socket.gethostbyname(host)
    return f"\0paceline/{host}:{port}"


def check_same_user(sock: socket.socket) -> None:
    """Refuse another user's process on the other end (SO_PEERCRED); root may talk to all."""
    if sys.platform != "linux":
        return
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid not in (os.getuid(), 0) and os.getuid() != 0:
        raise AuthenticationError(f"the process on the other end (pid {pid}) belongs to user {uid}")
