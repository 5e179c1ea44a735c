"""Take the first values of a shard, and start the run on ps:0.

Events of the control plane. On ps:0 workers wait until the chief has initialised every shard and all that are expected
have joined; those who begin with the run wait once more, until each of them has the first values.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from paceline.cluster.membership import Phase
from paceline.errors import Refused
from paceline.server.control.actions import Action
from paceline.wire import messages as m
from paceline.wire.decisions import Key

if TYPE_CHECKING:
    from paceline.server.control.control import Control

LOST_WITH_CHIEF = (
    "some workers have trained with values that ps:0 lost together with the chief, and a new chief had begun before "
    "they came: end all tasks and start them again; --resume auto takes the newest checkpoint, if there is one"
)


def initialises(control: "Control", connection: int, message: m.Init) -> bool:
    """Return whether these values count: a second chief's do not."""
    if control.rewinding.is_by(connection):
        return True
    if control.worker(connection)[0] != 0:
        raise Refused("only the chief initialises the model")
    if control.is_initialised:
        return False
    if control.config.index == 0 and message.lineage <= control.trained_in:  # they came after its Join
        control.no_start = LOST_WITH_CHIEF
        raise Refused(control.no_start)
    return True


def initialised(control: "Control", connection: int, message: m.Init, now_s: float) -> list[Action]:
    """Note that the shard has values, unless it had some before."""
    if not control.is_initialised and not control.rewinding.is_by(connection):
        control.saving.resumed(control, message)
        control.is_initialised = True
    return control.done(connection)


def check_assigner(control: "Control", connection: int) -> None:
    """Refuse to let any other worker than the chief write."""
    if not control.rewinding.is_by(connection) and control.worker(connection)[0] != 0:
        raise Refused("only the chief may assign")


def started(control: "Control", connection: int, message: m.Start, now_s: float) -> list[Action]:
    """Let a worker wait for the run to begin, or for all others to have its first values."""
    key = control.worker(connection)
    if control.no_start:
        raise Refused(control.no_start)
    if message.has_values:
        control.takes_first.discard(key)
        control.has_first[key] = connection
    else:
        control.starters[key] = connection
        if control.wanted is not None and key not in control.takes_first:
            control.state.ready.add(key)  # it has no step to finish: the switch does not wait for it
    control.changed(now_s)
    return control.take()


def release_starters(control: "Control", now_s: float) -> None:
    """Answer those who wait to start, once the chief has initialised all shards and no worker is missing."""
    starters, members = control.starters, control.members
    if control.wanted is not None:  # who joins then joins what holds afterwards; who began with the run goes on
        _answer(control, [key for key in starters if key in control.takes_first], now_s)
        return
    if not control.is_started:
        phase = members[0].phase
        if phase in (Phase.LOST, Phase.CLOSED) and not control.is_initialised:
            is_aside = phase is Phase.CLOSED  # a chief that has trained has initialised the model before
            why = "only serves ops, so nobody initialises the model: it must train, too"
            fail_starters(control, f"the chief {why if is_aside else 'ended before it had initialised the model'}")
            return
        chief_is_ready = any(key[0] == 0 for key in starters) or phase in (Phase.CLOSED, Phase.LOST)
        if not (control.is_initialised and chief_is_ready) or members.missing:
            return
        control.is_started = True
        live = {(worker, members[worker].incarnation) for worker in members.live}
        control.takes_first = live if len(live) > 1 else set()
    _answer(control, list(starters), now_s)


def _answer(control: "Control", keys: Iterable[Key], now_s: float) -> None:
    """Answer these starters, and those that have the first values, if all have."""
    going = {key: control.starters.pop(key) for key in keys}
    if not control.takes_first:
        going |= control.has_first
        control.has_first.clear()
    for key, connection in going.items():
        reply = control.saving.started(control, key[0], now_s)
        control.say(connection, msgspec.structs.replace(reply, is_first=key in control.takes_first))


def fail_starters(control: "Control", reason: str) -> None:
    """Tell all who wait to start that the run cannot begin."""
    for connection in control.starters.values():
        control.say(connection, m.Failed(reason))
    control.starters.clear()
