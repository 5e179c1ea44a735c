"""Streams and listeners over sockets: what a lane must offer, and all that the code above a lane sees of it.

A lane listens and connects; a stream moves bytes in order and, where memory can be shared, hands arenas over.
A new lane passes tests/contract/test_lane_contract.py and never decides anything about training.
"""

import queue
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Protocol

from paceline import forks
from paceline.errors import AuthenticationError, ConnectionLost, WaitTimeout
from paceline.params.arena import Arena

Buffer = bytes | bytearray | memoryview
IOV_LIMIT = 512  # buffers a single sendmsg takes
SEND_S = 30.0  # a peer that takes nothing at all for so long is given up
SLOWEST_BYTES_S = 1 << 16  # and so is one that takes less than this per second of a large message
REST_S = 30.0  # a peer that is silent for so long in the middle of a frame is given up
ACCEPT_PAUSE_S = 0.05


class _Inherited:
    """A stand-in, in a forked child, for a socket of its parent."""

    def __init__(self, owner: forks.Owner) -> None:
        self._owner = owner

    def close(self) -> None:
        """Do nothing: it is not open here."""

    def shutdown(self, how: int) -> None:
        """Do nothing: the connection is the parent's."""

    def getsockopt(self, *what: int) -> bytes:
        raise OSError("a socket of the parent process")

    def __getattr__(self, name: str) -> Any:
        raise self._owner.refusal("a connection of paceline used")


class Stream:
    """A connected blocking socket. Reads and writes are whole or raise."""

    shares_memory: ClassVar[bool] = False
    lane: ClassVar[str] = ""
    name: str = "the other side"  # in messages; a client sets the task that it has connected to
    # Sends the start of a small message with one call into C; None where a lane does more to send than that.
    write: Callable[[Buffer], int] | None = None
    look_s: float = 0.0  # how long to spin for a frame before sleeping; set where a core is free for it

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send_s = 0.0
        self.set_send_timeout(SEND_S)
        self._owner = forks.Owner()
        forks.hold(self)

    def set_timeout(self, seconds: float) -> None:
        """Let reads raise WaitTimeout after this long (0: never). The kernel's timeout costs no extra system call."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))

    def set_send_timeout(self, seconds: float) -> None:
        """Let sends raise ConnectionLost when the peer takes nothing for so long, or too little (0: never)."""
        self._send_s = seconds
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(seconds))

    def send(self, buffers: Sequence[Buffer], size_bytes: int = -1) -> None:
        """Send everything in `buffers`, in order. With their total size, one system call is mostly all it takes."""
        try:
            if size_bytes < 0 or len(buffers) > IOV_LIMIT:
                self._send_many(buffers, 0)
            elif (sent := self._sock.sendmsg(buffers)) < size_bytes:
                self._send_many(buffers, sent)
        except OSError as error:
            raise self.lost(error) from error

    def lost(self, error: OSError) -> ConnectionLost:
        """Say what a send that failed with this error means."""
        if isinstance(error, BlockingIOError):
            return ConnectionLost(f"{self.name} took nothing that was sent for {self._send_s:g} s")
        return ConnectionLost(f"the connection to {self.name} ended while sending: {error}")

    def _send_many(self, buffers: Sequence[Buffer], sent: int) -> None:
        """Send all but the first `sent` bytes, as many buffers at a time as the kernel takes."""
        views = [v for v in (memoryview(b).cast("B") for b in buffers) if v.nbytes]
        until_s = time.monotonic() + self._send_s + sum([v.nbytes for v in views]) / SLOWEST_BYTES_S
        first = 0
        while True:
            while first < len(views) and sent >= views[first].nbytes:
                sent -= views[first].nbytes
                first += 1
            if first == len(views):
                return
            if self._send_s and time.monotonic() > until_s:
                raise ConnectionLost(f"{self.name} takes less than {SLOWEST_BYTES_S} bytes a second")
            views[first] = views[first][sent:]
            sent = self._sock.sendmsg(views[first : first + IOV_LIMIT])

    def recv_some(self, view: memoryview) -> int:
        """Receive as much of `view` as comes before the timeout; raise WaitTimeout if that is nothing."""
        try:
            count = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise WaitTimeout("nothing came in time") from error
        except OSError as error:
            raise ConnectionLost(f"the connection to {self.name} ended while receiving: {error}") from error
        if count == 0:
            raise ConnectionLost(f"{self.name} closed the connection")
        return count

    def look(self, view: memoryview) -> int:
        """Spin for a moment, without sleeping, and return how many bytes of `view` came; most lanes never spin."""
        return 0

    def recv_into(self, view: memoryview) -> None:
        """Fill `view`. A timeout before the first byte raises WaitTimeout, and nothing is lost by it."""
        if len(view) and (count := self.recv_some(view)) < len(view):
            self.recv_rest(view[count:])

    def recv_rest(self, view: memoryview) -> None:
        """Fill `view` with more of a frame that has begun: wait through timeouts, give up a peer that falls silent."""
        position, heard_s = 0, time.monotonic()
        while position < len(view):
            try:
                position += self.recv_some(view[position:])
                heard_s = time.monotonic()
            except WaitTimeout:
                self.check_silence(heard_s)

    def check_silence(self, since_s: float) -> None:
        """Raise ConnectionLost if the peer has been silent in the middle of a message for too long."""
        if time.monotonic() - since_s > REST_S:
            raise ConnectionLost(f"{self.name} fell silent in the middle of a message for {REST_S:.0f} s")

    def is_ended(self) -> bool:
        """Tell whether the other side has closed, as far as this side has heard."""
        try:
            return self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def kernel_bytes(self) -> tuple[int, int] | None:
        """Return (sent, received) as the system counted them on this connection; None where it does not."""
        return None

    def send_arenas(self, arenas: Sequence[Arena]) -> None:
        """Hand memory over to the other side, which must call recv_arenas."""
        raise ConnectionLost(f"the {self.lane} lane cannot share memory")

    def recv_arenas(self, sizes: Sequence[int], writable: Sequence[bool]) -> list[Arena]:
        raise ConnectionLost(f"the {self.lane} lane cannot share memory")

    def shutdown(self) -> None:
        """End the connection, so that threads blocked in reads and writes return."""
        with suppress(OSError):  # it was closed already
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shutdown()
        self._sock.close()

    def close_in_child(self) -> None:
        """Forget the descriptor in a forked child, without telling the other side. A DataLoader's children inherit our
        sockets; while they held them, the death of a worker would go unseen."""
        self._sock.close()
        self.write = None
        self._sock = _Inherited(self._owner)  # type: ignore[assignment]


class Listener(Protocol):
    """Accepts streams until it is closed."""

    def accept(self) -> Stream: ...

    def close(self) -> None: ...


class SocketListener:
    """A listening socket. It stays open through passing failures: too few descriptors, a client that gave up."""

    def __init__(self, sock: socket.socket, stream: Callable[[socket.socket], Stream]) -> None:
        self._sock = sock
        self._stream = stream
        self._is_closed = False
        forks.hold(self)

    def accept(self) -> Stream:
        """Wait for the next stream; raises ConnectionLost once the listener is closed."""
        while True:
            try:
                sock = self._sock.accept()[0]
            except OSError as error:
                if self._is_closed:
                    raise ConnectionLost(f"the listener was closed: {error}") from error
                time.sleep(ACCEPT_PAUSE_S)  # for a free descriptor there is no event to wait for
                continue
            try:
                return self._stream(sock)
            except (AuthenticationError, OSError):  # another user's process, or a client that is gone already
                sock.close()

    def close(self) -> None:
        """Free the address, and have a blocked accept return."""
        self._is_closed = True
        with suppress(OSError):  # not every system lets a listener be shut down; closing is what counts
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def close_in_child(self) -> None:
        """Forget the descriptor: a child that lives on must not keep the address."""
        self._sock.close()


class QueueListener:
    """A listener of a lane without sockets of ours: streams are put into a queue, and None when it is closed."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()

    def accept(self) -> Stream:
        """Wait for the next stream; raises ConnectionLost once the listener is closed."""
        stream = self._waiting.get()
        if stream is None:
            raise ConnectionLost("the listener was closed")
        return stream


class Lane(Protocol):
    """A way to carry bytes. Refuses to connect where this system, or this pair of hosts, does not have it."""

    name: ClassVar[str]

    @staticmethod
    def listen(address: str) -> Listener: ...

    @staticmethod
    def connect(address: str, timeout_s: float) -> Stream: ...


def split(address: str) -> tuple[str, int]:
    """Return the host and the port of an address.

    >>> split("localhost:2222")
    ('localhost', 2222)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def bound(address: str, backlog: int = 128) -> socket.socket:
    """Return a TCP socket that listens at an address; raises OSError when the port is taken."""
    host, port = split(address)
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock


def is_unknown_name(error: OSError) -> bool:
    """Tell whether an address was not found because its host's name does not resolve, or not yet."""
    return isinstance(error, socket.gaierror)


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    micros = int((seconds - whole) * 1e6)
    return struct.pack("ll", whole, micros if whole or micros or not seconds else 1)  # 0 means for ever
