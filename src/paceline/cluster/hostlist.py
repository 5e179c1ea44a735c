"""WHICH hosts does Slurm's short spelling mean? `host[01-03,7]` and, beside it, `2(x3),1` tasks on each.

Called by cluster/schedulers; pure. Expands as `scontrol show hostnames` does. Must never make endless lists.
"""

import re
from itertools import product

from paceline.errors import UsageError

MOST = 65536  # hosts: as many as Slurm itself takes
_PART = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")


def expand(text: str) -> list[str]:
    """Return the hosts in the order written; a range keeps the zeros of its first number.

    >>> expand("login,host[08-10],rack[1-2]gpu[1,3]")
    ['login', 'host08', 'host09', 'host10', 'rack1gpu1', 'rack1gpu3', 'rack2gpu1', 'rack2gpu3']
    """
    if _PART.sub("", text).strip(", \t\n"):
        raise _not_hosts(text)
    hosts: list[str] = []
    for part in _PART.findall(text):
        choices = [_numbers(inside, text) if not plain else [plain] for inside, plain in _PIECE.findall(part)]
        size = 1
        for choice in choices:
            size *= len(choice)
        if len(hosts) + size > MOST:
            raise UsageError(f"The list of hosts {text[:80]!r} is longer than {MOST}.")
        hosts += ["".join(letters) for letters in product(*choices)]
    return hosts


def counts(text: str) -> list[int]:
    """Return how many tasks each host has.

    >>> counts("2(x3),1")
    [2, 2, 2, 1]
    """
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None or len(found) + int(match[2] or 1) > MOST:
            raise UsageError(f"{text[:80]!r} does not say how many tasks each host has, as Slurm's 2(x3),1 would.")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _numbers(inside: str, text: str) -> list[str]:
    """What stands in one pair of brackets: 01-03,7."""
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _not_hosts(text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= MOST:
            raise _not_hosts(text)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _not_hosts(text: str) -> UsageError:
    return UsageError(f"{text[:80]!r} is no list of hosts as Slurm writes them, such as host[01-03,7].")
