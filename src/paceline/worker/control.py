"""Change a run from outside while it trains: find its ps:0 (worker/reach), and ask it.

Used by `paceline ctl` and by scripts: `switch_mode("runs/latest", "sync", replicas_to_aggregate=2)`. Imports no
framework and does not join. Flags that make no sense are refused here, everything else is decided by ps:0.
"""

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec

from paceline.cluster.spelling import hint
from paceline.errors import ClusterError, ConnectionLost, Refused, UsageError, WaitTimeout
from paceline.modes.spec import NAMES, ModeSpec, check, parse_grace
from paceline.telemetry.lines import waiting_line
from paceline.wire import messages as m
from paceline.worker.reach import OWN, Access, Running, running
from paceline.worker.requests.deadline import SAY_EVERY_S
from paceline.worker.requests.joining import PS_0
from paceline.worker.requests.rpc import Once, call

WAIT_S = 300.0
SAY_AFTER_S = 3.0
ONE_MODE_ONLY = {"staleness": "bounded", "local_steps": "local", "outer": "local"}  # a default hides them in a spec
NUMBERS = ("replicas_to_aggregate", "extra_tokens", "grace_ms", "staleness_scale", *ONE_MODE_ONLY)


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run now, as its ps:0 reports it."""

    mode: ModeSpec
    global_step: int
    live: list[str]
    num_workers: int
    lacks: int
    wanted: str = ""
    waits_for: list[str] = []


def spec_of(name: str, **numbers: object) -> ModeSpec:
    """Return the mode with these numbers; None stands for a number that was not given.

    >>> print(spec_of("sync", replicas_to_aggregate=2, grace_ms="20%", staleness=None))
    sync, 2 to aggregate, grace 20 % of a round
    """
    if name not in NAMES:
        raise UsageError(f"Unknown mode {name!r}; {hint(name, NAMES)}.")
    given = {number: value for number, value in numbers.items() if value is not None}
    for number in given:
        if number not in NUMBERS:
            raise UsageError(f"A mode has no {number!r}; {hint(number, NUMBERS)}.")
        wanted = ONE_MODE_ONLY.get(number, name)
        if wanted != name:
            raise UsageError(f"--{number.replace('_', '-')} only makes sense with mode {wanted}, not {name}.")
    if "grace_ms" in given:
        given["grace_ms"], given["grace_share"] = parse_grace(str(given["grace_ms"]))
    try:
        return msgspec.convert({"name": name, **given}, ModeSpec)
    except msgspec.ValidationError as error:
        raise UsageError(f"These are no numbers of a mode: {error}.") from error


def switch_mode(
    run_dir: Path | str,
    name: str,
    *,
    access: Access = OWN,
    wait_s: float = WAIT_S,
    say: Callable[[str], None] = lambda line: None,
    **numbers: object,
) -> m.Switched:
    """Change the mode of a running run on all its ps; return when every worker trains in it.

    `numbers`: replicas_to_aggregate, extra_tokens, grace_ms, staleness, local_steps, outer, staleness_scale; those
    left out are at their defaults, whatever held before.
    """
    spec = spec_of(name, **numbers)
    if not wait_s > 0:
        raise UsageError(f"--wait-s is {wait_s}; it must be a number of seconds above 0.")
    run = running(run_dir, access)
    check(spec, len(run.cluster.workers))
    with closing(run.connect()) as channel:
        try:
            ps = Once(channel, "ps:0")
            return call(ps, m.SwitchMode(spec), m.Switched, on_wait=_Waiting(run, wait_s, say).again)[0]
        except Refused as refused:
            raise UsageError(str(refused)) from refused
        except ConnectionLost as error:
            raise ConnectionLost(f"ps:0 ended while it was asked for mode {spec}: the run may be over") from error


def shown_by(run_dir: Path | str, access: Access = OWN) -> Shown:
    """Return the state of the run in this folder, or at these addresses."""
    run = running(run_dir, access)
    with closing(run.connect()) as channel:
        ps = Once(channel, "ps:0")
        described, status = call(ps, m.Describe(), m.Described)[0], call(ps, m.AskStatus(), m.Status)[0]
    workers = run.cluster.workers
    return Shown(
        mode=described.spec,
        global_step=described.version,
        live=[str(workers[worker]) for worker in status.live],
        num_workers=len(workers),
        lacks=status.lacks,
        wanted=status.wanted,
        waits_for=[str(workers[worker]) for worker in status.waiting_for],
    )


class _Waiting:
    """Waits for a mode: says now and then for whom ps:0 waits, and raises at the deadline."""

    def __init__(self, run: Running, wait_s: float, say: Callable[[str], None]) -> None:
        self._run = run
        self._wait_s = wait_s
        self._say = say
        self._began_s = time.monotonic()
        self._say_at_s = SAY_AFTER_S

    def again(self) -> None:
        """Note that the reply has not come yet."""
        waited_s = time.monotonic() - self._began_s
        if waited_s < min(self._say_at_s, self._wait_s):
            return
        devices = _waiting_for(self._run)
        if waited_s >= self._wait_s:
            raise WaitTimeout(
                f"the mode did not change within {waited_s:.0f} s: ps:0 waits for {', '.join(devices)}, "
                "and changes it as soon as it can"
            )
        for device in devices:
            self._say(waiting_line(device, waited_s))
        self._say_at_s += SAY_EVERY_S


def _waiting_for(run: Running) -> list[str]:
    """Ask on a second connection for whom ps:0 waits; return their devices, or ps:0's if it does not answer."""
    try:
        with closing(run.connect()) as channel:
            status = call(Once(channel, "ps:0"), m.AskStatus(), m.Status)[0]
    except (ClusterError, UsageError):
        return [PS_0]
    if status.lacks:
        return [f"{status.lacks} more worker(s), as --min-workers asks"]
    workers = run.cluster.workers
    named = [*status.missing, *status.waiting_for]
    return [workers[worker].device for worker in sorted(set(named))] or [PS_0]
