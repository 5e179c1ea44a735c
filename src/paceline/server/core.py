"""WHAT does one ps know? Its state, its shard, its slots and who is connected; the lock around them.

Shared by server/service (hot path) and server/desk (cold requests). `perform` makes the state's words true.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from paceline.cluster.membership import Membership
from paceline.errors import ConnectionLost
from paceline.modes import make as make_mode
from paceline.modes.base import Mode
from paceline.modes.spec import ModeSpec
from paceline.server.actions import Action, Add, Answer, Apply, Free, Part, Wake
from paceline.server.budget import Budget
from paceline.server.shard import Shard
from paceline.server.state import ShardState
from paceline.server.vectors import Slot
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.records import ModeChange, PsReport
from paceline.transport.channel import Channel
from paceline.wire.decisions import Decision, Key
from paceline.wire.frames import Flag
from paceline.wire.messages import Carried, Dial, Failed, Reply, Switched, Ticket, encode


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

    def __init__(self, config: PsConfig) -> None:
        self.config = config
        self.lock = threading.Lock()
        self.members = Membership(config.num_workers, config.expected)
        self.state = ShardState(config.mode, self.members, config.index == 0, config.min_workers)
        self.dial = Dial(0, config.mode.spec, 0)
        self.mode_changes: list[ModeChange] = []
        self.shard: Shard | None = None
        self.is_initialised = False
        self.is_started = False
        self.carried = bytearray()
        self.budget: Budget | None = None
        self.slots: dict[Key, Slot] = {}
        self.peers: dict[Key, Peer] = {}
        self.watches: dict[Key, Peer] = {}
        self.starters: dict[Key, Peer] = {}
        self.in_barrier: dict[Key, Peer] = {}
        self.ticket_waiters: dict[Key, Peer] = {}
        self.wanted: ModeSpec | None = None  # the mode that is to hold when everybody stands still
        self.switchers: list[Peer] = []  # who asked for it and waits
        self.standing: dict[Key, Peer] = {}
        self.standing_since_s = 0.0
        self.gone_since_s: dict[int, float] = {}
        self.wake_after: Callable[[float], None] = lambda after_s: None  # service's: a grace ends then
        self.ledger: Ledger | None = None  # set by whoever serves with --ledger
        self.updates = 0
        self.apply_s = 0.0
        self.bytes_in = 0
        self.bytes_out = 0

    def perform(self, actions: Sequence[Action]) -> list[tuple[Peer, Answer]]:
        """Apply and free at once; whom to answer comes back, because answering needs no lock."""
        answers = []
        for action in actions:
            if type(action) is Apply:
                assert self.shard is not None
                began = time.perf_counter()
                parts = [(self.slots[part.key], part.has_sum, part.has_slot) for part in action.parts]
                self.shard.apply(parts, action.divisor, self.state.mode.has_rounds)
                self.updates += 1
                if self.ledger is not None:
                    self._write_down(action.parts)
                self.apply_s += time.perf_counter() - began
            elif type(action) is Answer:
                peer = self.peers.get(action.key)
                if peer is not None:
                    answers.append((peer, action))
            elif type(action) is Add:
                self.slots[action.key].add_up(action.is_first)
            elif type(action) is Wake:
                self.wake_after(action.after_s)
            elif type(action) is Free:
                slot = self.slots.pop(action.key, None)
                if slot is not None:
                    slot.arena.close()
        return answers

    def _write_down(self, parts: Sequence[Part]) -> None:
        assert self.ledger is not None
        for part in parts:
            worker, incarnation = part.key
            self.ledger.write(self.updates, part.push_id, incarnation, worker, part.gradients)

    def tell(self, peer: Peer, message: Reply) -> None:
        """Answer somebody who waited. If it is gone, its own thread sees that, and nobody else suffers for it."""
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
            self.resume(key[0])
            self.tell(peer, self.dial)
        self.in_barrier.clear()

    def resume(self, worker: int) -> None:
        """It trains again, if it did not."""
        if worker not in self.members.training:
            self.members.resume(worker)
            self.state.entered(worker)

    def drop(self, key: Key) -> list[tuple[Peer, Answer]]:
        """A worker's connection ended or its lease ran out: everything that waited for it is looked at again."""
        peer = self.peers.get(key)
        for waiting in (self.starters, self.in_barrier, self.ticket_waiters, self.standing):
            waiting.pop(key, None)
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
        self.release_barrier()
        self.release_tickets()
        self.switch_if_still()
        return answers

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
        before, decisions = state.mode.spec, self.open_decisions
        self.perform(state.switch(make_mode(self.wanted, self.config.num_workers)))
        self.dial = Dial(state.turn, self.wanted, state.version, decisions)
        pause_ms = 1e3 * (now_s - self.standing_since_s) if self.standing else 0.0
        self.mode_changes.append(ModeChange(at_step=state.version, mode=str(self.wanted), pause_ms=pause_ms))
        told = Switched(before, self.wanted, state.version, pause_ms)
        self.wanted = None
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
            global_step=updates,
        )

    def report_json(self) -> bytes:
        return msgspec.json.encode(self.report())
