"""WHERE does a task listen? At its own address, or at every interface where that address is not this host's.

Called by launchers/serving for a ps and by ingraph/server for a task that serves ops; `open_doors` is theirs. Must
never listen where strangers can knock without a secret, unless that was asked for.
"""

import errno
from collections.abc import Callable, Sequence

from paceline.cluster import moved
from paceline.cluster.discovery import Assignment
from paceline.cluster.secret import check_address
from paceline.errors import UsageError
from paceline.params.arena import has_shared_memory
from paceline.transport.base import split
from paceline.transport.security import keys_dir_of
from paceline.transport.tls import check_keys

EVERYWHERE = "0.0.0.0"


def listen(
    assignment: Assignment, open_doors: Callable[[str, Sequence[str]], None], lane: str, say: Callable[[str], None]
) -> str:
    """Open the doors of this task, and say at which address; one sentence when it cannot be."""
    task, settings = assignment.task, assignment.settings
    own = assignment.cluster.address(task)
    address = assignment.at or moved.address(settings.run_dir, task, own)
    is_moved = address not in (own, assignment.at)  # earlier, by somebody else
    host, port = split(address)
    secret, is_insecure = assignment.secret, settings.insecure
    check_address(secret, host, is_insecure)
    if (keys_dir := keys_dir_of(secret)) is not None:
        check_keys(keys_dir)
    try:
        open_doors(address, lanes(lane))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            told = f"Port {port} of {task} ({address}) is in use{by_whom(port)}; end what listens there."
            raise UsageError(told) from error
        if error.errno != errno.EADDRNOTAVAIL:
            raise UsageError(f"{task} cannot listen at {address}: {error.strerror or error}.") from error
        if is_moved:
            told = f"{task} of this run has moved to {address}, which is no address of this host"
            raise UsageError(f"{told}; `--at HOST:PORT` moves it here.") from error
        check_address(secret, EVERYWHERE, is_insecure)
        open_doors(
            f"{EVERYWHERE}:{port}", [name for name in lanes(lane) if name != "shm"]
        )  # behind NAT or in a container; the secret counts as ever
        say(f"{address} is no address of this host: listening at {EVERYWHERE}:{port}")
    return address


def lanes(lane: str) -> list[str]:
    """The doors for `--lane`. Shared memory comes first: a task that finds tcp alone open would stay on it.

    On grpc it is for those of this host who take any lane: whoever controls a run.

    >>> lanes("tcp"), lanes("inproc")
    (['tcp'], ['inproc'])
    """
    wanted = {"auto": ["shm", "tcp"], "shm": ["shm", "tcp"], "grpc": ["shm", "grpc"]}.get(lane, [lane])
    return [name for name in wanted if name != "shm" or has_shared_memory()]


def by_whom(port: int) -> str:
    """The process that listens at a port, where the system lets us see it."""
    import psutil

    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return ""


def is_listened(address: str) -> bool:
    """Whether a process listens at this port here, as far as the system lets us see it; nobody is connected to."""
    import psutil

    port = split(address)[1]
    try:
        return any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            for connection in psutil.net_connections(kind="tcp")
            if connection.laddr
        )
    except psutil.Error:
        return False
