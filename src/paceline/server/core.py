"""One ps: its control plane, its numbers, its journal and its ledger, and the lock around them.

`perform` makes the actions of an event true, in this order: records, the journal, jobs, all else. What is to be sent
comes back, because it is sent without the lock. Shared by server/service (gradients) and server/requests (the rest).
"""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import msgspec

from paceline.cluster.cores import usable_cores
from paceline.errors import ConnectionLost, ProtocolError, Refused
from paceline.params.arena import Arena
from paceline.params.layout import Layout
from paceline.params.placement import place
from paceline.server import recovery
from paceline.server.control import control as control_plane
from paceline.server.control import questions
from paceline.server.control.actions import (
    Action,
    Add,
    Answer,
    Apply,
    Copy,
    End,
    Evicted,
    Free,
    Job,
    Refuse,
    Say,
    SayClosed,
    SayCopied,
    Seat,
    SetVersion,
    Store,
    Wake,
)
from paceline.server.control.config import PsConfig
from paceline.server.control.validation import problem
from paceline.server.copies import Copies, part_of
from paceline.server.journal import Durable
from paceline.server.ledger_writer import PsLedger
from paceline.server.memory import Memory
from paceline.server.numbers.gradients import Slot
from paceline.server.numbers.shard import Shard
from paceline.telemetry.records import PsReport
from paceline.transport.base import Buffer
from paceline.transport.channel import Channel
from paceline.wire import messages as m
from paceline.wire.decisions import Key

LOOK_S = 1e-3  # a step that takes longer has more to wait for than being woken
_CONNECTIONS = count(1)


@dataclass(slots=True, eq=False)
class Peer:
    """One connection. `key` and `slot` are set when a worker has joined on it."""

    channel: Channel
    key: Key | None = None
    slot: Slot | None = None
    id: int = field(default_factory=_CONNECTIONS.__next__)
    outbox: "queue.SimpleQueue[Answer | None]" = field(default_factory=queue.SimpleQueue)


@dataclass(frozen=True, slots=True)
class Reply:
    """A cold reply that is ready to be sent, and the memory that goes with it."""

    message: m.Reply
    arenas: Sequence[Arena] = ()
    reason: str = ""  # a refusal's, which is logged


Sends = list[tuple[Peer, Answer | Reply]]


class Core:
    """All that changes in a ps. The caller must hold `lock`, unless a method says otherwise."""

    def __init__(self, config: PsConfig, memory: Memory | None = None) -> None:
        self.config = config
        self.lock = threading.RLock()
        self.control = control_plane.make(config, secrets.randbits(31), time.monotonic())
        self.peers: dict[int, Peer] = {}
        self.shard: Shard | None = None
        self.slots: dict[Key, Slot] = {}
        self.carried = bytearray()
        self.unsaved = b""  # the chief's buffers that no checkpoint holds, as they were at its prepare()
        self.buffers: dict[int, bytes] = {}  # of each worker but the chief, as last heard
        self.copies = Copies()
        self.ledger: PsLedger | None = None  # set by launchers/serving, with --ledger
        self.memory: Memory = memory or Memory()
        self.durable = Durable(self) if self.memory.is_kept else None
        self.is_broken = False  # an event was not performed to its end: nothing that is known here is true
        self.apply_s = 0.0
        self.bytes_in = 0
        self.bytes_out = 0
        self.wake_after: Callable[[float], None] = lambda after_s: None  # service's: a grace ends then
        self.on_eviction: Callable[[str], None] = lambda reason: None
        self.on_update: Callable[[int], None] | None = None  # --chaos: an update is made, and no worker was told

    # --- performing -------------------------------------------------------------------------------------------

    def perform(self, actions: Sequence[Action], block: bytearray | None = None) -> Sends:
        """Make the actions of one event true; return what is to be sent without the lock. `block`: came with it."""
        if self.is_broken:
            raise ConnectionLost("this ps failed in the middle of an update, and is ending")
        self.is_broken = True  # until all is done: what was decided must not be built on if it is not
        jobs: list[Job] = []
        copy: Copy | None = None
        copy_after = 0
        is_push = True
        for action in actions:
            kind = type(action)
            if kind is Apply or kind is Add:
                jobs.append(action)  # type: ignore[arg-type]
            elif kind is Copy:
                copy, copy_after = action, len(jobs)  # type: ignore[assignment]
            elif type(action) is Store and block is not None:
                self.store(action.worker, block)
            elif type(action) is SetVersion and self.shard is not None:
                self.shard.set_version(action.version)
            is_push = is_push and (kind is Apply or kind is Answer or kind is Wake)
        if self.ledger is not None:
            self.ledger.decided(actions, self.control.state.version)
        durable, turn = self.durable, None
        if durable is not None:
            is_push = is_push and len(jobs) == 1 and not self.control.state.staged
            if is_push and type(jobs[0]) is Apply and jobs[0].round is None:
                turn = durable.announce_push(jobs[0])
            elif jobs:
                turn = durable.announce(jobs)
            else:
                durable.write()
        if len(jobs) == 1 and copy is None:
            self._do(jobs[0], turn << 8 if turn is not None else 0)
        elif jobs or copy is not None:
            self.do_jobs(jobs, turn, copy=copy, copy_after=copy_after)
        if turn is not None and durable is not None:
            if is_push:
                durable.journal.fulfil()
            else:
                durable.fulfil(jobs)
        if jobs and self.on_update is not None:
            self.on_update(self.control.state.version)
        sends: Sends = []
        for action in actions:
            if type(action) is Answer:
                peer = self.peers.get(self.control.at.get(action.key, 0))
                if peer is not None:
                    sends.append((peer, action))
            elif type(action) is not Apply:
                self._effect(action, sends)
        self.is_broken = False
        return sends

    def do_jobs(
        self,
        jobs: Sequence[Job],
        turn: int | None,
        done: int | None = None,
        copy: Copy | None = None,
        copy_after: int = 0,
    ) -> None:
        """Do jobs to their end, and copy everything after so many of them. `turn`: as they were announced; `done`:
        after a death, so many were done, and the next one perhaps half."""
        for number in range(len(jobs) + 1):
            if copy is not None and number == copy_after:
                assert self.shard is not None
                has_averages = self.config.ema is not None
                self.copies.take(self.shard, copy.number, copy.version, bytes(self.carried), has_averages)
            if number == len(jobs):
                return
            job = jobs[number]
            if done is None or number >= done:
                self._do(job, turn << 8 | number if turn is not None else 0, is_again=done is not None)
                if self.durable is not None:
                    self.durable.journal.did_job(number + 1)
            elif type(job) is Add:  # its numbers are there, but not what is known of them
                slot = self.slots[job.key]
                slot.added(slot.adding(job.is_first))

    def _do(self, job: Job, number: int = 0, is_again: bool = False) -> None:
        assert self.shard is not None
        began = time.perf_counter()
        if type(job) is Apply:
            parts = []
            for part in job.parts:
                parts.append((self.slots[part.key], part.has_sum, part.has_slot))
            self.shard.apply(parts, job.divisor, job.round is not None, number, is_again)
        elif type(job) is Add:
            self.shard.add_up(self.slots[job.key], job.is_first, number, is_again)
        self.apply_s += time.perf_counter() - began

    def _effect(self, action: Action, sends: Sends) -> None:
        """Do what is neither a job nor an answer to a gradient."""
        if type(action) is Wake:
            self.wake_after(action.after_s)
        elif type(action) is Free:
            slot = self.slots.pop(action.key, None)
            if slot is not None:
                slot.free()
        elif type(action) is End:
            self._end(action.connection)
        elif type(action) is Evicted:
            self.on_eviction(action.reason)
        elif type(action) is Seat:
            self._seat(action, sends)
        elif isinstance(action, Say | Refuse | SayClosed | SayCopied):
            peer = self.peers.get(action.connection)
            if peer is not None:
                sends.append((peer, self._reply(action)))

    def _reply(self, action: Say | Refuse | SayClosed | SayCopied) -> Reply:
        if type(action) is Say:
            return Reply(action.message)
        if type(action) is Refuse:
            return Reply(m.Failed(action.reason), reason=action.reason)
        if type(action) is SayClosed:
            return Reply(m.Closed(is_last=action.is_last, report=msgspec.json.encode(self.report())))
        assert type(action) is SayCopied
        copy = self.copies.newest
        known = {"pause_ms": copy.pause_ms, "has_averages": copy.averages is not None, "optimizer": copy.optimizer}
        return Reply(msgspec.structs.replace(action.reply, **known))

    def _end(self, connection: int) -> None:
        peer = self.peers.get(connection)
        if peer is not None:
            peer.outbox.put(None)
            peer.channel.stream.shutdown()
        self._look()

    def _seat(self, action: Seat, sends: Sends) -> None:
        """Give a worker its slot: the one that an earlier connection of it had, or a new one."""
        assert self.shard is not None
        slot = self.slots.get(action.key)
        if slot is None:
            slot = self.slots[action.key] = self.new_slot(action.key)
            slot.options, slot.weight = action.options, action.weight
        peer = self.peers[action.connection]
        peer.key, peer.slot = action.key, slot
        self._look()
        arenas = [self.shard.arena, slot.arena]
        reply = msgspec.structs.replace(action.reply, segment_bytes=[arena.size_bytes for arena in arenas])
        if self.durable is not None:
            self.durable.write()  # its slot is known
        sends.append((peer, Reply(reply, arenas)))

    def _look(self) -> None:
        """Spin for the next push before sleeping, with one worker on this host and a core for each task. With more
        workers there is mostly one to serve, and their threads would be in each other's way."""
        workers = [self.peers[connection] for connection in self.control.at.values()]
        is_alone = self.config.may_look and len(workers) == 1 and usable_cores() > self.config.num_ps
        for peer in workers:
            peer.channel.stream.look_s = LOOK_S if is_alone and peer.channel.shares_memory else 0.0

    # --- numbers ----------------------------------------------------------------------------------------------

    def make_shard(self, layout: Layout, optimizer: m.OptimizerSpec) -> Shard:
        """Make the numbers of this ps, for the model that the first worker brought."""
        c = self.config
        plan = place(layout, c.num_ps, c.placement)
        self.shard = Shard(layout, plan, c.index, optimizer, c.wire, c.master, c.ema, self.memory)
        if c.owns_process:
            self.shard.choose_threads()
        return self.shard

    def new_slot(self, key: Key) -> Slot:
        """Make a slot, or find the one that an earlier process had."""
        assert self.shard is not None
        return self.shard.new_slot(f"{key[0]}.{key[1]}")

    def free_unused(self) -> None:
        """Free the slots of workers that left while this ps was dead."""
        for key in list(self.slots):
            if not self.control.members.is_current(*key) and key not in self.control.state.staged:
                self.slots.pop(key).free()

    def the_shard(self) -> Shard:
        """Return the shard; refuse what is asked for before there is one."""
        if self.shard is None:
            raise Refused("no worker has brought a model yet")
        return self.shard

    def store(self, worker: int, block: bytearray) -> None:
        """Keep a worker's buffers; the chief's are all carried tensors."""
        if worker:
            self.buffers[worker] = bytes(block)
            return
        self.carried = block
        self.copies.carry(bytes(block))
        if self.durable is not None:
            self.durable.carried()

    def assign(self, message: m.Assign, block: bytearray) -> None:
        """Take what the chief writes."""
        shard, what = self.the_shard(), message.what
        if what in ("parameters", "written") and len(block) == shard.size_bytes:
            shard.assign(memoryview(block), is_written=what == "written")
        elif what == "ema" and len(block) == shard.size_bytes:
            shard.load_averages(memoryview(block))
        elif what == "carried" and message.worker is not None and len(block) == shard.layout.own_bytes:
            self.buffers[message.worker] = bytes(block)
            self.control.saving.has_buffers.add(message.worker)
        elif what == "carried" and len(block) == len(self.carried):
            self.carried = block
            if self.durable is not None:
                self.durable.carried()
        elif what == "unsaved":
            self.unsaved = bytes(block)
            if self.durable is not None:
                self.durable.unsaved()
        elif what == "slots":
            if wrong := problem(message.slots, shard.layout, len(block)):
                raise Refused(f"this state cannot be loaded: {wrong}")
            shard.load_slots(message.slots, memoryview(block))
        else:
            raise ProtocolError(f"{len(block)} bytes are no {what} of this shard")

    def fetch(self, message: m.Fetch, key: Key | None) -> tuple[m.Fetched, list[Buffer]]:
        """Return a consistent copy of what is asked for by this worker, or by a client (None)."""
        shard, what = self.the_shard(), message.what
        entries: list[m.SlotEntry] = []
        bulk: list[Buffer]
        if what in ("parameters", "ema"):
            if message.tensor is not None and not 0 <= message.tensor < len(shard.layout.trained):
                raise Refused(f"there is no trained tensor {message.tensor}")
            bulk = [shard.copy_of(message.tensor, is_averaged=what == "ema")]
        elif what == "carried":
            own = self.buffers.get(key[0]) if key is not None else None
            bulk = [bytes(shard.layout.with_own(self.carried, own) if own else self.carried)]
        elif what == "unsaved":
            bulk = [self.unsaved]
        elif what == "slots":
            entries, views = shard.slots()
            bulk = [bytes(view) for view in views]
        else:
            raise Refused(f"a ps holds parameters, slots, carried, unsaved and ema, not {what}")
        return m.Fetched(self.control.state.version, entries), bulk

    @contextmanager
    def fetched(self, message: m.Fetch) -> Iterator[tuple[m.Fetched, memoryview | bytes]]:
        """Hold a part of a copy, which does not change inside. Takes the lock itself, for a moment."""
        with self.lock:
            copy = self.copies.read(message.number)
            part = part_of(copy, message, self.buffers)
            copy.readers += 1
        try:
            yield part
        finally:
            with self.lock:
                copy.readers -= 1

    def now_s(self) -> float:
        """Return the time that events are given."""
        return time.monotonic()

    # --- the ledger, and after a death ------------------------------------------------------------------------

    def ledger_position(self) -> int | None:
        """Return where the ledger goes on: behind what is known here; None: nothing is, so where it ended."""
        return recovery.ledger_position(self.durable) if self.durable is not None else None

    def recover(self) -> bool:
        """Take up what an earlier process of this ps left in its memory, if it left any."""
        if self.durable is None or not recovery.recover(self, self.durable):
            return False
        self.perform(self.control.woken(time.monotonic()))  # a round that is due may be in its grace
        return True

    def report(self) -> PsReport:
        """Return what this ps did so far."""
        peers = self.peers.values()
        return questions.report(
            self.control,
            self.apply_s,
            self.bytes_in + sum(peer.channel.bytes_in for peer in peers),
            self.bytes_out + sum(peer.channel.bytes_out for peer in peers),
        )
