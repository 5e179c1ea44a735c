"""HOW does a contract test get the two ends of a lane? Every lane, by name, connected within this process."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from paceline.transport import LANES
from paceline.transport.base import Listener, Stream

TIMEOUT_S = 10.0


def free_address() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


def lanes() -> list[Any]:
    """Every lane, for `parametrize`; one whose extra is not installed is skipped, and says so."""
    lacks_grpc = pytest.mark.skipif(find_spec("grpc") is None, reason="no gRPC here: pip install 'paceline[grpc]'")
    return [pytest.param(name, marks=lacks_grpc if name == "grpc" else ()) for name in LANES]


@contextmanager
def listening(lane: str) -> Iterator[tuple[str, Listener]]:
    address = free_address()
    listener = LANES[lane].listen(address)
    try:
        yield address, listener
    finally:
        listener.close()


@contextmanager
def connected(lane: str) -> Iterator[tuple[Stream, Stream]]:
    """The client's and the server's end."""
    with listening(lane) as (address, listener):
        client = LANES[lane].connect(address, TIMEOUT_S)
        server = listener.accept()
        try:
            yield client, server
        finally:
            client.close()
            server.close()


class Running:
    """A call in a thread of its own; `result` waits for it and raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._value = call()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "still blocked"
        if self._error is not None:
            raise self._error
        return self._value


def received(stream: Stream, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    stream.recv_into(memoryview(data))
    return bytes(data)
