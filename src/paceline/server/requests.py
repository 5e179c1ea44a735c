"""Serve cold requests: everything that is asked of a ps beside gradients.

Called by server/service with a connection's cold message. Most requests are events of the control plane as they are
(EVENTS), or questions (QUESTIONS); those that bring or take numbers are methods here. A refusal is raised as a
PacelineError and becomes a `Failed` reply. What is to be sent comes back: it leaves without the lock.
"""

from collections.abc import Callable
from typing import Any

from paceline.errors import ProtocolError, Refused
from paceline.server.control import joining, leaving, questions, rewinding, roles, saving, starting, switching, waiting
from paceline.server.control.control import Control
from paceline.server.core import Core, Peer, Reply, Sends
from paceline.wire import messages as m
from paceline.wire.frames import Frame

WORKER_SEND_S = 600.0  # a worker that evaluates between two steps does not read; lease and stall say when it is out
Report = Callable[[str, bytes], None]

EVENTS: dict[type, Callable[..., Any]] = {
    m.Start: starting.started,
    m.Attach: joining.attached,
    m.Pause: waiting.paused,
    m.Resume: waiting.resumed,
    m.Barrier: waiting.barrier,
    m.Steps: waiting.steps,
    m.Serves: leaving.serves,
    m.Lost: leaving.lost,
    m.Ready: switching.ready,
    m.SwitchMode: switching.switch_mode,
    m.Align: switching.align,
    m.FreeCopy: saving.free_copy,
    m.SaveSoon: saving.save_soon,
    m.Restored: rewinding.restored,
}
QUESTIONS: dict[type, Callable[[Control, float], m.Reply]] = {
    m.AskStatus: questions.status,
    m.AskDecisions: questions.decisions,
    m.Describe: questions.describe,
}


class Requests:
    """Cold requests of one ps."""

    def __init__(self, core: Core, on_report: Report) -> None:
        self.core = core
        self._on_report = on_report

    def handle(self, peer: Peer, message: object, frame: Frame) -> Sends:
        """Do what is asked, with the lock held where state is touched; return what is to be sent."""
        core, kind = self.core, type(message)
        method: Callable[..., Sends] | None = _METHODS.get(kind)
        if method is None and kind not in EVENTS and kind not in QUESTIONS:
            raise ProtocolError(f"a ps is not asked for {kind.__name__}")
        roles.check(peer.channel.role, kind)
        if method is not None:
            return method(self, peer, message, frame)
        with core.lock:
            if kind in QUESTIONS:
                return [(peer, Reply(QUESTIONS[kind](core.control, core.now_s())))]
            return core.perform(EVENTS[kind](core.control, peer.id, message, core.now_s()))

    # --- a model and its first values -------------------------------------------------------------------------

    def join(self, peer: Peer, message: m.Join, frame: Frame) -> Sends:
        """Check the worker, make the shard for the first one, and let it in."""
        core = self.core
        with core.lock:
            joining.check_join(core.control, message)
            if core.shard is not None:
                if wrong := core.shard.refusal_of(message.optimizer.groups):
                    raise Refused(f"the optimizer of worker:{message.worker} cannot make an update on a ps: {wrong}")
            elif joining.brings_model(core.control, message):
                self._make_shard(message)
            sends = core.perform(joining.joined(core.control, peer.id, message, core.now_s()))
            if peer.key is not None:
                peer.channel.stream.set_send_timeout(WORKER_SEND_S)
        return sends

    def _make_shard(self, message: m.Join | m.Rewind) -> None:
        core = self.core
        try:
            core.make_shard(message.layout, message.optimizer)
        except (ValueError, TypeError, LookupError, OverflowError, OSError, MemoryError, RuntimeError) as error:
            raise Refused(f"no ps can hold the model of worker:{message.worker}: {error}") from error
        core.control.take_model(message.layout, message.optimizer)
        if core.durable is not None:
            core.durable.model()

    def init(self, peer: Peer, message: m.Init, frame: Frame) -> Sends:
        """Take the chief's first values, or those that a restoring worker brings. A second chief's are read and thrown
        away."""
        core, shard = self.core, self.core.the_shard()
        carried = shard.layout.carried_bytes if core.config.index == 0 else 0
        block = bytearray(shard.size_bytes + carried)
        peer.channel.recv_bulk(frame, memoryview(block))
        with core.lock:
            if starting.initialises(core.control, peer.id, message):
                values = memoryview(block)[: shard.size_bytes]
                is_read = core.control.rewinding.is_by(peer.id)  # workers may be reading what lies there
                (shard.assign if is_read else shard.fill)(values)
                core.store(0, block[shard.size_bytes :])
            return core.perform(starting.initialised(core.control, peer.id, message, core.now_s()))

    def rewind(self, peer: Peer, message: m.Rewind, frame: Frame) -> Sends:
        """Begin to take values from a worker."""
        core = self.core
        with core.lock:
            rewinding.check_rewind(core.control, peer.id, message)
            if core.shard is None:
                self._make_shard(message)
            return core.perform(rewinding.rewind(core.control, peer.id, message, core.now_s()))

    # --- reading and writing numbers --------------------------------------------------------------------------

    def fetch(self, peer: Peer, message: m.Fetch, frame: Frame) -> Sends:
        """Send a consistent copy of what is asked for; bulk is sent here, while it cannot change."""
        core = self.core
        if message.is_copy:
            with core.fetched(message) as (told, block):
                peer.channel.say(told, bulk=[block] if len(block) else [])
            return []
        with core.lock:
            told, bulk = core.fetch(message, peer.key)
        peer.channel.say(told, bulk=bulk)
        return []

    def assign(self, peer: Peer, message: m.Assign, frame: Frame) -> Sends:
        """Take what the chief writes."""
        core, shard = self.core, self.core.the_shard()
        limit = 16 * max(shard.size_bytes, 1 << 16) + shard.layout.carried_bytes
        if message.what == "unsaved":
            limit = m.MAX_UNSAVED_BLOCK
        if frame.bulk_bytes > limit:
            raise ProtocolError(f"{frame.bulk_bytes} bytes to assign, more than {limit} can be meant")
        block = bytearray(frame.bulk_bytes)
        peer.channel.recv_bulk(frame, memoryview(block))
        with core.lock:
            starting.check_assigner(core.control, peer.id)
            core.assign(message, block)
        return [(peer, Reply(m.Done()))]

    def position(self, peer: Peer, message: m.Position, frame: Frame) -> Sends:
        """Take a worker's position, without an answer; it may bring its buffers, the chief all carried tensors."""
        layout = self.core.the_shard().layout
        if frame.bulk_bytes and frame.bulk_bytes != (layout.own_bytes if message.worker else layout.carried_bytes):
            raise ProtocolError(f"{frame.bulk_bytes} bytes are no carried tensors of this model")
        return self._with_buffers(saving.position, peer, message, frame)

    def copy(self, peer: Peer, message: m.Copy, frame: Frame) -> Sends:
        """Answer the worker that writes a checkpoint."""
        size, worker = frame.bulk_bytes, message.worker
        if size and (worker or size != self.core.the_shard().layout.carried_bytes):
            raise ProtocolError(f"{size} bytes from worker:{worker} are no carried tensors of the chief")
        return self._with_buffers(saving.copy, peer, message, frame)

    def _with_buffers(self, event: Callable[..., Any], peer: Peer, message: m.Position | m.Copy, frame: Frame) -> Sends:
        core, block = self.core, bytearray(frame.bulk_bytes)
        if block:
            peer.channel.recv_bulk(frame, memoryview(block))
        with core.lock:
            actions = event(core.control, peer.id, message, core.now_s(), bool(block))
            return core.perform(actions, block)

    # --- the end ----------------------------------------------------------------------------------------------

    def close(self, peer: Peer, message: m.Close, frame: Frame) -> Sends:
        """Close a worker that is done; it brings its report and those of the other ps."""
        core = self.core
        with core.lock:
            worker, _ = core.control.worker(peer.id)
        if message.report:
            self._on_report(f"worker:{worker}", message.report)
        for index, report in enumerate(message.ps_reports, start=1):
            self._on_report(f"ps:{index}", report)
        with core.lock:
            return core.perform(leaving.closed(core.control, peer.id, message, core.now_s()))


_METHODS: dict[type, Callable[..., Sends]] = {
    m.Join: Requests.join,
    m.Init: Requests.init,
    m.Rewind: Requests.rewind,
    m.Fetch: Requests.fetch,
    m.Assign: Requests.assign,
    m.Position: Requests.position,
    m.Copy: Requests.copy,
    m.Close: Requests.close,
}
