"""HOW does a ps change its mode? What it answers to whoever wants that, to workers that stand still, and that carry it.

Called by server/desk, which has the table of all requests; when everybody stands still the core makes the change. What
the workers do meanwhile is in docs/protocol.md, "Another mode". Nothing here blocks.
"""

import time
from typing import TYPE_CHECKING

from paceline.errors import Refused
from paceline.modes import make as make_mode
from paceline.modes.spec import check
from paceline.wire import messages as m
from paceline.wire.frames import Frame

if TYPE_CHECKING:
    from paceline.server.core import Peer
    from paceline.server.desk import Answers, Desk


def ready(desk: "Desk", peer: "Peer", message: m.Ready, frame: Frame) -> "Answers":
    """It stands still until the mode has changed; if nothing is to change any more, it goes on at once."""
    core = desk.core
    with core.lock:
        desk.worker(peer)
        assert peer.key is not None
        if core.wanted is None:
            core.tell(peer, core.dial)
            return []
        if not core.standing:
            core.standing_since_s = time.monotonic()
        core.standing[peer.key] = peer
        core.state.ready.add(peer.key)
        return desk.changed()


def switch_mode(desk: "Desk", peer: "Peer", message: m.SwitchMode, frame: Frame) -> "Answers":
    """From outside the training, to ps:0: everybody finishes a step, then the new mode holds."""
    core = desk.core
    with core.lock:
        now = core.state.mode.spec
        if core.config.index != 0:
            raise Refused("only ps:0 changes the mode")
        if (message.spec.name == "local") != (now.name == "local"):
            raise Refused(
                f"a run in mode {now.name} cannot go on in mode {message.spec.name}: in mode local the optimizer "
                "runs on the workers, else on the ps, and its state cannot move while they train"
            )
        check(message.spec, core.config.num_workers)
        if not core.is_started:
            raise Refused("the run has not started to train yet")
        if not core.members.live and not core.members.missing:
            raise Refused("the run is over: nobody trains any more")
        if message.spec == now and core.wanted is None:
            core.tell(peer, m.Switched(now, now, core.state.version, 0.0))
            return []
        if core.wanted not in (None, message.spec):
            core.give_up_switch(f"another change was asked for meanwhile: {message.spec}")
        if message.waits:
            core.switchers.append(peer)
        else:
            core.tell(peer, m.Switched(now, message.spec, core.state.version, None))
        core.wanted = message.spec
        answers = core.perform(core.state.begin_switch(time.monotonic()))
        core.switch_if_still()
        desk.release_starters()
    return answers


def align(desk: "Desk", peer: "Peer", message: m.Align, frame: Frame) -> "Answers":
    """On every shard but ps:0: the mode that holds there holds here too."""
    core, dial = desk.core, message.dial
    with core.lock:
        desk.worker(peer)
        mode = make_mode(dial.spec, core.config.num_workers)
        is_new = dial.turn > core.state.turn
        core.perform(core.state.align(mode, dial.turn, dial.version))
        if core.ledger is not None and is_new:
            core.ledger.mode(mode, dial.turn, core.state.version)
        reply = m.Aligned(core.state.offset, core.state.version)
    peer.channel.say(reply)
    return []


def decisions(desk: "Desk", peer: "Peer", message: m.AskDecisions, frame: Frame) -> "Answers":
    with desk.core.lock:
        reply = m.Carried(desk.core.open_decisions)
    peer.channel.say(reply)
    return []
