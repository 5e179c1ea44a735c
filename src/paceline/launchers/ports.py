"""WHERE may tasks listen? Free addresses of this host, held for tasks to come, and whether given ones are free here.

Called by launchers/local before anything starts, and on other hosts by hosts/agent. Must never listen or
connect: it only binds, and lets go.
"""

import errno
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress

from paceline.cluster.listening import by_whom
from paceline.cluster.spec import split_address
from paceline.errors import UsageError

LOOPBACK = "127.0.0.1"


class Reserved:
    """Free ports, held so that nobody else gets them.

    On Linux they are held for the whole run: SO_REUSEADDR, which our listeners and gRPC's set too, lets a task listen
    at a port that we have only bound. Elsewhere that is refused, so before_start() lets go.
    """

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def addresses(self, count: int) -> list[str]:
        """Return so many free loopback addresses, different from all returned before."""
        found = []
        for _ in range(count):
            holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((LOOPBACK, 0))
            self._sockets.append(holder)
            found.append(f"{LOOPBACK}:{holder.getsockname()[1]}")
        return found

    def hold(self, ports: Iterable[int]) -> None:
        """Hold these ports at every interface of this host; UsageError when somebody has one."""
        for port in ports:
            try:
                self._bind_anywhere(port)
            except OSError as error:
                raise UsageError(f"Port {port} cannot be had ({error.strerror}){by_whom(port)}; start again.") from None

    def anywhere(self, count: int, between: tuple[int, int] | None = None) -> list[int]:
        """Return so many ports that are free at every interface of this host; fewer, where `between` has no more."""
        if between is None:
            return [self._bind_anywhere(0) for _ in range(count)]
        held = {holder.getsockname()[1] for holder in self._sockets}  # a second socket of ours would be let in
        found: list[int] = []
        for port in range(between[0], between[1] + 1):
            if len(found) < count and port not in held:
                with suppress(OSError):
                    found.append(self._bind_anywhere(port))
        return found

    def _bind_anywhere(self, port: int) -> int:
        holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._sockets.append(holder)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", port))
        return int(holder.getsockname()[1])

    def before_start(self) -> None:
        """Make way for the tasks that will listen, where holding on would stop them."""
        if sys.platform != "linux":
            self.release()

    def release(self) -> None:
        """Let go of all ports."""
        while self._sockets:
            self._sockets.pop().close()

    def __enter__(self) -> "Reserved":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def check_free(addresses: Iterable[str]) -> None:
    """Refuse an address that is not of this host, or that somebody listens at."""
    for address in addresses:
        host, port = split_address(address)
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UsageError(f"The host of {address} is not known: {error.strerror}.") from None
        family, kind, _, _, target = infos[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ends of old connections do not count
            try:
                probe.bind(target)
            except OSError as error:
                raise UsageError(_refusal(address, port, error)) from None


def _refusal(address: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} of {address} is in use{by_whom(port)}; choose another, or end what listens there."
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{address} is not an address of this host; `paceline run` starts tasks here only, "
            "start that one there with `paceline serve`."
        )
    return f"No task can listen at {address}: {error.strerror}."
