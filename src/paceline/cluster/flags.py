"""WHAT does the command line say? TF1's cluster flags and the settings flags, out of any argv.

Called by discovery; pure. Reading never fails, because most of argv belongs to the user's script:
a bad value is refused only when it is asked for. Must never look at sys.argv itself.
"""

import re
from collections.abc import Mapping, Sequence

import msgspec

from paceline.cluster.settings import Settings
from paceline.errors import UsageError

CLUSTER_FLAGS = ("job_name", "task_index", "ps_hosts", "worker_hosts", "chief_hosts")
_NOT_READ = ("run_id", "plain", "seed")  # --seed is often the script's own, which seeds itself then
_TYPES = {f.name: f.type for f in msgspec.structs.fields(Settings) if f.name not in _NOT_READ}
_SWITCHES = frozenset(n for n, kind in _TYPES.items() if kind is bool)
_WHOLES = tuple(n for n, kind in _TYPES.items() if kind in (int, int | None))
_NUMBERS = tuple(n for n, kind in _TYPES.items() if kind in (float, float | None))
_TEXTS = tuple(n for n in _TYPES if n not in (*_WHOLES, *_NUMBERS, *_SWITCHES))
SETTINGS_FLAGS = (*_TYPES, "secret_file")

_KNOWN = frozenset(CLUSTER_FLAGS + SETTINGS_FLAGS)
_WHOLE = re.compile(r"[+-]?[0-9]{1,9}")
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def read(argv: Sequence[str]) -> dict[str, str]:
    """Return the flags that are ours as text, the last one winning; a missing value is "".

    >>> read(["--task-index", "1", "train.txt", "--job_name='ps'", "--epochs=3"])
    {'task_index': '1', 'job_name': 'ps'}
    >>> read(["--no-allow-growth"])
    {'allow_growth': 'false'}
    """
    given: dict[str, str] = {}
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "--":
            break
        name, equals, value = token.partition("=")
        name = _flag_name(name)
        if not equals and name.removeprefix("no_") in _SWITCHES and name not in _KNOWN:
            given[name.removeprefix("no_")] = "false"
            continue
        if name not in _KNOWN:
            continue
        if not equals and name in _SWITCHES:
            value = "true"
        elif not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        given[name] = _unquoted(value)
    return given


def text(given: Mapping[str, str], name: str) -> str | None:
    """Return a flag's value; None where it was not given."""
    value = given.get(name)
    if value == "":
        raise UsageError(f"--{name} has no value; write it as --{name}=VALUE.")
    return value


def whole(given: Mapping[str, str], name: str) -> int | None:
    """Return a flag's value as a whole number; None where it was not given."""
    value = text(given, name)
    if value is None:
        return None
    if not _WHOLE.fullmatch(value):
        raise UsageError(f"--{name} is {value!r}; it must be a whole number, such as --{name}=1.")
    return int(value)


def hosts(given: Mapping[str, str], name: str) -> list[str]:
    """Return a comma-separated list of addresses; empty where it was not given.

    >>> hosts({"ps_hosts": "a:1, b:1"}, "ps_hosts")
    ['a:1', 'b:1']
    """
    value = text(given, name)
    return [] if value is None else [_unquoted(part) for part in value.split(",")]


def settings(given: Mapping[str, str], run_id: str) -> Settings:
    """Return the run's settings, with defaults for what was not given; names are checked by validate."""
    read = {
        **{name: text(given, name) for name in _TEXTS},
        **{name: whole(given, name) for name in _WHOLES},
        **{name: _number(given, name) for name in _NUMBERS},
        **{name: _truth(given, name) for name in _SWITCHES},
    }
    if read["min_workers"] is None:
        read["min_workers"] = read["started_workers"]
    return msgspec.convert({"run_id": run_id, **{n: v for n, v in read.items() if v is not None}}, Settings)


def worker_range(value: str) -> tuple[int, int]:
    """How many workers are started, and how many the cluster has room for: `--workers N` or `--workers MIN:MAX`.

    >>> worker_range("3"), worker_range("2:6")
    ((3, 3), (2, 6))
    """
    fewest, colon, most = value.partition(":")
    if not _WHOLE.fullmatch(fewest) or (colon and not _WHOLE.fullmatch(most)):
        raise UsageError(f"--workers is {value!r}; use a number such as 2, or a range such as 2:6.")
    started, room = int(fewest), int(most or fewest)
    if started < 1:
        raise UsageError(f"--workers is {value}; a cluster needs at least 1.")
    if room < started:
        raise UsageError(f"--workers is {value}; a range goes up, such as {room}:{started}.")
    return started, room


def _flag_name(token: str) -> str:
    """TF1 takes one dash or two; inside the name a dash is an underscore."""
    if not token.startswith("-"):
        return ""
    return token.removeprefix("-").removeprefix("-").replace("-", "_")


def _unquoted(value: str) -> str:
    return value.strip(" \t\r\n'\"")


def _truth(given: Mapping[str, str], name: str) -> bool | None:
    value = text(given, name)
    if value is None:
        return None
    if value.lower() not in _TRUTH:
        raise UsageError(f"--{name} is {value!r}; write --{name}, --{name}=true or --{name}=false.")
    return _TRUTH[value.lower()]


def _number(given: Mapping[str, str], name: str) -> float | None:
    value = text(given, name)
    if value is None:
        return None
    try:
        return float(value)
    except ValueError:
        what = "a number of seconds, such as 5" if name.endswith("_s") else "a number, such as 0.9"
        raise UsageError(f"--{name} is {value!r}; it must be {what}.") from None
