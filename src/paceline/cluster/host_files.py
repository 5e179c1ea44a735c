"""WHO says which hosts there are? `--hosts`, a hostfile in anybody's spelling, or a cluster.toml.

Called by the verbs that reach other machines. Every mistake is one sentence that names the file, the line and the key.

A hostfile has a host a line, as DeepSpeed (`server1 slots=4`), Open MPI (`server1 slots=4 max-slots=4`, or the host on
several lines), Horovod and MPICH (`server1:4`) and plain lists (`server1`) have it; `#` begins a comment.

A cluster.toml has a table a host. Every key may be left out, and keys above the first table hold for all hosts:

    python = "/opt/venv/bin/python"     # default: the path of the python that asks, or python3
    folder = "project"                  # where tasks start; relative: below the home folder there

    [hosts.server1]
    ssh = "me@server1.example.com"      # what `ssh` takes, aliases of ~/.ssh/config too; default: the name
    address = "10.0.0.1"                # where the others reach it; default: what `ssh -G` has as its hostname
    slots = 2                           # workers; default 1
    gpus = 2                            # cards that its workers may use; default: all
    ports = "29500-29600"               # where tasks may listen; default: any free port
    roles = ["ps", "worker"]            # which tasks it may have
"""

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from paceline.cluster import hosts
from paceline.cluster.hosts import ROLES, Host
from paceline.cluster.spelling import hint
from paceline.cluster.toml_text import line_of, table_of
from paceline.errors import UsageError

KEYS = ("ssh", "address", "python", "folder", "slots", "gpus", "ports", "roles")
SLOTS = ("slots", "count", "cpus", "cpu")  # Open MPI's spellings
MAX_SLOTS = ("max-slots", "max_slots")


def named(given: str | None, hostfile: str | None, cluster: str | None) -> list[Host]:
    """The hosts that one of the three flags names; none where none was given.

    >>> [host.name for host in named("server1:2,server2", None, None)]
    ['server1', 'server2']
    """
    flags = {"--hosts": given, "--hostfile": hostfile, "--cluster": cluster}
    said = [flag for flag, value in flags.items() if value is not None]
    if len(said) > 1:
        raise UsageError(f"{' and '.join(said)} both say which hosts there are; leave one out.")
    if given is not None:
        return from_flag(given)
    if hostfile is not None:
        return from_hostfile(_text(hostfile), hostfile)
    return from_toml(_text(cluster), cluster) if cluster is not None else []


def from_flag(text: str) -> list[Host]:
    """`--hosts`: hosts with their slots, by commas.

    >>> [(host.target, host.slots) for host in from_flag("me@server1:2, server2")]
    [('me@server1', 2), ('server2', 1)]
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError("--hosts is empty; name hosts with their slots, such as server1:2,server2:1.")
    return hosts.merged([hosts.parse(part) for part in parts])


def from_hostfile(text: str, where: str) -> list[Host]:
    """A hostfile, in any of the spellings above.

    >>> [(host.name, host.slots) for host in from_hostfile("a slots=4 max-slots=4\\nb:2\\nc # plain\\n", "F")]
    [('a', 4), ('b', 2), ('c', 1)]
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            try:
                found.append(_line(words))
            except UsageError as error:
                raise UsageError(f"{where}, line {number}: {error}") from None
    if not found:
        raise UsageError(f"{where} names no host; write one a line, such as server1 slots=2.")
    return hosts.merged(found)


def _line(words: list[str]) -> Host:
    host = hosts.parse(words[0])
    given: dict[str, int] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        kind = "slots" if key in SLOTS else "max-slots" if key in MAX_SLOTS else None
        if not equals and hosts.is_name(word):
            raise UsageError(f"{word!r} stands behind host {host.name}; write one host a line, its slots as slots=2.")
        if kind is None:
            raise UsageError(f"{word!r} says nothing known of host {host.name}; {hint(key, ('slots', 'max-slots'))}.")
        if kind in given:
            raise UsageError(f"host {host.name} has {kind} twice; leave one out.")
        given[kind] = hosts.slots_of(value, word)
    if "slots" in given and ":" in words[0].rpartition("]")[2]:
        raise UsageError(f"host {host.name} has its slots twice, behind the colon and as slots=; leave one out.")
    slots = given.get("slots", host.slots)
    if given.get("max-slots", slots) < slots:
        raise UsageError(
            f"host {host.name} has {slots} slots and max-slots={given['max-slots']}; slots is at most that."
        )
    return msgspec.structs.replace(host, slots=slots)


def from_toml(text: str, where: str) -> list[Host]:
    """A cluster.toml.

    >>> [host] = from_toml('[hosts.server1]\\nslots = 2\\nroles = ["worker"]', "cluster.toml")
    >>> host.slots, host.roles, host.target
    (2, ('worker',), 'server1')
    """
    return _Toml(text, where).read()


class _Toml:
    """One cluster.toml; knows where its keys stand."""

    def __init__(self, text: str, where: str) -> None:
        self._text = text
        self._where = where

    def read(self) -> list[Host]:
        given = table_of(self._text, self._where)
        for_all = {key: value for key, value in given.items() if key != "hosts"}
        self._known((), for_all, ("hosts", "python", "folder", "ports", "slots", "gpus"))
        tables = given.get("hosts")
        if not isinstance(tables, dict) or not tables:
            raise UsageError(f"{self._where} has no hosts; give each a table, such as [hosts.server1].")
        return [self._host(name, table, for_all) for name, table in tables.items()]

    def wrong(self, path: tuple[str, ...], why: str) -> UsageError:
        return UsageError(f"{self._where}, line {line_of(self._text, *path)}: {why}.")

    def _known(self, path: tuple[str, ...], given: Mapping[str, object], valid: tuple[str, ...]) -> None:
        for key, value in given.items():
            if key in valid:
                continue
            if path and isinstance(value, dict):
                raise self.wrong(
                    (*path, key), f'a host\'s name with dots stands in quotes, such as [hosts."{path[-1]}.{key}"]'
                )
            raise self.wrong((*path, key), f"there is no key {key!r}; {hint(key, valid)}")

    def _host(self, name: str, table: object, for_all: Mapping[str, object]) -> Host:
        path = ("hosts", name)
        if not isinstance(table, dict):
            raise self.wrong(path, f"host {name} is {table!r}; give it a table: [hosts.{name}]")
        self._known(path, table, KEYS)
        here = _Values(self, path, table, for_all)
        try:
            plain = hosts.parse(name if ":" not in name else f"[{name}]")
        except UsageError:
            raise self.wrong(path, f"{name!r} is no host's name; use letters, digits, dots, - and _") from None
        return Host(
            name=name,
            target=here.target(plain.target),
            address=here.address(),
            python=here.text("python"),
            folder=here.text("folder"),
            slots=here.count("slots") if here.has("slots") else 1,
            gpus=here.count("gpus") if here.has("gpus") else None,
            ports=here.ports(),
            roles=here.roles(),
        )


class _Values:
    """The values of one host: its own, else those for all."""

    def __init__(
        self, file: _Toml, path: tuple[str, ...], table: Mapping[str, object], for_all: Mapping[str, object]
    ) -> None:
        self._file, self._path, self._table, self._for_all = file, path, table, for_all

    def has(self, key: str) -> bool:
        return key in self._table or key in self._for_all

    def _value(self, key: str, default: object) -> object:
        return self._table.get(key, self._for_all.get(key, default))

    def wrong(self, key: str, why: str) -> UsageError:
        return self._file.wrong((*self._path, key) if key in self._table else (key,), why)

    def text(self, key: str) -> str:
        value = self._value(key, "")
        if not isinstance(value, str) or "\n" in value or "\0" in value or (key in self._table and not value):
            raise self.wrong(key, f"{key} is {value!r}; it must be a text in quotes")
        return value

    def target(self, default: str) -> str:
        value = self.text("ssh") or default
        if value.startswith("-") or value.split() != [value]:
            raise self.wrong("ssh", f"ssh is {value!r}; it must be what `ssh` takes as a host, such as me@server1")
        return value

    def address(self) -> str:
        value = self.text("address").strip("[]")
        if value and not (hosts.is_name(value) or hosts.is_v6(value)):
            raise self.wrong("address", f"address is {value!r}; it must be a name or an IP address, without a port")
        return value

    def count(self, key: str) -> int:
        value = self._value(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= hosts.MAX_SLOTS:
            raise self.wrong(key, f"{key} is {value!r}; it must be a whole number from 0 to {hosts.MAX_SLOTS}")
        return value

    def ports(self) -> tuple[int, int] | None:
        value = self._value("ports", None)
        found = re.fullmatch(r"\s*([0-9]{1,5})\s*-\s*([0-9]{1,5})\s*", value) if isinstance(value, str) else None
        if found is None and value is not None:
            raise self.wrong("ports", f'ports is {value!r}; it must be the first and the last, such as "29500-29600"')
        if found is None:
            return None
        first, last = int(found[1]), int(found[2])
        if not 1 <= first <= last <= 65535:
            raise self.wrong("ports", f"ports is {value!r}; ports lie between 1 and 65535, the smaller one first")
        return first, last

    def roles(self) -> tuple[str, ...]:
        value = self._table.get("roles", list(ROLES))
        if not isinstance(value, list) or not value or not all(isinstance(role, str) for role in value):
            raise self.wrong("roles", f'roles is {value!r}; it must be a list, such as ["ps", "worker"]')
        for role in value:
            if role not in ROLES:
                raise self.wrong("roles", f"there is no role {role!r}; {hint(role, ROLES)}")
        return tuple(role for role in ROLES if role in value)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{path} cannot be read: {why}.") from None
