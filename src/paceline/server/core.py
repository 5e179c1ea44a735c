"""WHAT does one ps know? Its state, its shard, its slots and who is connected; the lock around them.

Shared by server/service (hot path) and server/desk (cold requests). `perform` makes the state's words true.
"""

import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from paceline.cluster.cores import usable_cores
from paceline.cluster.membership import Membership
from paceline.errors import ConnectionLost
from paceline.modes import make as make_mode
from paceline.modes.base import Mode
from paceline.modes.spec import ModeSpec
from paceline.params.layout import Layout
from paceline.params.placement import place
from paceline.server.control.actions import Action, Add, Answer, Apply, Copy, Free, Wake
from paceline.server.control.budget import Budget
from paceline.server.control.state import ShardState
from paceline.server.durable import Durable, recover
from paceline.server.memory import Memory, Unkept
from paceline.server.rewinding import Rewinding
from paceline.server.shard import Shard
from paceline.server.snapshots import Snapshots
from paceline.server.vectors import Slot
from paceline.server.written import PsLedger
from paceline.telemetry.records import ModeChange, PsReport
from paceline.transport.channel import Channel
from paceline.wire.decisions import Decision, Key
from paceline.wire.frames import Flag
from paceline.wire.messages import Carried, Dial, Failed, OptimizerSpec, Reply, Switched, Ticket, encode

LOOK_S = 1e-3  # a step that takes longer has more to wait for than being woken


@dataclass(frozen=True, slots=True)
class PsConfig:
    """What a ps is told when it starts."""

    index: int
    num_ps: int
    num_workers: int
    run_id: str
    mode: Mode
    placement: str
    lease_s: float
    expected: int | None = None  # workers that must come before training starts; None: all
    min_workers: int = 1
    ema: float | None = None
    wire: str = "float32"
    master: str = "float32"
    save_every: str = "none"
    stall_s: float | None = None  # None: the default of cluster/membership, 0: never
    rejoin_s: float = 15.0  # for so long a worker that went away without a word may come back, when nobody else is in
    may_look: bool = True  # for the next push before it sleeps, where that is of use
    owns_process: bool = False  # else torch's threads are the user's own
    cluster: dict[str, list[str]] = field(default_factory=dict)  # jobs and addresses, for those who ask


@dataclass(slots=True, eq=False)
class Peer:
    """One connection. `key` and `slot` are set when a worker has joined on it."""

    channel: Channel
    key: Key | None = None
    slot: Slot | None = None
    watches: Key | None = None  # a heartbeat connection: for whom it beats
    wants_ticket: bool = False
    outbox: "queue.SimpleQueue[Answer | None]" = field(default_factory=queue.SimpleQueue)


class Core:
    """All that changes in a ps; every method wants `lock` held unless it says otherwise."""

    def __init__(self, config: PsConfig, memory: Memory | None = None) -> None:
        self.config = config
        self.lock = threading.RLock()
        self.is_broken = False  # an update failed half way: nothing that is known here is true
        self.members = Membership(config.num_workers, config.expected)
        self.state = ShardState(config.mode, self.members, config.index == 0, config.min_workers)
        self.dial = Dial(0, config.mode.spec, 0)
        self.mode_changes: list[ModeChange] = []
        self.shard: Shard | None = None
        self.is_initialised = False
        self.is_started = False
        self.trained_in = -1  # while it has no values: the newest lineage of those who have trained with it
        self.no_start = ""  # why nobody may start here any more
        self.carried = bytearray()
        self.unsaved = b""  # the chief's buffers that no checkpoint holds, as they were at its prepare()
        self.budget: Budget | None = None
        self.slots: dict[Key, Slot] = {}
        self.peers: dict[Key, Peer] = {}
        self.watches: dict[Key, Peer] = {}
        self.starters: dict[Key, Peer] = {}
        self.takes_first: set[Key] = set()  # the run began with them, and they do not have its first values yet
        self.has_first: dict[Key, Peer] = {}  # they do, and wait for the others
        self.in_barrier: dict[Key, Peer] = {}
        self.barrier_numbers: dict[int, Key] = {}  # worker -> (incarnation, which of its barriers it came to last)
        self.left_barriers: dict[int, Key] = {}  # and which it was let out of
        self.ticket_waiters: dict[Key, Peer] = {}
        self.wanted: ModeSpec | None = None  # the mode that is to hold when everybody stands still
        self.switchers: list[Peer] = []  # who asked for it and waits
        self.standing: dict[Key, Peer] = {}
        self.standing_since_s = 0.0
        self.gone_since_s: dict[int, float] = {}
        self.wake_after: Callable[[float], None] = lambda after_s: None  # service's: a grace ends then
        self.on_update: Callable[[int], None] | None = None  # --chaos: an update is made, and nobody knows it
        self.ledger: PsLedger | None = None  # set by write_down, with --ledger
        self.memory: Memory = memory or Unkept()
        self.seed = secrets.randbits(31)  # of the data's order
        self.lineage = 0
        self.snapshots = Snapshots(config.save_every, config.index == 0)
        self.rewinding = Rewinding()
        self.returning: set[Key] = set()  # they were in when an earlier life of this ps ended, and are to come back
        self.durable = Durable(self) if self.memory.is_kept else None
        self.updates = 0
        self.apply_s = 0.0
        self.bytes_in = 0
        self.bytes_out = 0

    def perform(self, actions: Sequence[Action]) -> list[tuple[Peer, Answer]]:
        """Do the jobs, write down what is known now, then free; whom to answer comes back, because answering needs
        no lock."""
        self._refuse_if_broken()
        jobs = [action for action in actions if type(action) is Apply or type(action) is Add]
        copy_after = _jobs_before_copy(actions)
        if self.ledger is not None:
            self.ledger.decided(actions, self.updates, self.state)
        if self.durable is None:
            for number, job in enumerate(jobs):
                self._do(job)
                if number + 1 == copy_after:
                    self.snapshots.take(self)
        elif len(jobs) == 1 and type(jobs[0]) is Apply and not self.state.mode.has_rounds and not self.state.staged:
            self._do(jobs[0], self.durable.announce_push(jobs[0]) << 8)
            self.durable.journal.fulfil()
        elif jobs:
            self.do_jobs(jobs, self.durable.announce(jobs), copy_after=copy_after)
        else:
            self.durable.write()
        if self.on_update is not None and jobs:
            self.on_update(self.state.version)
        if jobs:
            self.snapshots.updated(self)
        answers = []
        for action in actions:
            if type(action) is Answer:
                peer = self.peers.get(action.key)
                if peer is not None:
                    if self.snapshots.flags and action.is_push:  # who pulls does not look at flags
                        action = self.snapshots.marked(action)
                    answers.append((peer, action))
            elif type(action) is Wake:
                self.wake_after(action.after_s)
            elif type(action) is Free:
                slot = self.slots.pop(action.key, None)
                if slot is not None:
                    slot.free()
        return answers

    def do_jobs(
        self, jobs: Sequence[Apply | Add], turn: int, done: int | None = None, copy_after: int | None = None
    ) -> None:
        """What was announced, to its end; `done`: after a death, so many were done, and the next one perhaps half.
        `copy_after`: so many jobs later everything is copied."""
        assert self.durable is not None
        for number, job in enumerate(jobs):
            if done is None or number >= done:
                self._do(job, turn << 8 | number, is_again=done is not None)
                self.durable.journal.did_job(number + 1)
                if number + 1 == copy_after:
                    self.snapshots.take(self)
                continue
            if type(job) is Add:  # its numbers are there, but not what is known of them
                slot = self.slots[job.key]
                slot.added(slot.adding(job.is_first))
            self._did(job)
        self.durable.fulfil(jobs)

    def _do(self, job: Apply | Add, number: int = 0, is_again: bool = False) -> None:
        assert self.shard is not None
        began = time.perf_counter()
        self.is_broken = True
        if type(job) is Apply:
            parts = [(self.slots[part.key], part.has_sum, part.has_slot) for part in job.parts]
            self.shard.apply(parts, job.divisor, self.state.mode.has_rounds, number, is_again)
        elif type(job) is Add:
            self.shard.add_up(self.slots[job.key], job.is_first, number, is_again)
        self.is_broken = False
        self._did(job)
        self.apply_s += time.perf_counter() - began

    def _did(self, job: Apply | Add) -> None:
        if type(job) is Apply:
            self.updates += 1

    def _refuse_if_broken(self) -> None:
        if self.is_broken:
            raise ConnectionLost("this ps failed in the middle of an update, and is ending")

    def make_shard(self, layout: Layout, optimizer: OptimizerSpec) -> Shard:
        """The numbers of this ps, for the model that the first worker brought."""
        c = self.config
        plan = place(layout, c.num_ps, c.placement)
        self.shard = Shard(layout, plan, c.index, optimizer, c.wire, c.master, c.ema, self.memory)
        if c.owns_process:
            self.shard.choose_threads()
        return self.shard

    def new_slot(self, key: Key) -> Slot:
        assert self.shard is not None
        return self.shard.new_slot(f"{key[0]}.{key[1]}")

    def free_unused(self) -> None:
        """After a death: slots of those who left without our seeing it."""
        for key in list(self.slots):
            if not self.members.is_current(*key) and key not in self.state.staged:
                self.slots.pop(key).free()

    def now_s(self) -> float:
        return time.monotonic()

    def ledger_position(self) -> int | None:
        """Where the ledger goes on: behind what is known here; None: nothing is, so where it ended."""
        return self.durable.ledger_position() if self.durable is not None else None

    def recover(self) -> bool:
        """Take up what an earlier life of this ps left in its memory, if it left any."""
        if self.durable is None or not recover(self):
            return False
        self.perform(self.state.look_again(self.now_s()))  # a round that is due may be in its grace
        return True

    def write_down(self, ledger: PsLedger, is_kept: bool = False) -> None:
        """From now on everything goes into that ledger; `is_kept`: this ps knows what an earlier one knew."""
        self.ledger = ledger
        self.members.on_change = ledger.changed
        ledger.started(self.state.version, is_kept)
        ledger.mode(self.state.mode, self.state.turn, self.state.version)

    def entered(self, worker: int) -> None:
        """It trains from now on."""
        self.state.entered(worker)
        if self.ledger is not None:
            clock, incarnation = self.state.clocks.get(worker, 0), self.members[worker].incarnation
            self.ledger.entered(worker, incarnation, clock, self.state.version)

    def tell(self, peer: Peer, message: Reply) -> None:
        """Answer somebody who waited, after what it is told is written down. If it is gone, its own thread sees that,
        and nobody else suffers for it."""
        with self.lock:
            self._refuse_if_broken()
            if self.durable is not None:
                self.durable.write()
        with suppress(ConnectionLost):
            peer.channel.say(message)

    def is_late(self, flags: int) -> bool:
        """Whether this is a step of ctx.steps(total) that comes when the cluster has made them all."""
        if self.budget is None or not flags & Flag.WANTS_TICKET:
            return False
        return self.budget.is_spent(self.state.version)

    def ticket_flag(self, peer: Peer) -> int:
        """Whether this worker may compute one more step, for the answer that is about to leave."""
        if self.budget is None or not peer.wants_ticket or peer.key is None:
            return 0
        if self.state.is_switching:
            return 0  # leave to join a round is none to make an update of one's own: it asks again in the new mode
        if self.peers.get(peer.key) is not peer:
            return 0  # it left since it was answered; nobody would bring this ticket back
        if self.state.mode.has_rounds:
            return Flag.TICKET if self.budget.grant_round(self.state.version) else 0
        return Flag.TICKET if self.budget.grant(peer.key[0], self.state.version) else 0

    def release_tickets(self) -> None:
        """Answer those who wait for a ticket, as far as it goes."""
        if self.budget is None:
            return
        for key, peer in list(self.ticket_waiters.items()):
            version = self.state.version
            if self.state.mode.has_rounds:
                is_granted = self.budget.grant_round(version)
            else:
                is_granted = self.budget.grant(key[0], version)
            is_spent = self.budget.is_spent(version)
            if is_granted or is_spent:
                del self.ticket_waiters[key]
                self.tell(peer, Ticket(is_granted, is_spent, version, self.dial))

    def release_barrier(self) -> None:
        """Let everybody out when every live worker is in, or waits for a ticket that somebody inside may hold (or,
        in bounded mode, for one who waits for that ticket)."""
        if not self.in_barrier:
            return
        waiting = {key[0] for key in (*self.in_barrier, *self.ticket_waiters)}
        if self.ticket_waiters:
            waiting |= {key[0] for key in self.state.waiting}
        if not waiting >= set(self.members.live):
            return
        for key, peer in self.in_barrier.items():
            self.left_barriers[key[0]] = self.barrier_numbers.get(key[0], key)
            self.resume(key[0])
            self.tell(peer, self.dial)
        self.in_barrier.clear()

    def resume(self, worker: int) -> None:
        """It trains again, if it did not."""
        if worker not in self.members.training:
            self.members.resume(worker)
            self.entered(worker)

    def who_waits(self) -> set[Key]:
        """Those who wait for others, or for the run to begin: they stand still through no fault of their own."""
        at_start = {*self.starters, *self.has_first}
        return {*at_start, *self.in_barrier, *self.ticket_waiters, *self.standing, *self.state.waiting}

    def drop(self, key: Key) -> list[tuple[Peer, Answer]]:
        """A worker's connection ended or its lease ran out: everything that waited for it is looked at again."""
        peer = self.peers.get(key)
        for waiting in (self.starters, self.has_first, self.in_barrier, self.ticket_waiters, self.standing):
            waiting.pop(key, None)
        self.takes_first.discard(key)
        was_live = self.members.is_current(*key)
        answers = self.perform(self.state.left(key, time.monotonic()))
        if was_live:
            self.gone_since_s[key[0]] = time.monotonic()
            if self.budget is not None:
                self.budget.give_back(key[0])
        if peer is not None:
            del self.peers[key]
            peer.outbox.put(None)
            peer.channel.stream.shutdown()
            self.look()
        self.release_barrier()
        self.release_tickets()
        self.switch_if_still()
        return answers

    def look(self) -> None:
        """With one worker, on this host, and a core for each task, the next push is looked for before we sleep. With
        more workers there is mostly one to serve, and their threads would be in each other's way."""
        is_alone = self.config.may_look and len(self.peers) == 1 and usable_cores() > self.config.num_ps
        for peer in self.peers.values():
            peer.channel.stream.look_s = LOOK_S if is_alone and peer.channel.shares_memory else 0.0

    # --- another mode -----------------------------------------------------------------------------------------

    def switch_if_still(self) -> None:
        """Once nobody is between two steps: the mode that was asked for holds, and everybody is told."""
        state = self.state
        if self.wanted is None or state.rounds.votes or state.waiting:
            return
        still = {key[0] for key in (*self.standing, *self.in_barrier, *self.ticket_waiters, *self.starters)}
        if not self.members.training <= still:
            return
        if self.members.is_over:
            self.give_up_switch("the run ended before its mode could change")
            return
        now_s = time.monotonic()
        before, after, decisions = state.mode.spec, self.wanted, self.open_decisions
        actions = state.switch(make_mode(after, self.config.num_workers))
        self.dial = Dial(state.turn, after, state.version, decisions)
        self.wanted = None
        self.perform(actions)
        if self.ledger is not None:
            self.ledger.mode(state.mode, state.turn, state.version)
        pause_ms = 1e3 * (now_s - self.standing_since_s) if self.standing else 0.0
        self.mode_changes.append(ModeChange(at_step=state.version, mode=str(after), pause_ms=pause_ms))
        told = Switched(before, after, state.version, pause_ms)
        for peer in self.standing.values():
            self.tell(peer, self.dial)
        for peer in self.switchers:
            self.tell(peer, told)
        self.standing.clear()
        self.switchers.clear()
        self.release_tickets()

    def give_up_switch(self, reason: str) -> None:
        self.wanted, self.state.is_switching = None, False
        for peer in self.switchers:
            self.tell(peer, Failed(reason))
        self.switchers.clear()

    @property
    def open_decisions(self) -> tuple[Decision, ...]:
        """What some shard may not have seen yet. What came with the dial has been carried everywhere once there was
        an update in its mode: before that everybody who goes on carries it, into the next mode too."""
        return self.dial.decisions if self.state.version == self.dial.version else self.state.rounds.open_decisions

    def lacks(self) -> int:
        """So many more workers are needed before training goes on; 0 on a shard that only obeys."""
        return self.state.lacks if self.config.index == 0 and self.is_started else 0

    def decisions_tail(self, answer: Answer) -> bytes:
        if self.config.num_ps == 1 or not answer.decisions:
            return b""
        return encode(Carried(answer.decisions))

    def fail_starters(self, reason: str) -> None:
        for peer in self.starters.values():
            self.tell(peer, Failed(reason))
        self.starters.clear()

    def report(self) -> PsReport:
        """What this ps did so far."""
        updates = self.state.version
        return PsReport(
            index=self.config.index,
            updates=updates,
            apply_ms=1e3 * self.apply_s / updates if updates else None,
            bytes_in=self.bytes_in + sum(p.channel.bytes_in for p in self.peers.values()),
            bytes_out=self.bytes_out + sum(p.channel.bytes_out for p in self.peers.values()),
            staleness={
                str(worker): {str(s): n for s, n in sorted(counts.items())}
                for worker, counts in sorted(self.state.staleness.items())
            },
            waited_s={str(worker): waited_s for worker, waited_s in sorted(self.state.waited_s.items())},
            discarded={str(worker): count for worker, count in sorted(self.state.discarded.items())},
            not_finite={str(worker): count for worker, count in sorted(self.state.not_finite.items())},
            modes=list(self.mode_changes),
            pushes={str(worker): push_id for worker, (_, push_id) in sorted(self.state.applied.items())},
            steps={str(worker): steps for worker, steps in sorted(self.snapshots.shares.all(self.state).items())},
            global_step=updates,
        )

    def report_json(self) -> bytes:
        return msgspec.json.encode(self.report())


def _jobs_before_copy(actions: Sequence[Action]) -> int | None:
    """After how many of the jobs everything is to be copied; a carry may bring further updates after that one."""
    count = 0
    for action in actions:
        if type(action) is Copy:
            return count
        count += type(action) is Apply or type(action) is Add
    return None
