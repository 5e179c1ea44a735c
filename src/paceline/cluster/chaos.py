"""WHICH faults are injected? What `--chaos "kill=ps:0@500,stop=worker:1@200:10s,flip=1e-6"` says, when and to whom.

Read by validate, by worker/step/injection and launchers/chaos, which make the faults, and by `paceline chaos`, which
tells them in words. Pure: the time comes in, chance is a function of the seed. Must never correct a value: it says what
would be right.
"""

import re
from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec

from paceline.cluster.spec import ClusterSpec, Task
from paceline.cluster.spelling import hint
from paceline.errors import UsageError

_WHO = r"(?P<who>\?|[A-Za-z]\w*:(?:\?|[0-9]{1,6}))"
_TIME = r"[0-9]{1,9}(?:\.[0-9]{1,9})?(?:ms|s|m|h)"
_WHEN = rf"@(?P<when>every:{_TIME}|{_TIME}|[0-9]{{1,12}})"
_LASTS = rf":(?P<lasts>{_TIME})"
_CHANCE = r"(?P<chance>[0-9]{1,9}(?:\.[0-9]{1,12})?(?:e-?[0-9]{1,3})?)"
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class _Kind(msgspec.Struct, frozen=True):
    """How a kind of fault is written."""

    pattern: str
    example: str


KINDS = {
    "kill": _Kind(_WHO + _WHEN, "kill=ps:0@500 or kill=worker:?@every:29s"),
    "stop": _Kind(_WHO + _WHEN + _LASTS, "stop=worker:1@200:10s"),
    "cut": _Kind(_WHO + _WHEN + _LASTS, "cut=worker:1@300:2s"),
    "nan": _Kind(_WHO + _WHEN, "nan=worker:1@50"),
    "flip": _Kind(
        f"{_WHO}{_WHEN}|(?:(?P<whose>[A-Za-z]\\w*:[0-9]{{1,6}}):)?{_CHANCE}", "flip=1e-6 or flip=worker:1@50"
    ),
    "delay": _Kind(f"{_WHO}{_LASTS}", "delay=worker:2:50ms"),
    "limit": _Kind(
        rf"{_WHO}:(?P<rate>[0-9]{{1,9}}(?:\.[0-9]{{1,9}})?)(?P<unit>kbit|mbit|gbit)", "limit=worker:1:5mbit"
    ),
    "swallow-acks": _Kind(rf"{_WHO}:(?P<count>[0-9]{{1,9}})", "swallow-acks=worker:0:50"),
}
SIGNALS = ("kill", "stop")  # what a ps can suffer too; all other faults are made by a worker
NEEDS_TCP = ("limit", "swallow-acks")  # on shm payloads and answers lie in memory: nothing passes by


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault, as it was written and as it is meant. Without any `at` or `every` it lasts for the whole run."""

    text: str
    kind: str
    who: str = ""  # worker:1; worker:? and ? are chosen by the seed; "": every worker
    at_step: int | None = None  # of that worker's process, or the version of that ps
    at_s: float | None = None  # after the run began
    every_s: float | None = None
    lasts_s: float = 0.0
    amount: float = 0.0  # limit: bytes a second; flip: chance a byte; swallow-acks: how many

    @property
    def is_timed(self) -> bool:
        """Whether the clock brings it, not a step."""
        return self.at_s is not None or self.every_s is not None

    @property
    def is_sent(self) -> bool:
        """Whether the launcher does it from outside: at no step in particular."""
        return self.is_timed and self.kind in SIGNALS

    def names(self, task: Task) -> bool:
        """Whether it is for this very task, without a choice."""
        return self.who == str(task) or (not self.who and task.job != "ps")


def parse(text: str) -> tuple[Fault, ...]:
    """All faults of a specification, in its order; none for "".

    >>> [(f.kind, f.who, f.at_step, f.lasts_s) for f in parse("kill=ps:0@500, stop=worker:1@200:10s")]
    [('kill', 'ps:0', 500, 0.0), ('stop', 'worker:1', 200, 10.0)]
    """
    faults: list[Fault] = []
    for part in text.split(",") if text.strip() else ():
        fault = _parse(part.strip())
        if any(each.text == fault.text for each in faults):
            raise UsageError(f"--chaos has {fault.text} twice; leave one out.")
        faults.append(fault)
    return tuple(faults)


def _parse(part: str) -> Fault:
    kind, equals, rest = part.partition("=")
    if kind not in KINDS:
        raise UsageError(f"--chaos has {part!r}: there is no fault {kind!r}; {hint(kind, KINDS)}.")
    found = re.fullmatch(KINDS[kind].pattern, rest)
    if not equals or found is None:
        raise UsageError(f"--chaos has {part!r}; write it as {KINDS[kind].example}.")
    given = {name: value for name, value in found.groupdict().items() if value is not None}
    when = given.get("when", "")
    fault = Fault(
        text=part,
        kind=kind,
        who=given.get("who") or given.get("whose", ""),
        at_step=int(when) if when.isdecimal() else None,
        at_s=_seconds(when) if when and not when.isdecimal() and not when.startswith("every") else None,
        every_s=_seconds(when.removeprefix("every:")) if when.startswith("every") else None,
        lasts_s=_seconds(given["lasts"]) if "lasts" in given else 0.0,
        amount=_amount(given),
    )
    _check_numbers(fault, given)
    return fault


def _amount(given: dict[str, str]) -> float:
    if "rate" in given:
        return float(given["rate"]) * _BITS[given["unit"]] / 8
    return float(given.get("chance") or given.get("count") or 0.0)


def _check_numbers(fault: Fault, given: dict[str, str]) -> None:
    if fault.at_step == 0:
        raise UsageError(f"--chaos has {fault.text}: steps count from 1.")
    if fault.every_s == 0 or ("lasts" in given and not fault.lasts_s) or ("rate" in given and not fault.amount):
        raise UsageError(f"--chaos has {fault.text}: a time or a rate of 0 is no fault; leave it out.")
    if "chance" in given and not 0 < fault.amount <= 1:
        raise UsageError(f"--chaos has {fault.text}; the chance of a byte must lie between 0 and 1, such as 1e-6.")
    if "count" in given and not fault.amount:
        raise UsageError(f"--chaos has {fault.text}: 0 answers are none; leave it out.")
    if "?" in fault.who and not fault.is_timed:
        raise UsageError(f"--chaos has {fault.text}; a random task needs a time, such as @29s or @every:29s.")
    if fault.kind not in SIGNALS and (fault.who == "?" or fault.who.startswith("ps:")):
        raise UsageError(f"--chaos has {fault.text}; {fault.kind} is made by a worker: name one, such as worker:1.")


def _seconds(text: str) -> float:
    """
    >>> _seconds("50ms"), _seconds("2m")
    (0.05, 120.0)
    """
    unit = "ms" if text.endswith("ms") else text[-1]
    return float(text.removesuffix(unit)) * _UNITS_S[unit]


def check(text: str, lane: str, cluster: ClusterSpec) -> None:
    """Raise UsageError unless every fault can happen in this cluster."""
    tasks = [*cluster.ps, *cluster.workers]
    for fault in parse(text):
        if fault.who and not candidates(fault, tasks):
            names = ", ".join(str(task) for task in tasks)
            raise UsageError(f"--chaos has {fault.text}, but this cluster has no {fault.who}; its tasks are {names}.")
        if fault.kind in NEEDS_TCP and lane in ("shm", "inproc"):
            raise UsageError(f"--chaos has {fault.text}, which needs bytes that travel: use --lane auto or tcp.")
    if lane == "inproc":
        refuse_signals(text)


def refuse_signals(text: str) -> None:
    """Raise UsageError if a task is to be killed or stopped: here all tasks are one process."""
    for fault in parse(text):
        if fault.kind in SIGNALS:
            raise UsageError(f"--chaos has {fault.text}, but here all tasks are one process; use paceline run.")


def candidates(fault: Fault, tasks: Sequence[Task]) -> list[Task]:
    """Whom it may hit, of these."""
    if fault.who in ("", "?"):
        return [task for task in tasks if fault.who or task.job != "ps"]
    job, _, index = fault.who.partition(":")
    return [task for task in tasks if task.job == job and index in ("?", str(task.index))]


def victim(fault: Fault, nth: int, tasks: Sequence[Task], seed: int) -> Task:
    """Whom a timed fault hits for the nth time: the same for the same seed, in whatever process it is asked.

    >>> [fault] = parse("kill=worker:?@every:29s")
    >>> str(victim(fault, 1, [Task("ps", 0), Task("worker", 0)], seed=0))
    'worker:0'
    """
    among = sorted(candidates(fault, tasks))
    drawn = blake2b(f"{seed} {fault.text} {nth}".encode(), digest_size=8).digest()
    return among[int.from_bytes(drawn, "big") % len(among)]


def due_s(fault: Fault, nth: int) -> float | None:
    """When a timed fault comes for the nth time, after the run began; None: it does not.

    >>> due_s(parse("kill=?@every:10s")[0], 3), due_s(parse("kill=?@10s")[0], 2)
    (30.0, None)
    """
    if fault.every_s is not None:
        return nth * fault.every_s
    return fault.at_s if nth == 1 else None


def explain(fault: Fault) -> str:
    """The fault in plain words.

    >>> explain(parse("kill=ps:0@500")[0])
    'ps:0 is killed (SIGKILL) right after its update 500, before anybody is answered'
    """
    who = {"": "every worker", "?": "a random task"}.get(fault.who, fault.who)
    if fault.who.endswith(":?"):
        who = f"a random {fault.who[:-2]}"
    return f"{who} {_DEEDS[fault.kind](fault)}{_when(fault)}"


def _when(fault: Fault) -> str:
    if fault.every_s is not None:
        return f", every {fault.every_s:g} s"
    if fault.at_s is not None:
        return f", {fault.at_s:g} s after the run began"
    if fault.at_step is None:
        return ""
    if fault.who.startswith("ps:"):
        return f" right after its update {fault.at_step}, before anybody is answered"
    return f" right before the push of its step {fault.at_step}"


def _flipped(fault: Fault) -> str:
    if fault.amount:
        return f"sends each byte with one wrong bit at a chance of {fault.amount:g}"
    return "sends one wrong bit in its next message"


_DEEDS: dict[str, Callable[[Fault], str]] = {
    "kill": lambda fault: "is killed (SIGKILL)",
    "stop": lambda fault: f"stands still (SIGSTOP) for {fault.lasts_s:g} s",
    "cut": lambda fault: f"is cut off from every ps for {fault.lasts_s:g} s",
    "nan": lambda fault: "has a NaN in its gradient",
    "flip": _flipped,
    "delay": lambda fault: f"sends every message {1e3 * fault.lasts_s:g} ms late",
    "limit": lambda fault: f"sends and receives at most {8e-6 * fault.amount:g} Mbit/s, by tcp",
    "swallow-acks": lambda fault: (
        f"loses the first answer to each of {fault.amount:.0f} pushes, and with it the connection, by tcp"
    ),
}
