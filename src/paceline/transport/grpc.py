"""The grpc lane: the same bytes as on tcp, in the messages of one bidirectional gRPC stream a connection.

Chosen only with --lane grpc, so that "the cost of gRPC" can be measured with only the carrier changed; `paceline[grpc]`
has what it needs. gRPC is imported when a task listens or connects.

There are no protobufs: messages are bytes, cut below gRPC's own limit of 4 MiB, as its documentation recommends for
large data. On each end one thread receives and one of gRPC's sends, through two pipes.
A forked child inherits gRPC's sockets and cannot close them: on this lane a worker that dies while a DataLoader's child
lives on is noticed by its lease.
"""

import errno
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, ClassVar

from paceline.errors import ConnectionLost, UsageError, WaitTimeout
from paceline.transport.base import SEND_S, Buffer, QueueListener, Stream, split

MISSING = "--lane grpc needs gRPC, which is not installed here: pip install 'paceline[grpc]'."
METHOD = "/paceline.Lane/Carry"
MESSAGE_BYTES = 1 << 20
PIPE_BYTES = 2 << 20  # buffered per direction; then a writer waits
MAX_STREAMS = 1024  # a thread each, while it lasts
END_S = 2.0  # for what was sent before the listener was closed
OPTIONS = (
    ("grpc.max_send_message_length", 2 * MESSAGE_BYTES),
    ("grpc.max_receive_message_length", 2 * MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own for each stream, as on tcp
    ("grpc.so_reuseport", 0),  # a port that is taken is refused
    ("grpc.enable_http_proxy", 0),
)


class Pipe:
    """A bounded buffer between two threads; what was put in before the end still comes out."""

    def __init__(self) -> None:
        self._parts: deque[memoryview] = deque()
        self._size = 0
        self._is_ended = False
        self._changed = threading.Condition()

    @property
    def is_over(self) -> bool:
        return self._is_ended and not self._parts

    def put(self, data: bytes, timeout_s: float | None) -> bool:
        """Put data in; return False if there was no room for so long, raise ConnectionLost after the end."""
        with self._changed:
            while self._size >= PIPE_BYTES and not self._is_ended:
                if not self._changed.wait(timeout_s):
                    return False
            if self._is_ended:
                raise ConnectionLost("the stream has ended")
            self._parts.append(memoryview(data))
            self._size += len(data)
            self._changed.notify_all()
            return True

    def take(self) -> bytes:
        """Take the next message out, as it was put in; empty after the end."""
        with self._changed:
            while not self._parts and not self._is_ended:
                self._changed.wait()
            if not self._parts:
                return b""
            part = self._parts.popleft()
            self._size -= part.nbytes
            self._changed.notify_all()
            return part.obj if isinstance(part.obj, bytes) else bytes(part)

    def take_into(self, view: memoryview, timeout_s: float | None) -> int:
        """Take out as much as is there, at least a byte; return 0 after the end, -1 when nothing came in time."""
        with self._changed:
            while not self._parts and not self._is_ended:
                if not self._changed.wait(timeout_s) and not self._parts and not self._is_ended:
                    return -1
            position = 0
            while self._parts and position < view.nbytes:
                part = self._parts[0]
                count = min(part.nbytes, view.nbytes - position)
                view[position : position + count] = part[:count]
                position += count
                if count == part.nbytes:
                    self._parts.popleft()
                else:
                    self._parts[0] = part[count:]
            self._size -= position
            self._changed.notify_all()
            return position

    def end(self) -> None:
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()


class GrpcStream(Stream):
    """One end of a stream; `outgoing` is what gRPC sends, `take_in` is given what it receives."""

    lane: ClassVar[str] = "grpc"

    def __init__(self) -> None:  # no socket of ours
        self._in, self._out = Pipe(), Pipe()
        self._recv_s: float | None = None
        self._send_s = SEND_S

    def outgoing(self) -> Iterator[bytes]:
        while data := self._out.take():
            yield data

    def take_in(self, messages: Iterable[bytes], on_end: Callable[[], None]) -> None:
        """Receive messages in a thread of its own, until either side has ended the stream."""

        def run() -> None:
            try:
                for message in messages:
                    self._in.put(message, None)
            except Exception:
                pass  # gRPC's word for a stream that broke, or ConnectionLost: this end was closed
            finally:
                self.shutdown()
                on_end()

        threading.Thread(target=run, name="grpc-in", daemon=True).start()

    def set_timeout(self, seconds: float) -> None:
        self._recv_s = seconds or None

    def set_send_timeout(self, seconds: float) -> None:
        self._send_s = seconds

    def send(self, buffers: Sequence[Buffer], size_bytes: int = -1) -> None:
        data = b"".join(buffers)  # a message must not change any more: here is the copy that gRPC costs
        pieces = (
            [data]
            if len(data) <= MESSAGE_BYTES
            else [data[start : start + MESSAGE_BYTES] for start in range(0, len(data), MESSAGE_BYTES)]
        )
        for piece in pieces if data else ():
            try:
                is_taken = self._out.put(piece, self._send_s or None)
            except ConnectionLost as error:
                raise ConnectionLost(f"the connection to {self.name} ended while sending: {error}") from None
            if not is_taken:
                raise ConnectionLost(f"{self.name} took nothing that was sent for {self._send_s:g} s")

    def recv_some(self, view: memoryview) -> int:
        count = self._in.take_into(view, self._recv_s)
        if count < 0:
            raise WaitTimeout("nothing came in time")
        if count == 0:
            raise ConnectionLost(f"{self.name} closed the connection")
        return count

    def is_ended(self) -> bool:
        return self._in.is_over

    def shutdown(self) -> None:
        self._in.end()
        self._out.end()

    def close(self) -> None:
        self.shutdown()

    def close_in_child(self) -> None:
        """Do nothing: the sockets are gRPC's, and a child cannot close them."""


class GrpcListener(QueueListener):
    def __init__(self, address: str) -> None:
        from concurrent.futures import ThreadPoolExecutor

        grpc = imported()
        super().__init__()
        self._threads = ThreadPoolExecutor(MAX_STREAMS, "grpc")
        self._server = grpc.server(self._threads, options=OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(self._carry)
        service, _, method = METHOD.strip("/").partition("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self._address = address
        check_free(address)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(errno.EADDRINUSE, str(error)) from error
        if port != split(address)[1]:
            raise OSError(errno.EADDRINUSE, f"gRPC cannot listen at {address}")
        self._server.start()

    def _carry(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Send until the stream has ended, in one of gRPC's threads."""
        stream = GrpcStream()
        if not context.add_callback(stream.shutdown):
            return  # it has ended already
        stream.take_in(requests, lambda: None)
        self._waiting.put(stream)
        yield from stream.outgoing()

    def close(self) -> None:
        """Accept no more streams and free the address; open ones have a moment for what was sent on them."""
        self._server.stop(END_S)
        self._threads.shutdown(wait=False)
        self._waiting.put(None)
        until_s = time.monotonic() + END_S
        while time.monotonic() < until_s:  # gRPC closes its socket in a thread of its own
            with suppress(OSError):
                check_free(self._address)
                return
            time.sleep(0.01)


class GrpcLane:
    name: ClassVar[str] = "grpc"

    @staticmethod
    def listen(address: str) -> GrpcListener:
        return GrpcListener(address)

    @staticmethod
    def connect(address: str, timeout_s: float) -> Stream:
        channel = imported().insecure_channel(address, options=OPTIONS)
        try:
            await_ready(channel, address, timeout_s)
            stream = GrpcStream()
            stream.take_in(channel.stream_stream(METHOD)(stream.outgoing()), channel.close)
        except BaseException:
            channel.close()
            raise
        return stream


def await_ready(channel: Any, address: str, timeout_s: float) -> None:
    """Wait for the connection, or raise ConnectionLost; unlike gRPC's own wait, do not go on trying."""
    states: queue.SimpleQueue[Any] = queue.SimpleQueue()
    hear, until_s = states.put, time.monotonic() + timeout_s
    channel.subscribe(hear, try_to_connect=True)
    state = None
    try:
        while state is None or state.name not in ("READY", "TRANSIENT_FAILURE", "SHUTDOWN"):
            state = states.get(timeout=max(0.0, until_s - time.monotonic()))
    except queue.Empty:
        raise ConnectionLost(f"no connection to {address} by gRPC within {timeout_s:g} s") from None
    finally:
        channel.unsubscribe(hear)
    if state.name != "READY":
        raise ConnectionLost(f"no connection to {address} by gRPC: nobody listens there, or not by gRPC")


def check_free(address: str) -> None:
    """Raise the OSError that says why the address cannot be used: gRPC says only that it cannot."""
    host, port = split(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def check_installed() -> None:
    """Refuse --lane grpc where it cannot be, before anything starts."""
    if find_spec("grpc") is None:
        raise UsageError(MISSING)


def imported() -> Any:
    """Return the gRPC module, or raise a UsageError that says how to install it."""
    try:
        import grpc
    except ImportError:
        raise UsageError(MISSING) from None
    return grpc
