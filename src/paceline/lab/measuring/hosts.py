"""WHERE are the tasks of several hosts, on one machine? In network namespaces, joined by virtual cards.

Used by lab/scripts/hosts_script and tests/hosts; lab/measuring/whole_runs asks whether there can be any. A namespace
lives as long as a process in it, so nothing is left behind, however this one ends. Needs root, `ip`, `unshare` and
`nsenter`; must never touch the network of the machine itself.

Two hosts have a cable between them; three, or two that are to be cut off one by one, hang at a switch, which is a
namespace of its own.
"""

import functools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import ClusterError
from paceline.lab.measuring.processes import Failed, Process, output_of

TOOLS = ("ip", "unshare", "nsenter")
OUTER = "outer"  # the name of a host's card towards the others
SWITCH = "switch"
READY_S = 10.0
HOLDER = ("unshare", "--net", "sh", "-c", "echo {}; exec cat")  # ends when its stdin does
BURST_S = 0.01  # of a limited link: what may pass at once after silence
LEAST_BURST_BYTES = 16_000
QUEUE_MS = 50
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class Host:
    """One of them: what a command needs in front to run there, and the address at which others reach it."""

    def __init__(self, pid: int, address: str) -> None:
        self.pid = pid  # a process that is there
        self.address = address
        self.enter = ("nsenter", f"--net=/proc/{pid}/ns/net")
        self._far: tuple[Host, str] | None = None  # where its cable ends: whose card, and which

    def plug(self, other: "Host", card: str) -> None:
        """A new cable, from its card to one of another's."""
        there(self, f"ip link add {OUTER} type veth peer name {card} netns {other.pid}")
        self.use(other, card)

    def use(self, other: "Host", card: str = OUTER) -> None:
        """The cable that lies there."""
        there(self, f"ip addr add {self.address}/24 dev {OUTER}")
        there(self, f"ip link set {OUTER} up")
        self._far = (other, card)

    def limit(self, rate: str) -> None:
        """Let no more than this pass its cable, in either direction: 10mbit."""
        other, card = self._cable()
        shape = f"root tbf rate {rate} burst {burst_bytes(rate)} latency {QUEUE_MS}ms"
        there(self, f"tc qdisc replace dev {OUTER} {shape}")
        there(other, f"tc qdisc replace dev {card} {shape}")

    def cut(self) -> None:
        """Pull its cable at the other end: from now on what is sent here vanishes, without an error."""
        other, card = self._cable()
        there(other, f"ip link set {card} down")

    def mend(self) -> None:
        other, card = self._cable()
        there(other, f"ip link set {card} up")

    def _cable(self) -> "tuple[Host, str]":
        assert self._far is not None, "this host has no cable"
        return self._far


@contextmanager
def hosts(count: int, is_switched: bool = False) -> Iterator[list[Host]]:
    """One host, alone with its loopback, or several that reach each other; Failed where they cannot be had."""
    addresses = ["127.0.0.1"] if count == 1 else [f"10.77.0.{number}" for number in range(1, count + 1)]
    has_switch = is_switched or count > 2
    holders: list[Process] = []
    with tempfile.TemporaryDirectory(prefix="paceline-hosts-") as folder:
        try:
            for number in range(count + has_switch):
                log = Path(folder) / f"{number}.log"
                holders.append(Process(f"host {number}", HOLDER, os.environ, log, speaks=True))
            for holder in holders:
                holder.reply(time.monotonic() + READY_S)
            made = [Host(holder.pid, address) for holder, address in zip(holders, addresses, strict=False)]
            _connect(made, Host(holders[-1].pid, "") if has_switch else None)
            yield made
        except OSError as error:
            raise Failed(f"a network namespace cannot be made: {error}") from error
        finally:
            for holder in holders:
                holder.kill()


def _connect(made: Sequence[Host], switch: Host | None) -> None:
    for host in made:
        there(host, "ip link set lo up")
    if switch is not None:
        there(switch, f"ip link add {SWITCH} type bridge")
        there(switch, f"ip link set {SWITCH} up")
        for number, host in enumerate(made):
            host.plug(switch, f"port{number}")
            there(switch, f"ip link set port{number} master {SWITCH} up")
    elif len(made) == 2:
        first, second = made
        first.plug(second, OUTER)
        second.use(first)


def burst_bytes(rate: str) -> int:
    """How much tc's tbf lets pass at once.

    >>> burst_bytes("10mbit"), burst_bytes("1gbit")
    (16000, 1250000)
    """
    found = re.fullmatch(r"([\d.]+)([kmg]bit)", rate)
    assert found, f"{rate} is no rate such as 10mbit"
    return max(LEAST_BURST_BYTES, int(float(found[1]) * UNITS[found[2]] / 8 * BURST_S))


def there(host: Host, command: str) -> None:
    """Run a short command in a host; Failed when it fails."""
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
