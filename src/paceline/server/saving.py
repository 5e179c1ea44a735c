"""WHO may save a run, and bring it back? What a ps answers to the worker that writes, and to the one that restores.

Called by server/desk, which has the table of all requests. The copies themselves are server/snapshots', going back is
server/rewinding's. Both workers come on connections of their own, so what they say of themselves is checked here.
"""

from typing import TYPE_CHECKING

from paceline.errors import ProtocolError, Refused
from paceline.wire import messages as m
from paceline.wire.frames import Frame

if TYPE_CHECKING:
    from paceline.server.core import Peer
    from paceline.server.desk import Answers, Desk


def position(desk: "Desk", peer: "Peer", message: m.Position, frame: Frame) -> "Answers":
    """Take a worker's position after the update that is to be saved, without an answer. It brings the worker's buffers;
    the chief's brings all carried tensors, if they have changed."""
    layout = desk.shard().layout
    if frame.bulk_bytes and frame.bulk_bytes != (layout.own_bytes if message.worker else layout.carried_bytes):
        raise ProtocolError(f"{frame.bulk_bytes} bytes are no carried tensors of this model")
    block = bytearray(frame.bulk_bytes)
    peer.channel.recv_bulk(frame, memoryview(block))
    with desk.core.lock:
        if peer.key is not None and peer.key[0] == message.worker:
            desk.core.snapshots.note(message, desk.core.state.mode.has_rounds)
            if block:
                desk.core.snapshots.carry(desk.core, message.worker, block)
    return []


def copy(desk: "Desk", peer: "Peer", message: m.Copy, frame: Frame) -> "Answers":
    """From the worker that writes a checkpoint, on a connection of its own."""
    if frame.bulk_bytes and (message.worker or frame.bulk_bytes != desk.shard().layout.carried_bytes):
        raise ProtocolError(
            f"{frame.bulk_bytes} bytes from worker:{message.worker} are no carried tensors of the chief"
        )
    block = bytearray(frame.bulk_bytes)
    if block:
        peer.channel.recv_bulk(frame, memoryview(block))
    with desk.core.lock:
        check_writer(desk, peer, message.worker, message.incarnation)
        if block:
            desk.core.snapshots.carry(desk.core, message.worker, block)
        reply = desk.core.snapshots.asked(desk.core, message)
    peer.channel.say(reply)
    return []


def free_copy(desk: "Desk", peer: "Peer", message: m.FreeCopy, frame: Frame) -> "Answers":
    with desk.core.lock:
        check_writer(desk, peer, message.worker, message.incarnation)
        desk.core.snapshots.free(desk.core)
    peer.channel.say(m.Done())
    return []


def check_writer(desk: "Desk", peer: "Peer", worker: int, incarnation: int) -> None:
    """It saves on a connection of its own, also while its other one is away for a moment, or has closed."""
    is_other = peer.key not in (None, (worker, incarnation))
    if is_other or not desk.core.members.counts(worker, incarnation):
        raise Refused(f"worker:{worker} is another one by now, or none: only a worker of the run may save")


def rewind(desk: "Desk", peer: "Peer", message: m.Rewind, frame: Frame) -> "Answers":
    """From a worker that has joined the ps without memory; this one may know it as one that was fenced, or not
    yet, but as no newer one."""
    key = (message.worker, message.incarnation)
    with desk.core.lock:
        if peer.key not in (None, key) or not desk.core.members.may_come(*key):
            raise Refused(f"worker:{message.worker} is another one by now, or none: it has no values to bring")
        answers = desk.core.rewinding.begin(desk.core, peer, message)
    desk.core.tell(peer, m.Done())
    return answers


def restored(desk: "Desk", peer: "Peer", message: m.Restored, frame: Frame) -> "Answers":
    with desk.core.lock:
        desk.core.rewinding.end(desk.core, peer, message)
        desk.core.tell(peer, m.Done())
        desk.release_starters()
    return []
