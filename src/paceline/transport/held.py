"""WHOSE port is it? Addresses that this process holds without listening, so that nobody else takes them by mistake.

Used by launchers/task for a worker, which nobody connects to, and by ingraph/server, which takes a free port or lets
go of a held one and listens there itself.
"""

import socket

from paceline import forks
from paceline.transport.base import split


class _Port:
    """One address; a forked child does not hold it, so that it is free once this process has ended."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        forks.hold(self)

    def close(self) -> None:
        self._sock.close()

    def close_in_child(self) -> None:
        self._sock.close()


_HELD: dict[str, _Port] = {}


def hold(address: str) -> None:
    """Hold it from now on; OSError when somebody else has it. Nothing happens when this process holds it already."""
    if address in _HELD:
        return
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(split(address))
        sock.listen(1)
    except OSError:
        sock.close()
        raise
    _HELD[address] = _Port(sock)


def is_held(address: str) -> bool:
    return address in _HELD


def let_go(address: str) -> None:
    """So that this process can listen there."""
    port = _HELD.pop(address, None)
    if port is not None:
        port.close()


def free_port(host: str) -> int:
    """A port of this host that nobody has now; whoever is to listen there does so at once."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
