"""WHAT does the command line say? TF1's cluster flags and the settings flags, out of any argv.

Called by discovery; pure. Reading never fails, because most of argv belongs to the user's script:
a bad value is refused only when it is asked for. Must never look at sys.argv itself.
"""

import re
from collections.abc import Mapping, Sequence

from paceline.cluster.settings import Settings
from paceline.errors import UsageError

CLUSTER_FLAGS = ("job_name", "task_index", "ps_hosts", "worker_hosts", "chief_hosts")
SETTINGS_FLAGS = (
    "mode",
    "replicas_to_aggregate",
    "placement",
    "lane",
    "data",
    "log_every",
    "log_device_placement",
    "run_dir",
    "save_every",
    "lease_s",
    "wait_s",
    "secret_file",
)

_KNOWN = frozenset(CLUSTER_FLAGS + SETTINGS_FLAGS)
_SWITCHES = frozenset({"log_device_placement"})
_WHOLE = re.compile(r"[+-]?[0-9]{1,9}")
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def read(argv: Sequence[str]) -> dict[str, str]:
    """Return the flags that are ours as text, the last one winning; a missing value is "".

    >>> read(["--task-index", "1", "train.txt", "--job_name='ps'", "--epochs=3"])
    {'task_index': '1', 'job_name': 'ps'}
    """
    given: dict[str, str] = {}
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "--":
            break
        name, equals, value = token.partition("=")
        name = _flag_name(name)
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
    plain = Settings(run_id=run_id)
    log_every = whole(given, "log_every")
    return Settings(
        run_id=run_id,
        run_dir=text(given, "run_dir"),
        mode=text(given, "mode") or plain.mode,
        replicas_to_aggregate=whole(given, "replicas_to_aggregate"),
        placement=text(given, "placement") or plain.placement,
        lane=text(given, "lane") or plain.lane,
        data=text(given, "data") or plain.data,
        log_every=plain.log_every if log_every is None else log_every,
        log_device_placement=_truth(given, "log_device_placement", plain.log_device_placement),
        save_every=text(given, "save_every") or plain.save_every,
        lease_s=_seconds(given, "lease_s", plain.lease_s),
        wait_s=_seconds(given, "wait_s", plain.wait_s),
    )


def _flag_name(token: str) -> str:
    """TF1 takes one dash or two; inside the name a dash is an underscore."""
    if not token.startswith("-"):
        return ""
    return token.removeprefix("-").removeprefix("-").replace("-", "_")


def _unquoted(value: str) -> str:
    return value.strip(" \t\r\n'\"")


def _truth(given: Mapping[str, str], name: str, default: bool) -> bool:
    value = text(given, name)
    if value is None:
        return default
    if value.lower() not in _TRUTH:
        raise UsageError(f"--{name} is {value!r}; write --{name}, --{name}=true or --{name}=false.")
    return _TRUTH[value.lower()]


def _seconds(given: Mapping[str, str], name: str, default: float) -> float:
    value = text(given, name)
    if value is None:
        return default
    try:
        return float(value)
    except ValueError:
        raise UsageError(f"--{name} is {value!r}; it must be a number of seconds, such as 5.") from None
