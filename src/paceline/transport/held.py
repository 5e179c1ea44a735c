"""WHOSE port is it? Addresses that this process holds without listening, so that nobody else takes them by mistake.

Used by launchers/task for a worker, which nobody connects to, and by ingraph/server, which takes a free port or lets
go of a held one and listens there itself.
"""

import socket

from paceline.transport.base import split

_HELD: dict[str, socket.socket] = {}


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
    _HELD[address] = sock


def is_held(address: str) -> bool:
    return address in _HELD


def let_go(address: str) -> None:
    """So that this process can listen there."""
    sock = _HELD.pop(address, None)
    if sock is not None:
        sock.close()


def free_port(host: str) -> int:
    """A port of this host that nobody has now; whoever is to listen there does so at once."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
