"""The threads and sockets of one ps: one blocking thread a connection, one lock around the core.

Started by launchers/serving. The way of a push:

1. its connection's thread receives the frame and, on tcp, the payload straight into the worker's slot,
2. under the lock the control plane decides, and the core performs its actions and writes the journal,
3. without the lock all who may go on are answered: on a lane that shares memory by the thread that closed the round,
   on tcp by the connection's own thread, because sending parameters takes time.

Nothing is sent under the lock.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from paceline.errors import ConnectionLost, PacelineError, ProtocolError
from paceline.server.control import joining, leaving
from paceline.server.control.actions import Answer
from paceline.server.control.config import PsConfig
from paceline.server.control.validation import is_ordinary, options_problem
from paceline.server.core import Core, Peer, Reply, Sends
from paceline.server.memory import Memory
from paceline.server.requests import Report, Requests
from paceline.transport.acceptor import Acceptor
from paceline.transport.base import Buffer
from paceline.transport.channel import Channel
from paceline.wire.frames import (
    ANSWERED,
    OUTCOME,
    SLEEPS,
    VERSION,
    WITHOUT_PARAMETERS,
    Flag,
    Frame,
    Kind,
    Outcome,
)
from paceline.wire.messages import Carried, Failed, Options, Position, PushTail, decode, encode

TICK_S = 0.25
END_S = 2.0  # how long close() waits for the threads of connections that it has just ended


class Service:
    """The threads of one ps. `run` returns when every worker has closed or is gone for good."""

    def __init__(self, config: PsConfig, secret: bytes, on_report: Report, memory: Memory | None = None) -> None:
        self.core = Core(config, memory)
        self.requests = Requests(self.core, on_report)
        self._acceptor = Acceptor(secret, self._connected)
        self._over = threading.Event()
        self._failure: Exception | None = None
        self.on_refusal: Callable[[str], None] = lambda reason: None
        self._told_wrong = ""  # by a peer, the last time
        self.is_released = True  # False while a launcher may still start a worker again, even one that has closed
        self._all_have_ended = False  # a launcher has said so
        self._waking = threading.Condition()
        self._wake_s: list[float] = []
        self._has_waker = False
        self.core.wake_after = self._wake_after

    # --- life -------------------------------------------------------------------------------------------------

    def listen(self, address: str, lanes: Sequence[str]) -> None:
        """Accept connections on these lanes; raises OSError when the port is taken."""
        self._acceptor.listen(address, lanes)

    def run(self, on_tick: Callable[[Core], None]) -> None:
        """Watch leases until the run is over. `on_tick` is called four times a second, without the lock."""
        try:
            while not self._over.wait(TICK_S):
                try:
                    self._expire()
                except ConnectionLost:  # as in _wake_when_due
                    break
                on_tick(self.core)
                if self.core.durable is not None:
                    with self.core.lock:
                        self.core.durable.counts()
                if self._is_over():
                    break
        finally:
            self.close()
        if self._failure is not None:
            raise self._failure

    def release(self) -> None:
        """Let `run` end once all have closed, because no worker will be started again; for a signal handler."""
        self.is_released = self._all_have_ended = True

    def stop(self) -> None:
        """End `run`, from a signal handler or another thread."""
        self._over.set()

    def close(self) -> None:
        """End all connections and their threads, and close what memory has descriptors."""
        self._acceptor.shut()
        for peer in list(self.core.peers.values()):
            peer.outbox.put(None)
        self._acceptor.wait(END_S)
        with self.core.lock:
            if self.core.shard is not None:
                self.core.shard.close()
            for slot in self.core.slots.values():
                slot.arena.close()

    def _is_over(self) -> bool:
        core = self.core
        with core.lock:
            return leaving.is_over(core.control, core.now_s(), self.is_released, self._all_have_ended)

    def _expire(self) -> None:
        core = self.core
        with core.lock:
            sends = core.perform(leaving.tick(core.control, core.now_s()))
        self._send_all(sends)

    def _wake_after(self, after_s: float) -> None:
        """Wake the control plane when a grace ends. One thread waits for all graces; it starts with the first one."""
        with self._waking:
            self._wake_s.append(time.monotonic() + after_s)
            self._waking.notify()
            if not self._has_waker:
                self._has_waker = True
                self._acceptor.start("waker", self._wake_when_due)

    def _wake_when_due(self) -> None:
        while not self._over.is_set():
            with self._waking:
                now_s = time.monotonic()
                left_s = min(self._wake_s, default=now_s + TICK_S) - now_s
                if left_s > 0:
                    self._waking.wait(min(left_s, TICK_S))
                    continue
                self._wake_s = [at_s for at_s in self._wake_s if at_s > now_s]
            try:
                self._woken()
            except ConnectionLost:  # another thread has failed, and ends the ps with its error
                self._over.set()
            except Exception as error:
                self._fail(error)

    def _woken(self) -> None:
        core = self.core
        with core.lock:
            sends = core.perform(core.control.woken(core.now_s()))
        self._send_all(sends)

    # --- connections ------------------------------------------------------------------------------------------

    def _connected(self, channel: Channel) -> None:
        self._serve(Peer(channel))

    def _serve(self, peer: Peer) -> None:
        self.core.peers[peer.id] = peer
        try:
            while True:
                frame = peer.channel.recv()
                if frame.kind == Kind.PUSH:
                    self._push(peer, frame)
                elif frame.kind == Kind.BEAT:
                    self._beat(peer, frame)
                elif frame.kind == Kind.STAGE:
                    self._stage(peer, frame)
                elif frame.kind == Kind.PULL:
                    self._pull(peer, frame)
                elif frame.kind == Kind.BUCKET:
                    self._bucket(peer, frame)
                elif frame.kind == Kind.COLD:
                    self._cold(peer, frame)
                else:
                    raise ProtocolError(f"a ps is not sent frames of kind {frame.kind}")
        except ConnectionLost:
            return  # the worker went away: it connects again, or not
        except ProtocolError as error:
            self._tell_wrong(peer, error)  # what it sent cannot be trusted: the same as if it went away
        except Exception as error:
            self._fail(error)
        finally:
            self._ended(peer)

    def _fail(self, error: Exception) -> None:
        """End the ps with this error: its state and its numbers may disagree now."""
        self._failure = self._failure or error
        self._over.set()

    def _tell_wrong(self, peer: Peer, error: ProtocolError) -> None:
        """Log who sent what cannot be decoded; once, though a worker may connect and send it again and again."""
        control = self.core.control
        key = control.keys.get(peer.id) or control.beats.get(peer.id)
        who = f"worker:{key[0]}" if key is not None else "a connection on which nobody has joined"
        told = f"{who}: {error}; its connection is ended"
        if told != self._told_wrong:
            self._told_wrong = told
            self.on_refusal(told)

    def _ended(self, peer: Peer) -> None:
        core = self.core
        with core.lock:
            core.peers.pop(peer.id, None)
            core.bytes_in += peer.channel.bytes_in
            core.bytes_out += peer.channel.bytes_out
            sends = core.perform(leaving.ended(core.control, peer.id, core.now_s()))
        self._send_all(sends)
        if self._is_over():
            self._over.set()

    def _beat(self, peer: Peer, frame: Frame) -> None:
        position = decode(frame.tail) if frame.tail else None
        where = position if isinstance(position, Position) else None
        joining.beat(self.core.control, peer.id, where, self.core.now_s())

    def _cold(self, peer: Peer, frame: Frame) -> None:
        core = self.core
        joining.asks(core.control, peer.id, core.now_s())
        try:
            sends = self.requests.handle(peer, decode(frame.tail), frame)
        except (ConnectionLost, ProtocolError):
            raise
        except PacelineError as error:
            sends = [(peer, Reply(Failed(str(error)), reason=str(error)))]
        except Exception as error:  # a bug of ours: the client is told, and the log has the traceback
            with suppress(ConnectionLost):
                peer.channel.say(Failed(f"ps:{core.config.index} failed: {error!r}"))
            raise
        self._answer(sends, peer)

    # --- the hot path -----------------------------------------------------------------------------------------

    def _push(self, peer: Peer, frame: Frame) -> None:
        key = self._receive(peer, frame)
        core = self.core
        with core.lock:
            sends = core.perform(
                core.control.pushed(peer.id, key, frame.push_id, frame.version, frame.flags, time.monotonic())
            )
        self._answer(sends, peer)
        if sends and core.durable is not None and core.shard is not None:
            with core.lock:
                core.shard.prepare_next()
        if not peer.channel.shares_memory and not any(p is peer for p, _ in sends):
            self._await_round(peer)

    def _stage(self, peer: Peer, frame: Frame) -> None:
        key = self._receive(peer, frame)
        core = self.core
        with core.lock:
            sends = core.perform(core.control.staged(peer.id, key, frame.push_id, frame.version, time.monotonic()))
        self._answer(sends, peer)

    def _pull(self, peer: Peer, frame: Frame) -> None:
        key = self._key(peer, frame)
        carried = decode(frame.tail) if frame.tail else None
        decisions = carried.decisions if isinstance(carried, Carried) else ()
        is_counted, core = bool(frame.flags & Flag.COUNTED), self.core
        with core.lock:
            sends = core.perform(
                core.control.pulled(peer.id, key, frame.push_id, decisions, is_counted, time.monotonic())
            )
            if frame.flags & Flag.INTO_SLOT and peer.slot is not None and core.shard is not None:
                peer.slot.parameters[:] = core.shard.memory
        self._answer(sends, peer, is_pull=True)

    def _receive(self, peer: Peer, frame: Frame) -> tuple[int, int]:
        """Receive the payload into the worker's slot, and take what the tail says about it."""
        key, slot = (frame.worker, frame.incarnation), peer.slot
        if peer.key != key or slot is None:
            raise ProtocolError(f"a frame of worker:{frame.worker} on a connection of {peer.key}")
        if frame.tail:
            tail = decode(frame.tail)
            if not isinstance(tail, PushTail):
                raise ProtocolError("a push whose tail is something else")
            slot.mask = tail.mask
            if tail.options is not None:
                if wrong := options_problem(tail.options, slot.options):
                    raise ProtocolError(f"a push of worker:{key[0]} with {wrong}")
                if not is_ordinary(tail.options, slot.options) and (wrong := self._refusal_of(tail.options)):
                    raise ProtocolError(f"a push of worker:{key[0]} with options that cannot be used: {wrong}")
                slot.options = tail.options
            if tail.weight is not None:
                slot.weight = tail.weight
        elif slot.mask:
            slot.mask = b""
        if not peer.channel.shares_memory and not frame.flags & (Flag.NOT_FINITE | Flag.SENT):
            peer.channel.recv_bulk(frame, slot.memory)
        return key

    def _refusal_of(self, options: Sequence[Options]) -> str:
        with self.core.lock:
            return self.core.the_shard().refusal_of(options)

    def _bucket(self, peer: Peer, frame: Frame) -> None:
        """Receive a part of a gradient whose push comes later; only that push makes it count."""
        self._key(peer, frame)
        assert peer.slot is not None
        start, stop = frame.version, frame.version + frame.bulk_bytes
        if stop > peer.slot.memory.nbytes:
            raise ProtocolError(f"a bucket up to byte {stop} of a slot of {peer.slot.memory.nbytes}")
        peer.channel.recv_bulk(frame, peer.slot.memory[start:stop])

    def _key(self, peer: Peer, frame: Frame) -> tuple[int, int]:
        if peer.key != (frame.worker, frame.incarnation):
            raise ProtocolError(f"a frame of worker:{frame.worker} on a connection of {peer.key}")
        return frame.worker, frame.incarnation

    def _await_round(self, peer: Peer) -> None:
        answer = peer.outbox.get()
        if answer is None:
            raise ConnectionLost("given up while it waited for its round")
        self._send(peer, answer, is_pull=False)

    # --- answering --------------------------------------------------------------------------------------------

    def _send_all(self, sends: Sends) -> None:
        """Send what an event of no gradient has decided."""
        if sends:
            self._answer(sends, None)

    def _answer(self, sends: Sends, mine: Peer | None, is_pull: bool = False) -> None:
        """Send without the lock; a connection that is gone ends its own thread, and no other send suffers by it."""
        for peer, answer in sends:
            if type(answer) is Reply:
                self._reply(peer, answer)
            elif peer is mine or peer.channel.shares_memory:
                try:
                    self._send(peer, answer, is_pull)  # type: ignore[arg-type]
                except ConnectionLost:
                    continue
            else:
                peer.outbox.put(answer)  # type: ignore[arg-type]

    def _reply(self, peer: Peer, reply: Reply) -> None:
        if reply.reason:
            self.on_refusal(reply.reason)
        with suppress(ConnectionLost):
            peer.channel.say(reply.message)
            if reply.arenas and peer.channel.shares_memory:
                peer.channel.stream.send_arenas(reply.arenas)

    def _send(self, peer: Peer, answer: Answer, is_pull: bool) -> None:
        core = self.core
        flags, has_rounds = answer.flags, core.control.state.mode.has_rounds
        # Workers carry decisions between several ps, so they wait for a frame there, also when its tail is empty; and
        # one that stages does so, though the mode may have changed without it.
        has_tail = core.config.num_ps > 1 and (has_rounds or answer.outcome is Outcome.STAGED)
        tail = encode(Carried(answer.decisions)) if core.config.num_ps > 1 and answer.decisions else b""
        if peer.channel.shares_memory and not is_pull and not has_tail:
            assert peer.slot is not None
            if not ring(peer.slot.bell, answer.push_id, answer.version, answer.outcome, flags):
                return
        version: int = answer.version
        bulk: Sequence[Buffer] = ()
        if not peer.channel.shares_memory and answer.outcome not in WITHOUT_PARAMETERS:
            version, bulk = self._parameters(peer, answer, is_pull)
        peer.channel.send(
            Kind.ANSWER,
            flags,
            answer.key[0],
            answer.key[1],
            outcome=answer.outcome,
            push_id=answer.push_id,
            version=version,
            tail=tail,
            bulk=bulk,
        )

    def _parameters(self, peer: Peer, answer: Answer, is_pull: bool) -> tuple[int, Sequence[Buffer]]:
        """Return the version and the parameters to send on tcp. They are copied into the worker's own slot, which is
        free by now, unless nobody can change them while they are on their way."""
        core = self.core
        assert core.shard is not None and peer.slot is not None
        is_alone = core.config.num_workers == 1
        if is_alone or (core.control.state.mode.is_lockstep and not is_pull):
            return answer.version, (core.shard.memory,)
        with core.lock:
            core.control.check_current(answer.key, peer.id)  # else its slot may hold the gradient of a newer connection
            into = peer.slot.parameters
            into[:] = core.shard.memory
            return core.control.state.version, (into,)


def ring(cells: memoryview, push_id: int, version: int, outcome: int, flags: int) -> bool:
    """Write an answer into a bell, its push id last; return whether the worker sleeps, so that a frame must wake it.

    A worker writes its push id to SLEEPS before it blocks, and reads ANSWERED once more after that. A processor may let
    both sides miss each other; a blocked worker reads again whenever its read times out, so that costs a moment, never
    a hang.

    >>> cells = memoryview(bytearray(64)).cast("Q")
    >>> ring(cells, push_id=7, version=3, outcome=0, flags=4)
    False
    >>> cells[ANSWERED], cells[VERSION], cells[OUTCOME] & 0xFF, cells[OUTCOME] >> 8
    (7, 3, 0, 4)
    """
    cells[VERSION] = version
    cells[OUTCOME] = outcome | flags << 8
    cells[ANSWERED] = push_id
    return cells[SLEEPS] == push_id
