"""HOW FAST is the way between two hosts? Round trips and bytes a second, over a plain socket, in half a second.

Called by hosts/probe on both hosts, and by `paceline doctor` on loopback. A sink listens for a few seconds and
talks only to those who know its token. Must never send anything but zeros, nor keep what it receives.

    1. the one that measures connects and says token, verb, seconds
    2. PING: it sends single bytes, which come back     SEND: it sends zeros     TAKE: the sink sends zeros
    3. whoever receives counts for so many seconds from the first byte on, longer on a slow link; in SEND the sink says
       what it counted
"""

import hmac
import math
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec

TOKEN_BYTES = 16
HELLO = struct.Struct("<16sBd")
RATE = struct.Struct("<d")
PING, SEND, TAKE = 1, 2, 3
CHUNK = bytes(1 << 18)
PINGS = 15
WARMING = 0.2  # of the time is not counted: connections begin slowly
CONNECT_S = 3.0
LONGEST_S = 2.0
LONGER = 4.0  # so many times the time, where few bytes came
ENOUGH_BYTES = 1 << 20
BUFFER_BYTES = 1 << 20  # on a slow link more would take seconds to drain


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The way from one host to another: there and back."""

    latency_ms: float  # of a round trip
    sent_bytes_per_s: float
    received_bytes_per_s: float

    @property
    def bytes_per_s(self) -> float:
        """Of the slower direction."""
        return min(self.sent_bytes_per_s, self.received_bytes_per_s)

    @property
    def reversed(self) -> "Link":
        """The same, as the other host sees it."""
        return Link(
            latency_ms=self.latency_ms,
            sent_bytes_per_s=self.received_bytes_per_s,
            received_bytes_per_s=self.sent_bytes_per_s,
        )


class Sink:
    """The side that is measured, in threads of its own until it is closed."""

    def __init__(self, token: bytes, ports: Iterable[int] | None = None) -> None:
        self._token = token
        self._listener = bound(ports)
        self._listener.listen(8)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """No more of it; closing alone would let one in who comes while the thread waits."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(CONNECT_S)
                token, verb, seconds = HELLO.unpack(_exactly(connection, HELLO.size))
                if not hmac.compare_digest(token, self._token) or not 0 < seconds <= LONGEST_S:
                    return
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if verb == PING:
                    while byte := connection.recv(1):
                        connection.sendall(byte)
                elif verb == SEND:
                    connection.sendall(RATE.pack(_counted(connection, seconds)))
                elif verb == TAKE:
                    _pour(connection, seconds)
            except OSError:
                return  # the one that measured has what it wanted


def bound(ports: Iterable[int] | None = None) -> socket.socket:
    """A socket at a free port of every interface, of these ports if some are given; OSError where none is free."""
    for port in (0,) if ports is None else ports:
        made = _unbound()
        try:
            made.bind(("", port))
        except OSError:
            made.close()
            continue
        return made
    raise OSError("no port is free")


def _unbound() -> socket.socket:
    if socket.has_dualstack_ipv6():
        made = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if hasattr(socket, "SO_REUSEADDR"):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def measure(host: str, port: int, token: bytes, seconds: float = 0.3) -> Link:
    """The way to a sink; OSError where there is none, ConnectionAbortedError where somebody else listens. A way on
    which single bytes come through, and no more, has the speed 0."""
    latency_s = _asked(host, port, (token, PING, seconds), _round_trip)
    sent = received = 0.0
    with suppress(OSError):
        sent = _asked(host, port, (token, SEND, seconds), lambda there: _sent(there, seconds))
        received = _asked(host, port, (token, TAKE, seconds), lambda there: _counted(there, seconds))
    return Link(latency_ms=latency_s * 1e3, sent_bytes_per_s=sent, received_bytes_per_s=received)


def loopback(seconds: float = 0.3) -> Link:
    """The way from this machine to itself."""
    token = bytes(TOKEN_BYTES)
    sink = Sink(token)
    try:
        return measure("127.0.0.1", sink.port, token, seconds)
    finally:
        sink.close()


def resolved(host: str) -> str:
    """The address that a name has on this machine; "" where it is not known."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def own_address(host: str) -> str:
    """The address of this machine from which it reaches another; nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def _asked(host: str, port: int, hello: tuple[bytes, int, float], then: Callable[[socket.socket], float]) -> float:
    with socket.create_connection((host, port), timeout=CONNECT_S) as there:
        there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # what is left is of no use
        there.sendall(HELLO.pack(*hello))
        return then(there)


def _round_trip(there: socket.socket) -> float:
    took = []
    for _ in range(PINGS):
        begun_s = time.perf_counter()
        there.sendall(b"x")
        _exactly(there, 1)
        took.append(time.perf_counter() - begun_s)
    return statistics.median(took)


def _sent(there: socket.socket, seconds: float) -> float:
    _pour(there, seconds)
    there.settimeout(CONNECT_S)
    rate: float = RATE.unpack(_exactly(there, RATE.size))[0]
    return rate


def _pour(there: socket.socket, seconds: float) -> None:
    """Zeros until the other side says something, or goes, or has had all the time that it may take."""
    until_s = time.perf_counter() + LONGER * seconds + CONNECT_S
    there.setblocking(False)
    while (left_s := until_s - time.perf_counter()) > 0:
        said, is_room, _ = select.select([there], [there], [], left_s)
        if said:
            return
        if is_room:
            there.send(CHUNK)


def _counted(there: socket.socket, seconds: float) -> float:
    """Bytes a second, from a while after the first byte on; longer on a slow link, to see more than a burst."""
    into = bytearray(len(CHUNK))
    there.settimeout(seconds + CONNECT_S)
    if not there.recv_into(into):
        raise ConnectionAbortedError
    begun_s = now_s = time.perf_counter()
    counted_from_s, count = math.inf, 0
    while (left_s := begun_s + (seconds if count >= ENOUGH_BYTES else LONGER * seconds) - now_s) > 0:
        there.settimeout(left_s)
        try:
            size = there.recv_into(into)
        except TimeoutError:
            break
        if not size:
            break
        now_s = time.perf_counter()
        if counted_from_s < math.inf:
            count += size
        elif now_s - begun_s >= WARMING * seconds:
            counted_from_s = now_s
    return count / (now_s - counted_from_s) if count and now_s > counted_from_s else 0.0


def _exactly(there: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = there.recv(size - len(found))
        if not part:
            raise ConnectionAbortedError("it closed the connection")
        found += part
    return found
