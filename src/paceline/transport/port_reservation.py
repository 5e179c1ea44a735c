"""Reserve addresses: listen without accepting, so that no other process takes a port by mistake.

Used by launchers/task for a worker, to which no task connects, and by ingraph/server, which takes a free port or
releases a reserved one and listens there itself.
"""

from paceline.transport.base import SocketListener, Stream, bound

_RESERVED: dict[str, SocketListener] = {}


def reserve(address: str) -> None:
    """Reserve an address for this process; raises OSError when another one has it. Doing so twice changes nothing."""
    if address not in _RESERVED:
        _RESERVED[address] = SocketListener(bound(address, backlog=1), Stream)


def is_reserved(address: str) -> bool:
    """Tell whether this process has reserved an address."""
    return address in _RESERVED


def release(address: str) -> None:
    """Release an address, so that this process can listen there."""
    listener = _RESERVED.pop(address, None)
    if listener is not None:
        listener.close()


def free_port(host: str) -> int:
    """Return a port of this host that is free now; listen there at once."""
    with bound(f"{host}:0") as probe:
        port: int = probe.getsockname()[1]
        return port
