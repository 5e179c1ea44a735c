"""Let workers go: their connection ends, they close, they are lost, or they are evicted; and say when a run is over.

Events of the control plane.
"""

from typing import TYPE_CHECKING

from paceline.cluster.membership import Phase, last_incarnation
from paceline.server.control import starting, switching, waiting
from paceline.server.control.actions import Action, End, Evicted, SayClosed
from paceline.wire import messages as m
from paceline.wire.decisions import Key

if TYPE_CHECKING:
    from paceline.server.control.control import Control

COMEBACK_S = 2.0  # for so long, or a lease, workers that were in before a ps was started again may take to come back


def drop(control: "Control", key: Key, now_s: float) -> None:
    """Take out a worker whose connection ended or whose lease ran out, and look again at all that waited for it."""
    c = control
    for waiters in (c.starters, c.has_first, c.in_barrier, c.ticket_waiters, c.standing):
        waiters.pop(key, None)
    control.takes_first.discard(key)
    control.wants_ticket.discard(key)
    was_live = control.members.is_current(*key)
    connection = control.at.pop(key, None)
    control.do(control.state.left(key, now_s), now_s)
    if was_live:
        control.gone_since_s[key[0]] = now_s
        control.budget.give_back(key[0])
    if connection is not None:
        control.out.append(End(connection))
    waiting.release_barrier(control)
    waiting.release_tickets(control)
    switching.switch_if_still(control, now_s)


def ended(control: "Control", connection: int, now_s: float) -> list[Action]:
    """Forget a connection that is gone."""
    key = control.keys.pop(connection, None)
    if key is not None and control.at.get(key) == connection:
        drop(control, key, now_s)
    # A heartbeat that ended is no death: its lease runs on, and the worker attaches again.
    beat = control.beats.get(connection)
    if beat is not None and not control.members.is_current(*beat):
        del control.beats[connection]
    if connection in control.switchers:
        control.switchers.remove(connection)
    control.rewinding.left(connection)
    starting.release_starters(control, now_s)
    return control.take()


def closed(control: "Control", connection: int, message: m.Close, now_s: float) -> list[Action]:
    """Note that a worker has done its share."""
    worker = control.worker(connection)[0]
    control.members.close(worker)
    control.budget.give_back(worker)
    control.changed(now_s)
    control.out.append(SayClosed(connection, control.is_last))
    return control.take()


def serves(control: "Control", connection: int, message: m.Serves, now_s: float) -> list[Action]:
    """Note that a worker only serves ops."""
    if control.members.stand_aside(message.worker, message.incarnation):
        control.changed(now_s)
    return control.done(connection)


def lost(control: "Control", connection: int, message: m.Lost, now_s: float) -> list[Action]:
    """Give up a worker that no launcher will start again."""
    member = control.members[message.worker] if control.members.knows(message.worker) else None
    last = last_incarnation(message.incarnation) if message.incarnation else None
    if member is not None and member.incarnation <= (last or member.incarnation):
        if member.phase in (Phase.TRAINING, Phase.PAUSED):
            drop(control, (message.worker, member.incarnation), now_s)
        control.members.lose(message.worker, last)
        control.changed(now_s)
    return control.done(connection)


def tick(control: "Control", now_s: float) -> list[Action]:
    """Give up workers that are silent or stand still, and those that did not come back to a ps that was started
    again."""
    for key in waiting.who_waits(control):
        control.members.progressed(key[0], now_s)
    for key, why in _overdue(control, now_s):
        drop(control, key, now_s)
        control.members.fence(*key)
        control.out.append(Evicted(f"worker:{key[0]} {why}"))
    if control.returning and now_s - control.began_s > max(control.config.lease_s, COMEBACK_S):
        for key in control.returning:
            drop(control, key, now_s)  # not fenced: it may still come
        control.returning = set()
    control.rewinding.waited(control, now_s)
    starting.release_starters(control, now_s)
    return control.take()


def _overdue(control: "Control", now_s: float) -> list[tuple[Key, str]]:
    """Return who is to be evicted, and why."""
    members, config, beats = control.members, control.config, set(control.beats.values())
    silent = [key for key in members.expired(now_s, config.lease_s) if key in beats]
    overdue = [(key, f"was silent for {now_s - members.pulses[key[0]].heard_s:.1f} s") for key in silent]
    if config.index == 0 and control.is_started:
        for key in members.stalled(now_s, config.stall_s):
            if key not in silent:
                overdue.append((key, f"made no progress for {members.still_s(key[0], now_s):.0f} s"))
    return overdue


def is_over(control: "Control", now_s: float, is_released: bool, all_have_ended: bool) -> bool:
    """Return whether all workers have closed or are lost, and their connections have ended; silent ones are given
    up after a while. `is_released`: no launcher starts one again; `all_have_ended`: a launcher has said so."""
    members = control.members
    if control.at or members.live or members.missing or not is_released:
        return False
    if now_s < control.rewinding.over_s and not (members.are_done or all_have_ended):
        return False
    waits = [
        worker
        for worker in members.gone
        if members[worker].phase in (Phase.GONE, Phase.FENCED)
        and now_s - control.gone_since_s.get(worker, control.began_s) < control.config.rejoin_s  # or before we began
    ]
    return members.is_over or not waits
