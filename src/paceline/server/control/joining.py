"""Let workers join, and note that they live.

Events of the control plane. Which worker may come as which incarnation is known to cluster/membership.
"""

from typing import TYPE_CHECKING

from paceline.cluster.membership import Phase
from paceline.errors import Refused
from paceline.params.layout import difference, problems
from paceline.server.control.actions import Action, Refuse, SayClosed, Seat
from paceline.server.control.leaving import drop
from paceline.server.control.starting import LOST_WITH_CHIEF, fail_starters
from paceline.server.control.validation import options_problem
from paceline.wire import messages as m

if TYPE_CHECKING:
    from paceline.server.control.control import Control


def check_join(control: "Control", join: m.Join) -> None:
    """Refuse a worker of another run, cluster or model."""
    config, model, name = control.config, control.model, f"worker:{join.worker}"
    if join.run_id != config.run_id:
        raise Refused(f"this ps serves run {config.run_id}, not {join.run_id}")
    if not control.members.knows(join.worker):
        raise Refused(f"there is no worker {join.worker}: this cluster has {len(control.members)}")
    if (join.num_ps, join.placement) != (config.num_ps, config.placement):
        raise Refused(
            f"{name} expects {join.num_ps} ps and placement {join.placement}, "
            f"this cluster has {config.num_ps} and {config.placement}"
        )
    for flag, theirs, ours in (("mode", join.mode, config.mode.spec.name), ("wire", join.wire, config.wire)):
        if theirs != ours:
            raise Refused(
                f"{name} was started with {flag} {theirs}, this ps with {ours}: give all tasks the same --{flag}"
            )
    if lines := problems(join.layout):
        raise Refused("no ps can hold this worker's model:\n" + "\n".join(lines))
    if model is None:
        return
    if lines := difference(join.layout, model.layout):
        raise Refused("this worker's model differs from the one that is trained:\n" + "\n".join(lines))
    if join.optimizer.name != model.optimizer.name:
        raise Refused(
            f"{name} brings the optimizer {join.optimizer.name}, and the ps run "
            f"{model.optimizer.name}: give all workers the same one"
        )
    if wrong := options_problem(join.optimizer.groups, model.optimizer.groups):
        raise Refused(f"{name} brings an optimizer with {wrong}: give all workers the same groups of parameters")


def brings_model(control: "Control", join: m.Join) -> bool:
    """Return whether the shard must be made for this worker's model before it joins."""
    if control.model is not None or control.no_start or _has_closed(control, join):
        return False
    return control.members.admits(join.worker, join.incarnation)


def joined(control: "Control", connection: int, join: m.Join, now_s: float) -> list[Action]:
    """Let a worker in that comes, or comes back, after `check_join`."""
    _check_beginning(control, join)
    if control.no_start:
        return _refuse(control, connection, control.no_start)
    members, worker, key = control.members, join.worker, (join.worker, join.incarnation)
    if _has_closed(control, join):
        members[worker].incarnation = join.incarnation  # it may see to what is left to do
        control.out.append(SayClosed(connection, control.is_last))
        return control.take()
    known_as = (worker, members[worker].incarnation)
    if known_as[1] < join.incarnation and members.is_current(*known_as):
        drop(control, known_as, now_s)
    elif key in control.at:
        drop(control, key, now_s)
    never_left = members.is_current(*key) and worker in members.training  # this ps was away
    if not members.join(*key, now_s):
        return _fence(control, connection, join)
    control.gone_since_s.pop(worker, None)
    control.returning.discard(key)
    control.beats = {c: k for c, k in control.beats.items() if k[0] != worker or k == key}
    control.keys[connection] = key  # from here on the end of this connection is the end of this worker
    control.at[key] = connection
    if not never_left:
        control.enter(worker)
    control.take_model(join.layout, join.optimizer)
    control.changed(now_s)  # enough workers may be there now
    reply = m.Joined(control.is_initialised, control.state.version, control.lineage, [])
    if not control.is_initialised:
        reply = control.rewinding.asked(control, join, reply, now_s)
    control.out.append(Seat(connection, key, reply, join.optimizer.groups, join.weight))
    return control.take()


def _check_beginning(control: "Control", join: m.Join) -> None:
    """Note in which lineage a worker has trained, when a ps and the chief were lost together. A new chief that comes
    later than those who have trained is told of them; if it came first, it has begun anew, and they must not go on with
    other values in the same lineage."""
    control.trained_in = -1 if control.is_initialised else max(control.trained_in, join.trained_in)
    is_anew = control.config.index == 0 and control.is_initialised and not control.is_started
    if is_anew and join.trained_in >= control.lineage:
        control.no_start = LOST_WITH_CHIEF
        fail_starters(control, control.no_start)


def _has_closed(control: "Control", join: m.Join) -> bool:
    """Return whether this one, which did not get the answer, or an earlier start of it is done. Only ps:0 says so: a
    worker may die between closing at another ps and closing there."""
    member = control.members[join.worker]
    return control.config.index == 0 and member.phase is Phase.CLOSED and join.incarnation >= member.incarnation


def _fence(control: "Control", connection: int, join: m.Join) -> list[Action]:
    """Say why it may not come in like this; one that was given up for good is refused."""
    name, known_as = f"worker:{join.worker}", control.members[join.worker].incarnation
    if control.members.is_given_up(join.worker, join.incarnation):
        return _refuse(control, connection, f"{name} is fenced: it was given up for good")
    is_taken = control.members.is_taken(join.worker, join.incarnation)
    why = "another process has taken its place" if is_taken else "it was silent, or stood still, for too long"
    control.say(connection, m.Fenced(known_as, is_taken, f"{name} is fenced: {why}"))
    return control.take()


def _refuse(control: "Control", connection: int, reason: str) -> list[Action]:
    control.out.append(Refuse(connection, reason))
    return control.take()


def attached(control: "Control", connection: int, message: m.Attach, now_s: float) -> list[Action]:
    """Begin or go on with a worker's heartbeat. One that is not in (any more) has to join first."""
    key = (message.worker, message.incarnation)
    if not control.members.knows(message.worker) or not control.members.is_current(*key):
        raise Refused(f"worker:{message.worker} is not in, so nobody listens to its heartbeat")
    control.beats[connection] = key
    control.returning.discard(key)
    control.members.heard(*key, now_s)  # making the shard for its Join may have taken longer than a lease
    return control.done(connection)


def beat(control: "Control", connection: int, position: m.Position | None, now_s: float) -> None:
    """Note that a worker lives, and where it is in its data, if it says so.

    Called without the lock: a heartbeat must not wait for an update, or a lease would run out meanwhile."""
    key = control.beats.get(connection)
    if key is not None:
        control.members.heard(*key, now_s)
        if position is not None and position.worker == key[0]:
            control.saving.heard(position)


def asks(control: "Control", connection: int, now_s: float) -> None:
    """Note that a worker makes a cold request, so it does not stand still."""
    key = control.keys.get(connection)
    if key is not None:
        control.members.progressed(key[0], now_s)
