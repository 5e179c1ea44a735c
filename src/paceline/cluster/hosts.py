"""WHICH machines take part, and which task is on which? Hosts with their slots, and the placing of tasks on them.

Made by cluster/host_files from `--hosts`, a hostfile or a cluster.toml; read by whoever starts tasks there. Pure.
Must never look up a host, nor connect to one.
"""

import ipaddress
import re
from collections.abc import Sequence

import msgspec

from paceline.cluster.spec import Task
from paceline.errors import UsageError

ROLES = ("ps", "worker")
HERE = ("localhost", "127.0.0.1", "::1")  # this machine: commands run without ssh
MAX_SLOTS = 1024  # beyond it, a port was meant

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\\-]*")
_HINT = "write it as host, host:slots, user@host:slots or [v6]:slots"


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """One machine of the cluster.

    >>> host = Host(name="server1", target="me@server1", slots=2)
    >>> host.has("ps"), host.is_here
    (True, False)
    """

    name: str  # what people see; no two hosts share it
    target: str  # what ssh takes
    address: str = ""  # where tasks of other hosts reach it; "": what ssh knows as its host name
    python: str = ""  # "": the path of this one, or python3 where that is not there
    folder: str = ""  # where tasks start; "": whoever starts them says
    slots: int = 1  # each holds one worker
    gpus: int | None = None  # None: all that are there
    ports: tuple[int, int] | None = None  # first and last that tasks may listen at; None: any free one
    roles: tuple[str, ...] = ROLES

    def has(self, role: str) -> bool:
        """Whether tasks of this job may be here."""
        return role in self.roles

    @property
    def is_here(self) -> bool:
        """Whether this is the machine that asks: nobody needs ssh to reach it."""
        return self.target in HERE


def parse(text: str) -> Host:
    """One host, as `--hosts` and hostfiles write it; without a number it has one slot.

    >>> [(host.target, host.slots) for host in map(parse, ("server1:2", "me@10.0.0.2", "[fe80::1]:4"))]
    [('server1', 2), ('me@10.0.0.2', 1), ('fe80::1', 4)]
    """
    user, at, rest = text.rpartition("@")
    if rest.startswith("["):
        name, bracket, number = rest[1:].partition("]")
        is_right = bool(bracket) and is_v6(name) and (not number or number.startswith(":"))
        colon, number = number[:1], number[1:]
    else:
        name, colon, number = rest.partition(":")
        is_right = is_name(name)
        if is_v6(rest):
            raise UsageError(f"{text!r} is an IPv6 address, whose colons would be taken for slots; write [{rest}]:1.")
    if not is_right or (at and not _USER.fullmatch(user)):
        raise UsageError(f"{text!r} is no host; {_HINT}.")
    slots = slots_of(number, text) if colon else 1
    return Host(name=name, target=f"{user}{at}{name}", slots=slots)


def slots_of(number: str, text: str) -> int:
    """The slots that a text gives; 0 is a host without workers.

    >>> slots_of("4", "server1:4")
    4
    """
    if not re.fullmatch(r"[0-9]{1,9}", number):
        raise UsageError(f"{text!r} has {number!r} slots; slots are a number, such as 2: {_HINT}.")
    if int(number) > MAX_SLOTS:
        raise UsageError(
            f"{text!r} has {number} slots; a host has at most {MAX_SLOTS}. If that is the port of ssh, it belongs into "
            "~/.ssh/config (Port)."
        )
    return int(number)


def merged(hosts: Sequence[Host]) -> list[Host]:
    """A host that is named again has the slots of all its lines, as Open MPI has it.

    >>> [(host.name, host.slots) for host in merged([parse("a"), parse("b:2"), parse("a")])]
    [('a', 2), ('b', 2)]
    """
    found: dict[str, Host] = {}
    for host in hosts:
        first = found.get(host.name)
        if first is None:
            found[host.name] = host
        elif first.target == host.target:
            found[host.name] = msgspec.structs.replace(first, slots=first.slots + host.slots)
        else:
            raise UsageError(
                f"Host {host.name} is named as {first.target} and as {host.target}; name it with one user only."
            )
    return list(found.values())


def num_workers(hosts: Sequence[Host]) -> int:
    """How many workers there are where nobody says: one a slot.

    >>> num_workers([parse("a:2"), parse("b")])
    3
    """
    return sum(host.slots for host in hosts if host.has("worker"))


def placed(hosts: Sequence[Host], num_ps: int, workers: int | None = None) -> dict[Task, Host]:
    """Where every task goes: the ps in turn over the hosts that may hold one, workers slot by slot in the order given.

    >>> found = placed([parse("a:2"), parse("b:1")], num_ps=2)
    >>> {str(task): host.name for task, host in found.items()}
    {'ps:0': 'a', 'ps:1': 'b', 'worker:0': 'a', 'worker:1': 'a', 'worker:2': 'b'}
    """
    seats = [host for host in hosts if host.has("worker") for _ in range(host.slots)]
    holders = [host for host in hosts if host.has("ps")]
    if not hosts:
        raise UsageError("No hosts are named; give --hosts server1:2,server2:1, --hostfile or --cluster.")
    if num_ps < 1 or (workers is not None and workers < 1):
        raise UsageError(f"{num_ps} ps and {workers} workers are no cluster; it needs at least 1 of each.")
    if not holders:
        raise UsageError(f'No host may hold a ps; give one of {_names(hosts)} roles = ["ps", "worker"].')
    if not seats:
        raise UsageError(f"No host has a slot for a worker; give one of {_names(hosts)} a slot (host:1).")
    wanted = len(seats) if workers is None else workers
    if wanted > len(seats):
        has = ", ".join(f"{host.name} {host.slots}" for host in hosts if host.has("worker"))
        raise UsageError(
            f"{wanted} workers do not fit: the hosts have {len(seats)} slot{'' if len(seats) == 1 else 's'} ({has}); "
            f"take --workers {len(seats)} or fewer, or give a host more slots."
        )
    ps = {Task("ps", index): holders[index % len(holders)] for index in range(num_ps)}
    return ps | {Task("worker", index): seats[index] for index in range(wanted)}


def tasks_on(placed: dict[Task, Host], host: Host) -> list[Task]:
    """The tasks of one host, the ps first.

    >>> hosts = [parse("a:2"), parse("b:1")]
    >>> [str(task) for task in tasks_on(placed(hosts, 1), hosts[0])]
    ['ps:0', 'worker:0', 'worker:1']
    """
    return [task for task, where in placed.items() if where.name == host.name]


def joined(address: str, port: int) -> str:
    """host:port, an IPv6 address in brackets.

    >>> joined("10.0.0.1", 2222), joined("fe80::1", 2222)
    ('10.0.0.1:2222', '[fe80::1]:2222')
    """
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def is_name(text: str) -> bool:
    """Whether a machine may be called so; what begins with a dash, ssh would take for an option.

    >>> is_name("server-1.example.com"), is_name("-oProxyCommand=x")
    (True, False)
    """
    return _NAME.fullmatch(text) is not None


def is_v6(text: str) -> bool:
    """
    >>> is_v6("fe80::1"), is_v6("10.0.0.1")
    (True, False)
    """
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _names(hosts: Sequence[Host]) -> str:
    return ", ".join(host.name for host in hosts)
