"""Let workers wait for others: pauses, barriers, and tickets for `ctx.steps(total)`.

Events of the control plane, on ps:0 only.
"""

from typing import TYPE_CHECKING

from paceline.errors import Refused
from paceline.server.control.actions import Action
from paceline.wire import messages as m
from paceline.wire.decisions import Key
from paceline.wire.frames import Flag

if TYPE_CHECKING:
    from paceline.server.control.control import Control


def paused(control: "Control", connection: int, message: m.Pause, now_s: float) -> list[Action]:
    """Leave a worker out of rounds until it resumes."""
    control.members.pause(control.worker(connection)[0])
    control.changed(now_s)
    return control.done(connection)


def resumed(control: "Control", connection: int, message: m.Resume, now_s: float) -> list[Action]:
    """Let a worker train again."""
    _resume(control, control.worker(connection)[0])
    control.say(connection, control.dial)
    return control.take()


def _resume(control: "Control", worker: int) -> None:
    if worker not in control.members.training:
        control.members.resume(worker)
        control.enter(worker)


def barrier(control: "Control", connection: int, message: m.Barrier, now_s: float) -> list[Action]:
    """Let a worker wait until every live worker is in its barrier."""
    key = control.worker(connection)
    worker, number = key[0], (key[1], message.number)
    if message.number and number == control.left_barriers.get(worker):
        control.say(connection, control.dial)  # all were let out, but it did not hear of it
        return control.take()
    control.members.pause(worker)
    control.in_barrier[key] = connection
    control.barrier_numbers[worker] = number
    control.changed(now_s)
    return control.take()


def release_barrier(control: "Control") -> None:
    """Let all out when every live worker is in, or waits for a ticket that one inside may hold (or, if there is
    such a wait, for one that waits for it)."""
    if not control.in_barrier:
        return
    waiting = {key[0] for key in (*control.in_barrier, *control.ticket_waiters)}
    if control.ticket_waiters:
        waiting |= {key[0] for key in control.state.waiting}
    if not waiting >= set(control.members.live):
        return
    for key, connection in control.in_barrier.items():
        control.left_barriers[key[0]] = control.barrier_numbers.get(key[0], key)
        _resume(control, key[0])
        control.say(connection, control.dial)
    control.in_barrier.clear()


def steps(control: "Control", connection: int, message: m.Steps, now_s: float) -> list[Action]:
    """Let a worker wait for a ticket."""
    key, budget = control.worker(connection), control.budget
    if budget.total is None:
        budget.total = message.total
    elif budget.total != message.total:
        raise Refused(
            f"this run is to make {budget.total} steps, not {message.total}: ctx.steps(total) counts "
            "those of the whole cluster since the run began, so every call names the same total"
        )
    control.ticket_waiters[key] = connection
    release_tickets(control)
    control.changed(now_s)
    return control.take()


def _grant(control: "Control", worker: int) -> bool:
    version = control.state.version
    if control.state.mode.has_rounds:
        return control.budget.grant_round(version)
    return control.budget.grant(worker, version)


def ticket_flag(control: "Control", key: Key) -> int:
    """Return whether this worker may compute one more step, for the answer that is about to leave."""
    if control.state.is_switching:
        return 0  # leave to join a round is none to make an update of one's own: it asks again in the new mode
    if key not in control.at:
        return 0  # it left since it was answered, and its ticket could not come back
    return Flag.TICKET if _grant(control, key[0]) else 0


def release_tickets(control: "Control") -> None:
    """Answer those who wait for a ticket, as far as the budget goes."""
    for key, connection in list(control.ticket_waiters.items()):
        version = control.state.version
        is_granted, is_spent = _grant(control, key[0]), control.budget.is_spent(version)
        if is_granted or is_spent:
            del control.ticket_waiters[key]
            control.say(connection, m.Ticket(is_granted, is_spent, version, control.dial))


def who_waits(control: "Control") -> set[Key]:
    """Return those who wait for others, or for the run to begin: they stand still through no fault of their own."""
    c = control
    return {*c.starters, *c.has_first, *c.in_barrier, *c.ticket_waiters, *c.standing, *c.state.waiting}
