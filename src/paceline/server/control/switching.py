"""Change the mode while a run trains: every worker finishes a step and stands still, then the new mode holds.

What the workers do meanwhile is in docs/protocol.md, "Another mode".
"""

from typing import TYPE_CHECKING

from paceline.errors import Refused
from paceline.modes import make as make_mode
from paceline.modes.spec import check
from paceline.server.control import starting, waiting
from paceline.server.control.actions import Action, ModeHolds
from paceline.telemetry.records import ModeChange
from paceline.wire import messages as m

if TYPE_CHECKING:
    from paceline.server.control.control import Control


def ready(control: "Control", connection: int, message: m.Ready, now_s: float) -> list[Action]:
    """Let a worker stand still until the mode has changed; it goes on at once if nothing is to change any more."""
    key = control.worker(connection)
    if control.wanted is None:
        control.say(connection, control.dial)
        return control.take()
    if not control.standing:
        control.standing_since_s = now_s
    control.standing[key] = connection
    control.state.ready.add(key)
    control.changed(now_s)
    return control.take()


def switch_mode(control: "Control", connection: int, message: m.SwitchMode, now_s: float) -> list[Action]:
    """Begin to change the mode. The request comes from outside the training, to ps:0."""
    now, wanted = control.state.mode.spec, message.spec
    if control.config.index != 0:
        raise Refused("only ps:0 changes the mode")
    if (wanted.name == "local") != (now.name == "local"):
        raise Refused(
            f"a run in mode {now.name} cannot go on in mode {wanted.name}: in mode local the optimizer "
            "runs on the workers, else on the ps, and its state cannot move while they train"
        )
    check(wanted, control.config.num_workers)
    if not control.is_started:
        raise Refused("the run has not started to train yet")
    if not control.members.live and not control.members.missing:
        raise Refused("the run is over: no worker trains any more")
    if wanted == now and control.wanted is None:
        control.say(connection, m.Switched(now, now, control.state.version, 0.0))
        return control.take()
    if control.wanted not in (None, wanted):
        give_up(control, f"another change was asked for meanwhile: {wanted}")
    if message.waits:
        control.switchers.append(connection)
    else:
        control.say(connection, m.Switched(now, wanted, control.state.version, None))
    control.wanted = wanted
    control.do(control.state.begin_switch(now_s), now_s)
    switch_if_still(control, now_s)
    starting.release_starters(control, now_s)
    return control.take()


def align(control: "Control", connection: int, message: m.Align, now_s: float) -> list[Action]:
    """Take over the mode that holds on ps:0, on every other shard."""
    control.worker(connection)
    dial, state = message.dial, control.state
    if dial.turn > state.turn:
        control.do(state.align(make_mode(dial.spec, control.config.num_workers), dial.turn, dial.version), now_s)
        control.dial = m.Dial(dial.turn, dial.spec, dial.version)
        control.out.append(ModeHolds(state.mode, state.turn, state.version))
    control.say(connection, m.Aligned(state.offset, state.version))
    return control.take()


def switch_if_still(control: "Control", now_s: float) -> None:
    """Change the mode once no worker is between two steps, and tell all who wait."""
    state, after = control.state, control.wanted
    if after is None or state.rounds.votes or state.waiting:
        return
    still = (control.standing, control.in_barrier, control.ticket_waiters, control.starters)
    if not control.members.training <= {key[0] for keys in still for key in keys}:
        return
    if control.members.is_over:
        give_up(control, "the run ended before its mode could change")
        return
    before, decisions = state.mode.spec, control.open_decisions
    actions = state.switch(make_mode(after, control.config.num_workers))
    control.dial = m.Dial(state.turn, after, state.version, decisions)
    control.wanted = None
    control.do(actions, now_s)
    control.out.append(ModeHolds(state.mode, state.turn, state.version))
    pause_ms = 1e3 * (now_s - control.standing_since_s) if control.standing else 0.0
    control.mode_changes.append(ModeChange(at_step=state.version, mode=str(after), pause_ms=pause_ms))
    for connection in control.standing.values():
        control.say(connection, control.dial)
    for connection in control.switchers:
        control.say(connection, m.Switched(before, after, state.version, pause_ms))
    control.standing.clear()
    control.switchers.clear()
    waiting.release_tickets(control)


def give_up(control: "Control", reason: str) -> None:
    """Keep the mode that holds."""
    control.wanted, control.state.is_switching = None, False
    for connection in control.switchers:
        control.say(connection, m.Failed(reason))
    control.switchers.clear()
