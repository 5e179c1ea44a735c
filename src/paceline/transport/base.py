"""HOW are bytes carried? What a lane must offer; everything above it sees only this.

A lane listens and connects; a stream moves bytes in order and, where memory can be shared, hands arenas over.
A new lane passes tests/contract/test_lane_contract.py and never decides anything about training.
"""

import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from paceline import forks
from paceline.errors import ConnectionLost, WaitTimeout
from paceline.params.arena import Arena

Buffer = bytes | bytearray | memoryview
IOV_LIMIT = 512  # buffers a single sendmsg takes
SEND_S = 30.0  # for which nothing at all may be taken by the other side before it is given up
SLOWEST_BYTES_S = 1 << 16  # and on the whole it must take so much a second
REST_S = 30.0  # silence in the middle of a frame


class Rest:
    """The first bytes of a frame are here, so the rest is on the way; whoever then falls silent is given up."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._since_s = time.monotonic()

    def came(self) -> None:
        self._since_s = time.monotonic()

    def check(self) -> None:
        if time.monotonic() - self._since_s > REST_S:
            raise ConnectionLost(f"{self._name} fell silent in the middle of a message for {REST_S:.0f} s")


class _Inherited:
    """Stands in a forked child for a socket of its parent."""

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
    name: str = "the other side"  # for messages; whoever connects knows better
    look_s: float = 0.0  # so long a frame is looked for before we sleep; only for whoever has a core to spare

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send_s = 0.0
        self.set_send_timeout(SEND_S)
        self._owner = forks.Owner()
        forks.hold(self)

    def set_timeout(self, seconds: float) -> None:
        """Let reads give up after this long (0: never). The kernel's timeout costs no extra system call."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))

    def set_send_timeout(self, seconds: float) -> None:
        """Give one up that takes nothing for so long, or too little on the whole (0: never)."""
        self._send_s = seconds
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(seconds))

    def send(self, buffers: Sequence[Buffer], size_bytes: int = -1) -> None:
        """Everything in `buffers`, in order. Who knows their size together spares us to look when all goes at once."""
        try:
            if size_bytes < 0 or len(buffers) > IOV_LIMIT:
                self._send_many(buffers, 0)
            elif (sent := self._sock.sendmsg(buffers)) < size_bytes:
                self._send_many(buffers, sent)
        except BlockingIOError as error:
            raise ConnectionLost(f"{self.name} took nothing that was sent for {self._send_s:g} s") from error
        except OSError as error:
            raise ConnectionLost(f"the connection to {self.name} ended while sending: {error}") from error

    def _send_many(self, buffers: Sequence[Buffer], sent: int) -> None:
        """All of them but the first `sent` bytes, as many at a time as the kernel takes."""
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
        """As much of `view` as comes before the timeout; at least a byte, or WaitTimeout."""
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
        """How many bytes of `view` came in a moment, without sleeping; a lane that is not worth it never looks."""
        return 0

    def recv_into(self, view: memoryview) -> None:
        """Fill `view`. A timeout before the first byte raises WaitTimeout, and nothing is lost by it."""
        position = self.recv_some(view) if len(view) else 0
        if position == len(view):
            return
        rest = Rest(self.name)
        while position < len(view):
            try:
                position += self.recv_some(view[position:])
                rest.came()
            except WaitTimeout:
                rest.check()

    def is_ended(self) -> bool:
        """Whether the other side has closed, as far as this side has heard; for a connection that lay idle."""
        try:
            return self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def kernel_bytes(self) -> tuple[int, int] | None:
        """What the system itself counted on this connection, (sent, received); None where it does not say."""
        return None

    def send_arenas(self, arenas: Sequence[Arena]) -> None:
        raise ConnectionLost(f"the {self.lane} lane cannot share memory")

    def recv_arenas(self, sizes: Sequence[int], writable: Sequence[bool]) -> list[Arena]:
        raise ConnectionLost(f"the {self.lane} lane cannot share memory")

    def shutdown(self) -> None:
        """Wake whoever reads or writes here."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was closed already, which is what we wanted

    def close(self) -> None:
        self.shutdown()
        self._sock.close()

    def close_in_child(self) -> None:
        """Forget the descriptor in a forked child, without telling the other side. A DataLoader's children inherit our
        sockets; while they held them, the death of a worker would go unseen."""
        self._sock.close()
        self._sock = _Inherited(self._owner)  # type: ignore[assignment]


class Listener(Protocol):
    """Accepts streams until it is closed."""

    def accept(self) -> Stream: ...

    def close(self) -> None: ...


class Lane(Protocol):
    """A way to carry bytes. What this system, or this pair of hosts, does not have refuses to connect."""

    name: ClassVar[str]

    @staticmethod
    def listen(address: str) -> Listener: ...

    @staticmethod
    def connect(address: str, timeout_s: float) -> Stream: ...


def split(address: str) -> tuple[str, int]:
    """
    >>> split("localhost:2222")
    ('localhost', 2222)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_unknown_name(error: OSError) -> bool:
    """Whether an address was not found because nobody knows its host's name, or not yet."""
    return isinstance(error, socket.gaierror)


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    micros = int((seconds - whole) * 1e6)
    return struct.pack("ll", whole, micros if whole or micros or not seconds else 1)  # 0 means for ever
