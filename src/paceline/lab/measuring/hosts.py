"""WHERE are the tasks of several hosts, on one machine? In network namespaces, two of them joined by virtual cards.

Used by lab/scripts/hosts_script; lab/measuring/whole_runs asks whether there can be any. A namespace lives as long as
a process in it, so nothing is left behind, however this one ends. Needs root, `ip`, `unshare` and `nsenter`; must
never touch the network of the machine itself.
"""

import functools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import ClusterError
from paceline.lab.measuring.processes import Failed, Process, output_of

TOOLS = ("ip", "unshare", "nsenter")
OUTER = "outer"  # the name of a host's card towards the other one
READY_S = 10.0
HOLDER = ("unshare", "--net", "sh", "-c", "echo {}; exec cat")  # ends when its stdin does


class Host:
    """One of them: what a command needs in front to run there, and the address at which others reach it."""

    def __init__(self, pid: int, address: str) -> None:
        self.pid = pid  # a process that is there
        self.address = address
        self.enter = ("nsenter", f"--net=/proc/{pid}/ns/net")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """One host, alone with its loopback, or two with a cable between them; Failed where they cannot be had."""
    assert count in (1, 2), count
    holders: list[Process] = []
    with tempfile.TemporaryDirectory(prefix="paceline-hosts-") as folder:
        try:
            for number in range(count):
                log = Path(folder) / f"{number}.log"
                holders.append(Process(f"host {number}", HOLDER, os.environ, log, speaks=True))
            for holder in holders:
                holder.reply(time.monotonic() + READY_S)
            addresses = ["127.0.0.1"] if count == 1 else ["10.77.0.1", "10.77.0.2"]
            made = [Host(holder.pid, address) for holder, address in zip(holders, addresses, strict=True)]
            _connect(made)
            yield made
        except OSError as error:
            raise Failed(f"a network namespace cannot be made: {error}") from error
        finally:
            for holder in holders:
                holder.kill()


def _connect(made: Sequence[Host]) -> None:
    for host in made:
        _there(host, "ip link set lo up")
    if len(made) == 1:
        return
    first, second = made
    _there(first, f"ip link add {OUTER} type veth peer name {OUTER} netns {second.pid}")
    for host in made:
        _there(host, f"ip addr add {host.address}/24 dev {OUTER}")
        _there(host, f"ip link set {OUTER} up")


def _there(host: Host, command: str) -> None:
    if output_of([*host.enter, *command.split()]) is None:
        raise Failed(f"`{command}` failed in a network namespace")


@functools.cache
def lacking() -> str:
    """Why there can be no two hosts here; nothing when there can.  Tried once, for a right may be missing to root."""
    if os.getuid() != 0:
        return "they need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} cannot be found"
    try:
        with hosts(2):
            return ""
    except ClusterError as error:
        return f"they cannot be made here: {error}"
