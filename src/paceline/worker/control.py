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
from paceline.errors import ClusterError, ConnectionLost, ProtocolError, UsageError, WaitTimeout
from paceline.modes.spec import NAMES, ModeSpec, check, parse_grace
from paceline.telemetry.lines import waiting_line
from paceline.transport.channel import Channel
from paceline.wire import messages as m
from paceline.worker.client import PS_0
from paceline.worker.deadline import SAY_EVERY_S
from paceline.worker.reach import OWN, Access, Running, running

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
            channel.say(m.SwitchMode(spec))
            reply = _await(run, channel, wait_s, say)
        except ConnectionLost as error:
            raise ConnectionLost(f"ps:0 ended while it was asked for mode {spec}: the run may be over") from error
    if not isinstance(reply, m.Switched):
        raise ProtocolError(f"ps:0 answered a switch with {type(reply).__name__}")
    return reply


def shown_by(run_dir: Path | str, access: Access = OWN) -> Shown:
    """Return the state of the run in this folder, or at these addresses."""
    run = running(run_dir, access)
    with closing(run.connect()) as channel:
        described, status = channel.ask(m.Describe())[0], channel.ask(m.AskStatus())[0]
    if not isinstance(described, m.Described) or not isinstance(status, m.Status):
        raise ProtocolError("ps:0 did not say how it stands")
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


def _await(run: Running, channel: Channel, wait_s: float, say: Callable[[str], None]) -> object:
    """Return the reply; while it does not come, say now and then for whom ps:0 waits."""
    began, say_at_s = time.monotonic(), SAY_AFTER_S
    while True:
        try:
            reply = m.decode(channel.recv_cold().tail)
        except WaitTimeout:
            waited_s = time.monotonic() - began
            if waited_s < min(say_at_s, wait_s):
                continue
            devices = _waiting_for(run)
            if waited_s >= wait_s:
                raise WaitTimeout(
                    f"the mode did not change within {waited_s:.0f} s: ps:0 waits for {', '.join(devices)}, "
                    "and changes it as soon as it can"
                ) from None
            for device in devices:
                say(waiting_line(device, waited_s))
            say_at_s += SAY_EVERY_S
            continue
        if isinstance(reply, m.Failed):
            raise UsageError(reply.reason)
        return reply


def _waiting_for(run: Running) -> list[str]:
    """Ask on a second connection for whom ps:0 waits; return their devices, or ps:0's if it does not answer."""
    try:
        with closing(run.connect()) as channel:
            status = channel.ask(m.AskStatus())[0]
    except (ClusterError, UsageError):
        return [PS_0]
    if isinstance(status, m.Status) and status.lacks:
        return [f"{status.lacks} more worker(s), as --min-workers asks"]
    workers = run.cluster.workers
    named = [*status.missing, *status.waiting_for] if isinstance(status, m.Status) else []
    return [workers[worker].device for worker in sorted(set(named))] or [PS_0]
