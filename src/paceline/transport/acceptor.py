"""Accept connections: listen on lanes, limit the clients that are not authenticated yet, run one thread per client.

Used by server/service and ingraph/server. What is said on a connection is left to `serve`, which is called with an
authenticated channel.
"""

import threading
import time
from collections.abc import Callable, Sequence

from paceline.errors import AuthenticationError, ConnectionLost
from paceline.transport import LANES
from paceline.transport.base import Listener, Stream
from paceline.transport.channel import Channel, accept

MAX_HALF_OPEN = 64  # connections that are not authenticated yet
OWN_HALF_OPEN = 16  # of them on lanes that only this host reaches: strangers on tcp cannot take those places
OWN_HOST = ("shm", "inproc")


class Acceptor:
    """The listeners of one task. `serve` runs in the connection's own thread; when it returns, the connection ends."""

    def __init__(self, secret: bytes, serve: Callable[[Channel], None]) -> None:
        self._secret = secret
        self._serve = serve
        self._listeners: list[Listener] = []
        self._streams: set[Stream] = set()
        self._threads: set[threading.Thread] = set()
        self._starting = threading.Lock()
        self._is_shut = False

    def listen(self, address: str, lanes: Sequence[str]) -> None:
        """Accept connections on these lanes; raises OSError when the port is taken."""
        self._is_shut = False
        for name in lanes:
            listener = LANES[name].listen(address)
            self._listeners.append(listener)
            room = OWN_HALF_OPEN if name in OWN_HOST else MAX_HALF_OPEN - OWN_HALF_OPEN
            self.start(f"accept-{name}", self._accept, listener, threading.BoundedSemaphore(room))

    def start(self, name: str, target: Callable[..., None], *args: object) -> None:
        """Start a thread that wait() joins: a thread that frees tensors while Python ends would abort the process."""
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        with self._starting:  # wait() sees only threads that run, or have
            self._threads = {each for each in self._threads if each.is_alive()}
            thread.start()
            self._threads.add(thread)

    def shut(self) -> None:
        """Close the listeners and end every connection, so that their threads return."""
        self._is_shut = True
        for listener in self._listeners:
            listener.close()
        for stream in list(self._streams):
            stream.shutdown()

    def wait(self, limit_s: float) -> None:
        """Join the threads, after shut()."""
        deadline = time.monotonic() + limit_s
        with self._starting:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self, listener: Listener, half_open: threading.BoundedSemaphore) -> None:
        while True:
            try:
                stream = listener.accept()
            except ConnectionLost:
                return
            if not half_open.acquire(blocking=False):
                stream.close()  # too many strangers at once; a task of this run tries again
                continue
            try:
                self.start("connection", self._greet, stream, half_open)
            except RuntimeError:  # no room for one more thread: turn this client away and go on
                half_open.release()
                stream.close()

    def _greet(self, stream: Stream, half_open: threading.BoundedSemaphore) -> None:
        self._streams.add(stream)
        try:
            try:
                channel = accept(stream, self._secret)
            finally:
                half_open.release()
            if not self._is_shut:  # else it was accepted during shut(), which has not ended it
                self._serve(channel)
        except (AuthenticationError, ConnectionLost):
            pass  # a stranger, or a task that gave up: it was told, and nothing of it is kept
        finally:
            self._streams.discard(stream)
            stream.close()
