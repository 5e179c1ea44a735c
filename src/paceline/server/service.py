"""HOW does a ps serve? One blocking thread a connection, one lock around the deciding state, no decision of its own.

Started by launchers/serving. The way of a push:

1. its connection's thread receives the frame and, on tcp, the payload straight into the worker's slot,
2. under the lock `state` decides and `shard` applies what it decided,
3. outside the lock everybody who may go on is answered: on a lane that shares memory by whoever closed the round,
   on tcp by the connection's own thread, because sending parameters takes time.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from paceline.cluster.membership import Phase
from paceline.errors import ConnectionLost, PacelineError, ProtocolError
from paceline.server.control.actions import Answer
from paceline.server.control.described import is_ordinary, options_problem
from paceline.server.core import Core, Peer, PsConfig
from paceline.server.desk import Answers, Desk, Report
from paceline.server.memory import Memory
from paceline.transport.acceptor import Acceptor
from paceline.transport.base import Buffer
from paceline.wire.decisions import Key
from paceline.wire.frames import WITHOUT_PARAMETERS, Flag, Frame, Kind, Outcome
from paceline.wire.messages import Carried, Failed, Options, Position, PushTail, decode

TICK_S = 0.25
END_S = 2.0  # how long close() waits for the threads of connections that it has just ended
COMEBACK_S = 2.0  # for so long, or a lease, whoever was in before a ps was started again may take to come back


class Service:
    """The threads of one ps. `run` returns when every worker has closed or is gone for good."""

    def __init__(self, config: PsConfig, secret: bytes, on_report: Report, memory: Memory | None = None) -> None:
        self.core = Core(config, memory)
        self.desk = Desk(self.core, on_report)
        self._acceptor = Acceptor(secret, lambda channel: self._serve(Peer(channel)))
        self._over = threading.Event()
        self._failure: Exception | None = None
        self.on_refusal: Callable[[str], None] = lambda reason: None
        self.on_eviction: Callable[[str], None] = lambda reason: None
        self._told_wrong = ""  # by a peer, the last time
        self.is_released = True  # False while a launcher may still start a worker again, even one that has closed
        self._all_have_ended = False  # a launcher has said so
        self._began_s = time.monotonic()
        self._waking = threading.Condition()
        self._wake_s: list[float] = []
        self._has_waker = False
        self.core.wake_after = self._wake_after

    # --- life -------------------------------------------------------------------------------------------------

    def listen(self, address: str, lanes: Sequence[str]) -> None:
        """Open the doors; raises OSError when the port is taken."""
        self._acceptor.listen(address, lanes)

    def run(self, on_tick: Callable[[Core], None]) -> None:
        """Watch leases until the run is over. `on_tick` is called four times a second, without the lock."""
        try:
            while not self._over.wait(TICK_S):
                self._expire()
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
        """From a signal handler: no worker will be started again, so `run` may end once all have closed."""
        self.is_released = self._all_have_ended = True

    def stop(self) -> None:
        """From a signal handler or another thread: end `run`."""
        self._over.set()

    def close(self) -> None:
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
        """Everybody closed or lost, and their connections ended; the silent ones are given up after a while."""
        core = self.core
        now_s = time.monotonic()
        with core.lock:
            if core.peers or core.members.live or core.members.missing:
                return False
            if core.rewinding.is_under_way(now_s) and not (core.members.are_done or self._all_have_ended):
                return False
            if not self.is_released:
                return False
            since_s = {w: core.gone_since_s.get(w, self._began_s) for w in core.members.gone}  # or before we began
            waits = [
                w
                for w, gone_s in since_s.items()
                if core.members[w].phase in (Phase.GONE, Phase.FENCED) and now_s - gone_s < core.config.rejoin_s
            ]
            return core.members.is_over or not waits

    def _expire(self) -> None:
        """Give up who is silent, who stands still, and who did not come back after this ps was started again."""
        core, now_s = self.core, time.monotonic()
        with core.lock:
            for key in core.who_waits():
                core.members.progressed(key[0], now_s)
            answers: Answers = []
            for key, why in self._overdue(now_s):
                answers += core.drop(key)
                core.members.fence(*key)
                core.perform([])  # so that it is written down too
                self.on_eviction(f"worker:{key[0]} {why}")
            if core.returning and now_s - self._began_s > max(core.config.lease_s, COMEBACK_S):
                for key in core.returning:
                    answers += core.drop(key)  # not fenced: it may still come
                core.returning = set()
            answers += core.rewinding.waited(core, now_s)
            self.desk.release_starters()
        self._answer(answers, None)

    def _overdue(self, now_s: float) -> list[tuple[Key, str]]:
        """Who is to be evicted, and why. Wants the lock."""
        core, config = self.core, self.core.config
        silent = [key for key in core.members.expired(now_s, config.lease_s) if key in core.watches]
        told = [(key, f"was silent for {now_s - core.members[key[0]].heard_s:.1f} s") for key in silent]
        if config.index == 0 and core.is_started:
            for key in core.members.stalled(now_s, config.stall_s):
                if key not in silent:
                    told.append((key, f"made no progress for {core.members.still_s(key[0], now_s):.0f} s"))
        return told

    def _wake_after(self, after_s: float) -> None:
        """A grace ends then. One thread waits for all of them, and is there once the first one came."""
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
            except Exception as error:  # as in _serve: end the ps, loudly
                self._failure = self._failure or error
                self._over.set()

    def _woken(self) -> None:
        core = self.core
        with core.lock:
            answers = core.perform(core.state.look_again(time.monotonic()))
        self._answer(answers, None)

    # --- connections ------------------------------------------------------------------------------------------

    def _serve(self, peer: Peer) -> None:
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
        except Exception as error:  # state and numbers may disagree now: end the ps, loudly, before anybody waits
            self._failure = self._failure or error
            self._over.set()
        finally:
            self._ended(peer)

    def _tell_wrong(self, peer: Peer, error: ProtocolError) -> None:
        """Who sent what we do not understand; whoever sends it again after connecting again is told of once."""
        key = peer.key or peer.watches
        who = f"worker:{key[0]}" if key is not None else "a connection on which nobody has joined"
        told = f"{who}: {error}; its connection is ended"
        if told != self._told_wrong:
            self._told_wrong = told
            self.on_refusal(told)

    def _ended(self, peer: Peer) -> None:
        core = self.core
        answers: Answers = []
        with core.lock:
            core.bytes_in += peer.channel.bytes_in
            core.bytes_out += peer.channel.bytes_out
            if peer.key is not None and core.peers.get(peer.key) is peer:
                answers = core.drop(peer.key)
            # A heartbeat that ended is no death: its lease runs on, and the worker attaches again.
            if peer.watches is not None and not core.members.is_current(*peer.watches):
                core.watches.pop(peer.watches, None)
            core.switchers = [each for each in core.switchers if each is not peer]
            core.rewinding.left(peer)
            self.desk.release_starters()
        self._answer(answers, None)
        if self._is_over():
            self._over.set()

    def _beat(self, peer: Peer, frame: Frame) -> None:
        if peer.watches is not None:
            self.core.members.heard(*peer.watches, time.monotonic())
            position = decode(frame.tail) if frame.tail else None
            if isinstance(position, Position) and position.worker == peer.watches[0]:
                self.core.snapshots.heard(position)

    def _cold(self, peer: Peer, frame: Frame) -> None:
        if peer.key is not None:
            self.core.members.progressed(peer.key[0], time.monotonic())
        try:
            answers = self.desk.handle(peer, decode(frame.tail), frame)
        except (ConnectionLost, ProtocolError):
            raise
        except PacelineError as error:
            self.on_refusal(str(error))
            peer.channel.say(Failed(str(error)))
            return
        except Exception as error:  # a bug of ours: whoever asked hears of it, and the log has the traceback
            peer.channel.say(Failed(f"ps:{self.core.config.index} failed: {error!r}"))
            raise
        self._answer(answers, peer)

    # --- the hot path -----------------------------------------------------------------------------------------

    def _push(self, peer: Peer, frame: Frame) -> None:
        key = self._receive(peer, frame)
        core = self.core
        with core.lock:
            self._check_current(peer)
            is_finite = not frame.flags & Flag.NOT_FINITE
            is_late, now_s = core.is_late(frame.flags), time.monotonic()
            core.members.stepped(key[0], now_s)
            actions = core.state.push(key, frame.push_id, frame.version, is_finite, is_late, now_s)
            answers = core.perform(actions)
            if core.budget is not None:
                core.budget.give_back(key[0])
                core.release_tickets()
                core.release_barrier()
        self._answer(answers, peer)
        if answers and core.shard is not None:
            with core.lock:
                core.shard.prepare_next()
        if not peer.channel.shares_memory and not any(p is peer for p, _ in answers):
            self._await_round(peer)

    def _stage(self, peer: Peer, frame: Frame) -> None:
        key = self._receive(peer, frame)
        with self.core.lock:
            self._check_current(peer)
            answers = self.core.perform(self.core.state.stage(key, frame.push_id, frame.version))
        self._answer(answers, peer)

    def _pull(self, peer: Peer, frame: Frame) -> None:
        key = self._key(peer, frame)
        carried = decode(frame.tail) if frame.tail else None
        decisions = carried.decisions if isinstance(carried, Carried) else ()
        core = self.core
        with core.lock:
            self._check_current(peer)
            if frame.flags & Flag.COUNTED:
                answers = core.perform(core.state.count(key, frame.push_id))
            else:
                answers = core.perform(core.state.carry(key, frame.push_id, decisions))
            if frame.flags & Flag.INTO_SLOT and peer.slot is not None and core.shard is not None:
                peer.slot.parameters[:] = core.shard.memory
        self._answer(answers, peer, is_pull=True)

    def _receive(self, peer: Peer, frame: Frame) -> tuple[int, int]:
        """The payload into the worker's slot, and what the tail says about it."""
        key, slot = self._key(peer, frame), peer.slot
        assert slot is not None
        peer.wants_ticket = bool(frame.flags & Flag.WANTS_TICKET)
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
            return self.desk.shard().refusal_of(options)

    def _bucket(self, peer: Peer, frame: Frame) -> None:
        """A part of a gradient whose push comes later; only that push makes it count."""
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

    def _check_current(self, peer: Peer) -> None:
        """A frame that was in our hands when its worker was dropped, or connected again, comes too late."""
        if peer.key is None or self.core.peers.get(peer.key) is not peer:
            raise ConnectionLost("this worker was given up, or has connected again")

    def _await_round(self, peer: Peer) -> None:
        answer = peer.outbox.get()
        if answer is None:
            raise ConnectionLost("given up while it waited for its round")
        self._send(peer, answer, is_pull=False)

    # --- answering --------------------------------------------------------------------------------------------

    def _answer(self, answers: Answers, mine: Peer | None, is_pull: bool = False) -> None:
        for peer, answer in answers:
            if peer is mine or peer.channel.shares_memory:
                with suppress(ConnectionLost):  # its own thread sees the end too; the others are still to be answered
                    self._send(peer, answer, is_pull)
            else:
                peer.outbox.put(answer)

    def _send(self, peer: Peer, answer: Answer, is_pull: bool) -> None:
        core = self.core
        flags = answer.flags
        if core.budget is not None and peer.wants_ticket and not is_pull:
            with core.lock:
                flags |= core.ticket_flag(peer)
        tail = core.decisions_tail(answer)
        # Workers carry decisions between several ps, so they wait for a frame there, also when its tail is empty; and
        # one that stages does so, though the mode may have changed without it.
        has_tail = core.config.num_ps > 1 and (core.state.mode.has_rounds or answer.outcome is Outcome.STAGED)
        if peer.channel.shares_memory and not is_pull and not has_tail:
            assert peer.slot is not None
            if not peer.slot.bell.ring(answer.push_id, answer.version, answer.outcome, flags):
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
        """The parameters to send on tcp, with their version. They are copied into the worker's own slot, which is
        free by now, unless nobody can change them while they are on their way."""
        core = self.core
        assert core.shard is not None and peer.slot is not None
        is_alone = core.config.num_workers == 1
        if is_alone or (core.state.mode.is_lockstep and not is_pull):
            return answer.version, (core.shard.memory,)
        with core.lock:
            self._check_current(peer)  # else its slot may hold the gradient of a newer connection
            into = peer.slot.parameters
            into[:] = core.shard.memory
            return core.state.version, (into,)
