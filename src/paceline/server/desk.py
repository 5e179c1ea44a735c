"""WHAT else may be asked of a ps? Joining, starting, pausing, reading, assigning, closing: everything not hot.

Called by server/service with a connection's cold message; answers on that connection, now or when it is due. Changing
the mode is in server/switching, saving and going back in server/saving; the table at the end has all of them.
Refusals are raised as PacelineError and become a `Failed` reply; nothing here blocks.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from paceline.cluster.membership import Phase, last_incarnation
from paceline.errors import ConnectionLost, ProtocolError, Refused
from paceline.params.layout import difference, problems
from paceline.server import saving, switching
from paceline.server.control import roles
from paceline.server.control.actions import Answer
from paceline.server.control.budget import Budget
from paceline.server.control.described import options_problem, problem
from paceline.server.core import Core, Peer
from paceline.server.shard import Shard
from paceline.wire import messages as m
from paceline.wire.decisions import Key
from paceline.wire.frames import Frame

WORKER_SEND_S = 600.0  # a worker that evaluates between two steps does not read; lease and stall say when it is out
LOST_WITH_CHIEF = (
    "some workers have trained with values that ps:0 lost together with the chief, and a new chief had begun before "
    "they came: end all tasks and start them again; --resume auto takes the newest checkpoint, if there is one"
)
Answers = list[tuple[Peer, Answer]]
Report = Callable[[str, bytes], None]


class Desk:
    """Cold requests of one ps."""

    def __init__(self, core: Core, on_report: Report) -> None:
        self.core = core
        self._on_report = on_report

    def handle(self, peer: Peer, message: object, frame: Frame) -> Answers:
        """Do what is asked, with the lock held where state is touched. Returns whom to answer because of it."""
        method: Callable[..., Answers] | None = _HANDLERS.get(type(message))
        if method is None:
            raise ProtocolError(f"a ps is not asked for {type(message).__name__}")
        roles.check(peer.channel.role, type(message))
        return method(self, peer, message, frame)

    # --- joining ----------------------------------------------------------------------------------------------

    def join(self, peer: Peer, join: m.Join, frame: Frame) -> Answers:
        """1. the same run and layout; 2. not fenced; 3. a slot; 4. the answer, with memory where it is shared."""
        core = self.core
        with core.lock:
            self._check(join)
            self._check_beginning(join)
            if self._has_closed(join):
                core.members[join.worker].incarnation = join.incarnation  # it may see to what is left to do
                core.tell(peer, self._closed())
                return []
            key = (join.worker, join.incarnation)
            current = core.members[join.worker]
            answers = []
            if current.incarnation < join.incarnation and core.members.is_current(join.worker, current.incarnation):
                answers = core.drop((join.worker, current.incarnation))
            elif key in core.peers:
                answers = core.drop(key)
            never_left = core.members.is_current(*key) and join.worker in core.members.training  # this ps was away
            if not core.members.join(join.worker, join.incarnation, time.monotonic()):
                core.tell(peer, self._fenced(join))
                return answers
            core.gone_since_s.pop(join.worker, None)
            core.returning.discard(key)
            core.watches = {k: watch for k, watch in core.watches.items() if k[0] != join.worker or k == key}
            peer.key = key  # from here on the end of this connection is the end of this worker
            peer.channel.stream.set_send_timeout(WORKER_SEND_S)
            core.peers[key] = peer
            core.look()
            if not never_left:
                core.entered(join.worker)
            if core.shard is None:
                self._make_shard(join)
                if core.durable is not None:
                    core.durable.model(join.layout, join.optimizer)
            assert core.shard is not None
            slot = core.slots.get(key)
            if slot is None:
                slot = core.slots[key] = core.new_slot(key)
                slot.options, slot.weight = join.optimizer.groups, join.weight
            peer.slot = slot
            answers += self.changed()  # enough workers may be there now
            arenas = [core.shard.arena, slot.arena]
            sizes = [arena.size_bytes for arena in arenas]
            reply = m.Joined(core.is_initialised, core.state.version, core.lineage, sizes)
            if not core.is_initialised:
                reply = core.rewinding.asked(core, join, reply, time.monotonic())
        with suppress(ConnectionLost):  # its own thread sees that; `answers` are for others
            peer.channel.say(reply)
            if peer.channel.shares_memory:
                peer.channel.stream.send_arenas(arenas)
        return answers

    def _make_shard(self, join: m.Join) -> None:
        try:
            self.core.make_shard(join.layout, join.optimizer)
        except (ValueError, TypeError, LookupError, OverflowError, OSError, MemoryError, RuntimeError) as error:
            raise Refused(f"no ps can hold the model of worker:{join.worker}: {error}") from error

    def _has_closed(self, join: m.Join) -> bool:
        """Whether this one, who did not hear the answer, or an earlier start of it is done. ps:0 alone says so: one may
        die between closing at another ps and closing there."""
        member = self.core.members[join.worker]
        return self.core.config.index == 0 and member.phase is Phase.CLOSED and join.incarnation >= member.incarnation

    def _closed(self) -> m.Closed:
        members = self.core.members
        return m.Closed(is_last=not members.live and not members.missing, report=self.core.report_json())

    def _fenced(self, join: m.Join) -> m.Fenced:
        """Why it may not come in like this; one that was given up for good is refused."""
        member, name = self.core.members[join.worker], f"worker:{join.worker}"
        if self.core.members.is_given_up(join.worker, join.incarnation):
            raise Refused(f"{name} is fenced: it was given up for good")
        is_taken = self.core.members.is_taken(join.worker, join.incarnation)
        why = "another process has taken its place" if is_taken else "it was silent, or stood still, for too long"
        return m.Fenced(member.incarnation, is_taken, f"{name} is fenced: {why}")

    def _check(self, join: m.Join) -> None:
        core = self.core
        if join.run_id != core.config.run_id:
            raise Refused(f"this ps serves run {core.config.run_id}, not {join.run_id}")
        if not core.members.knows(join.worker):
            raise Refused(f"there is no worker {join.worker}: this cluster has {len(core.members)}")
        if (join.num_ps, join.placement) != (core.config.num_ps, core.config.placement):
            raise Refused(
                f"worker:{join.worker} expects {join.num_ps} ps and placement {join.placement}, "
                f"this cluster has {core.config.num_ps} and {core.config.placement}"
            )
        for flag, theirs, ours in (
            ("mode", join.mode, core.config.mode.spec.name),
            ("wire", join.wire, core.config.wire),
        ):
            if theirs != ours:
                raise Refused(
                    f"worker:{join.worker} was started with {flag} {theirs}, this ps with {ours}: "
                    f"give all tasks the same --{flag}"
                )
        if lines := problems(join.layout):
            raise Refused("no ps can hold this worker's model:\n" + "\n".join(lines))
        if core.shard is not None and (lines := difference(join.layout, core.shard.layout)):
            raise Refused("this worker's model differs from the one that is trained:\n" + "\n".join(lines))
        if core.shard is not None and join.optimizer.name != core.shard.optimizer_name:
            raise Refused(
                f"worker:{join.worker} brings the optimizer {join.optimizer.name}, and the ps run "
                f"{core.shard.optimizer_name}: give all workers the same one"
            )
        if core.shard is not None and (wrong := options_problem(join.optimizer.groups, core.shard.options)):
            raise Refused(
                f"worker:{join.worker} brings an optimizer with {wrong}: give all workers the same groups of parameters"
            )
        if core.shard is not None and (wrong := core.shard.refusal_of(join.optimizer.groups)):
            raise Refused(f"the optimizer of worker:{join.worker} cannot make an update on a ps: {wrong}")

    def _check_beginning(self, join: m.Join) -> None:
        """A ps and the chief were lost together. A new chief that comes later than those who have trained hears of
        them; if it came first, it has begun anew, and they must not go on with other values in the same lineage."""
        core = self.core
        core.trained_in = -1 if core.is_initialised else max(core.trained_in, join.trained_in)
        if core.config.index == 0 and core.is_initialised and not core.is_started and join.trained_in >= core.lineage:
            core.no_start = LOST_WITH_CHIEF
            core.fail_starters(core.no_start)
        if core.no_start:
            raise Refused(core.no_start)

    def init(self, peer: Peer, message: m.Init, frame: Frame) -> Answers:
        """The chief's first values. A second chief's are read and thrown away."""
        core, shard = self.core, self.shard()
        carried = shard.layout.carried_bytes if core.config.index == 0 else 0
        block = bytearray(shard.size_bytes + carried)
        peer.channel.recv_bulk(frame, memoryview(block))
        with core.lock:
            if core.rewinding.is_by(peer):
                shard.assign(memoryview(block)[: shard.size_bytes])
                core.carried = block[shard.size_bytes :]
                if core.durable is not None:
                    core.durable.carried()
            elif self.worker(peer) != 0:
                raise Refused("only the chief initialises the model")
            elif not core.is_initialised:
                if core.config.index == 0 and message.lineage <= core.trained_in:  # they came after its Join
                    core.no_start = LOST_WITH_CHIEF
                    raise Refused(core.no_start)
                shard.fill(memoryview(block)[: shard.size_bytes])
                core.carried = block[shard.size_bytes :]
                core.snapshots.restored(core, shard, message)
                core.is_initialised = True
                if core.durable is not None:
                    core.durable.carried()
        core.tell(peer, m.Done())
        return []

    def start(self, peer: Peer, message: m.Start, frame: Frame) -> Answers:
        core = self.core
        with core.lock:
            self.worker(peer)
            assert peer.key is not None
            if core.no_start:
                raise Refused(core.no_start)
            if message.has_values:
                core.takes_first.discard(peer.key)
                core.has_first[peer.key] = peer
                return self.changed()
            core.starters[peer.key] = peer
            if core.wanted is not None and peer.key not in core.takes_first:
                core.state.ready.add(peer.key)  # it has no step to finish: nobody waits for it
            return self.changed()

    def release_starters(self) -> None:
        """Let everybody go once the chief has initialised all shards and nobody is missing. Wants the lock."""
        core = self.core
        if core.wanted is not None:  # who joins then joins what holds afterwards; who began with the run goes on
            self._let_go(key for key in core.starters if key in core.takes_first)
            return
        chief = core.members[0]
        if not core.is_started:
            if chief.phase in (Phase.LOST, Phase.CLOSED) and not core.is_initialised:
                is_aside = chief.phase is Phase.CLOSED  # whoever has trained has initialised the model before
                told = "only serves ops, so nobody initialises the model: it must train, too"
                core.fail_starters(f"the chief {told if is_aside else 'ended before it had initialised the model'}")
                return
            chief_is_ready = any(k[0] == 0 for k in core.starters) or chief.phase in (
                Phase.CLOSED,
                Phase.LOST,
            )
            if not (core.is_initialised and chief_is_ready) or core.members.missing:
                return
            core.is_started = True
            live = {(worker, core.members[worker].incarnation) for worker in core.members.live}
            core.takes_first = live if len(live) > 1 else set()
        self._let_go(core.starters)

    def _let_go(self, keys: Iterable[Key]) -> None:
        """Answer these starters, and those that have the first values, if all have."""
        core = self.core
        going = {key: core.starters.pop(key) for key in list(keys)}
        if not core.takes_first:
            going |= core.has_first
            core.has_first.clear()
        for key, peer in going.items():
            core.tell(peer, replace(core.snapshots.started(core, peer), is_first=key in core.takes_first))

    def attach(self, peer: Peer, message: m.Attach, frame: Frame) -> Answers:
        """A heartbeat begins, or goes on. Whoever is not in (any more) has to join first."""
        key = (message.worker, message.incarnation)
        with self.core.lock:
            if not self.core.members.knows(message.worker) or not self.core.members.is_current(*key):
                raise Refused(f"worker:{message.worker} is not in, so nobody listens to its heartbeat")
            peer.watches = key
            self.core.watches[key] = peer
            self.core.returning.discard(key)
            # The lease begins now: making the shard for its Join may have taken longer than a lease.
            self.core.members.heard(*key, time.monotonic())
        peer.channel.say(m.Done())
        return []

    def status(self, peer: Peer, message: m.AskStatus, frame: Frame) -> Answers:
        core = self.core
        with core.lock:
            awaited: set[int] = set()
            if core.state.rounds.votes:
                awaited |= core.members.training - core.state.rounds.votes.keys()
            if core.in_barrier:
                awaited |= set(core.members.live) - {key[0] for key in core.in_barrier}
            missing = core.members.missing or sorted(key[0] for key in core.takes_first if core.has_first)
            if not missing and not core.is_started and not any(k[0] == 0 for k in core.starters):
                missing = [0]
            if core.wanted is not None:
                awaited |= core.members.training - {key[0] for key in core.standing}
            if core.state.waiting and not core.state.mode.has_rounds:
                awaited |= core.members.training - {key[0] for key in core.state.waiting}
            wanted = str(core.wanted) if core.wanted is not None else ""
            live, told = core.members.live, [self._awaited(worker) for worker in sorted(awaited)]
            ended = core.snapshots.ended(core)
            reply = m.Status(missing, sorted(awaited), core.state.version, live, core.lacks(), wanted, told, ended)
        peer.channel.say(reply)
        return []

    def _awaited(self, worker: int) -> m.Awaited:
        """What one that others wait for does, as far as a ps can know."""
        config, member, now_s = self.core.config, self.core.members[worker], time.monotonic()
        silent_s, still_s = now_s - member.heard_s, self.core.members.still_s(worker, now_s)
        if silent_s > config.lease_s / 2:
            return m.Awaited(worker, "is silent", silent_s, config.lease_s - silent_s)
        if member.phase is not Phase.TRAINING:
            return m.Awaited(worker, f"is {member.phase.value}", still_s)
        limit_s = member.stall_limit_s(config.stall_s)
        return m.Awaited(worker, "lives, and computes its step", still_s, limit_s - still_s if limit_s else None)

    # --- while it trains --------------------------------------------------------------------------------------

    def pause(self, peer: Peer, message: m.Pause, frame: Frame) -> Answers:
        with self.core.lock:
            self.core.members.pause(self.worker(peer))
            answers = self.changed()
        self.core.tell(peer, m.Done())
        return answers

    def resume(self, peer: Peer, message: m.Resume, frame: Frame) -> Answers:
        with self.core.lock:
            self.core.resume(self.worker(peer))
            self.core.tell(peer, self.core.dial)
        return []

    def barrier(self, peer: Peer, message: m.Barrier, frame: Frame) -> Answers:
        core = self.core
        with core.lock:
            worker = self.worker(peer)
            assert peer.key is not None
            if message.number and (peer.key[1], message.number) == core.left_barriers.get(worker):
                core.tell(peer, core.dial)  # everybody was let out, but it did not hear of it
                return []
            core.members.pause(worker)
            core.in_barrier[peer.key] = peer
            core.barrier_numbers[worker] = peer.key[1], message.number
            answers = self.changed()
            core.release_barrier()
        return answers

    def changed(self) -> Answers:
        """Who trains has changed: rounds and waiting ones are looked at again. Wants the lock."""
        core = self.core
        answers = core.perform(core.state.changed(time.monotonic()))
        core.switch_if_still()
        self.release_starters()
        return answers

    def steps(self, peer: Peer, message: m.Steps, frame: Frame) -> Answers:
        core = self.core
        with core.lock:
            self.worker(peer)
            if core.budget is None:
                core.budget = Budget(message.total)
            elif core.budget.total != message.total:
                raise Refused(
                    f"this run is to make {core.budget.total} steps, not {message.total}: ctx.steps(total) counts "
                    "those of the whole cluster since the run began, so every call names the same total"
                )
            assert peer.key is not None
            core.ticket_waiters[peer.key] = peer
            core.release_tickets()
            core.release_barrier()
            return self.changed()

    def fetch(self, peer: Peer, message: m.Fetch, frame: Frame) -> Answers:
        """A consistent copy of what is asked for, whoever asks."""
        core = self.core
        if message.is_copy:
            with core.snapshots.fetched(core, message) as (told, block):
                peer.channel.say(told, bulk=[block] if len(block) else [])
            return []
        entries: list[m.SlotEntry] = []
        with core.lock:
            shard = self.shard()
            if message.what in ("parameters", "ema"):
                if message.tensor is not None and not 0 <= message.tensor < len(shard.layout.trained):
                    raise Refused(f"there is no trained tensor {message.tensor}")
                bulk = [shard.copy_of(message.tensor, is_averaged=message.what == "ema")]
            elif message.what == "carried":
                own = core.snapshots.buffers.get(peer.key[0]) if peer.key is not None else None
                bulk = [bytes(shard.layout.with_own(core.carried, own) if own else core.carried)]
            elif message.what == "unsaved":
                bulk = [core.unsaved]
            elif message.what == "slots":
                entries, views = shard.slots()
                bulk = [bytes(v) for v in views]
            else:
                raise Refused(f"a ps holds parameters, slots, carried, unsaved and ema, not {message.what}")
            version = core.state.version
        peer.channel.say(m.Fetched(version, entries), bulk=bulk)
        return []

    def assign(self, peer: Peer, message: m.Assign, frame: Frame) -> Answers:
        """Only the chief writes."""
        core, shard = self.core, self.shard()
        limit = 16 * max(shard.size_bytes, 1 << 16) + shard.layout.carried_bytes
        if message.what == "unsaved":
            limit = m.MAX_UNSAVED_BLOCK
        if frame.bulk_bytes > limit:
            raise ProtocolError(f"{frame.bulk_bytes} bytes to assign, more than {limit} can be meant")
        block = bytearray(frame.bulk_bytes)
        peer.channel.recv_bulk(frame, memoryview(block))
        with core.lock:
            if not core.rewinding.is_by(peer) and self.worker(peer) != 0:
                raise Refused("only the chief may assign")
            if message.what in ("parameters", "written") and len(block) == shard.size_bytes:
                shard.assign(memoryview(block), is_written=message.what == "written")
            elif message.what == "ema" and len(block) == shard.size_bytes:
                shard.load_averages(memoryview(block))
            elif message.what == "carried" and message.worker is not None and len(block) == shard.layout.own_bytes:
                core.snapshots.buffers[message.worker] = bytes(block)
            elif message.what == "carried" and len(block) == len(core.carried):
                core.carried = block
                if core.durable is not None:
                    core.durable.carried()
            elif message.what == "unsaved":
                core.unsaved = bytes(block)
                if core.durable is not None:
                    core.durable.unsaved()
            elif message.what == "slots":
                if wrong := problem(message.slots, shard.layout, len(block)):
                    raise Refused(f"this state cannot be loaded: {wrong}")
                shard.load_slots(message.slots, memoryview(block))
            else:
                raise ProtocolError(f"{len(block)} bytes are no {message.what} of this shard")
        peer.channel.say(m.Done())
        return []

    def describe(self, peer: Peer, message: m.Describe, frame: Frame) -> Answers:
        core = self.core
        with core.lock:
            c, layout = core.config, core.shard.layout if core.shard and core.is_initialised else None
            state, lineage = core.state, core.lineage
            reply = m.Described(
                c.run_id,
                state.mode.spec,
                c.placement,
                c.num_ps,
                state.version,
                layout,
                lineage,
                state.turn,
                c.cluster,
            )
        peer.channel.say(reply)
        return []

    # --- the end ----------------------------------------------------------------------------------------------

    def close(self, peer: Peer, message: m.Close, frame: Frame) -> Answers:
        core = self.core
        with core.lock:
            worker = self.worker(peer)
            core.members.close(worker)
            answers = self.changed()
            core.release_barrier()
            if core.budget is not None:
                core.budget.give_back(worker)
            core.release_tickets()
            self.release_starters()
            reply = self._closed()
        if message.report:
            self._on_report(f"worker:{worker}", message.report)
        for index, report in enumerate(message.ps_reports, start=1):
            self._on_report(f"ps:{index}", report)
        core.tell(peer, reply)
        return answers

    def serves(self, peer: Peer, message: m.Serves, frame: Frame) -> Answers:
        core = self.core
        answers: Answers = []
        with core.lock:
            if core.members.stand_aside(message.worker, message.incarnation):
                answers = self.changed()
                core.release_barrier()
        core.tell(peer, m.Done())
        return answers

    def lost(self, peer: Peer, message: m.Lost, frame: Frame) -> Answers:
        core = self.core
        answers: Answers = []
        with core.lock:
            member = core.members[message.worker] if core.members.knows(message.worker) else None
            last = last_incarnation(message.incarnation) if message.incarnation else None
            if member is not None and member.incarnation <= (last or member.incarnation):
                if member.phase in (Phase.TRAINING, Phase.PAUSED):
                    answers = core.drop((message.worker, member.incarnation))
                core.members.lose(message.worker, last)
                answers += self.changed()
                core.release_barrier()
                self.release_starters()
        core.tell(peer, m.Done())
        return answers

    def save_soon(self, peer: Peer, message: m.SaveSoon, frame: Frame) -> Answers:
        core = self.core
        with core.lock:
            if not core.is_started or not core.members.training or not core.snapshots.want():
                raise Refused("nobody trains here, or nothing is saved")
        core.tell(peer, m.Done())
        return []

    def shard(self) -> Shard:
        if self.core.shard is None:
            raise Refused("no worker has brought a model yet")
        return self.core.shard

    def worker(self, peer: Peer) -> int:
        """The worker on this connection, if it is still the one that counts."""
        key, core = peer.key, self.core
        if key is None or not core.members.is_current(*key) or core.peers.get(key) is not peer:
            raise Refused("this connection belongs to no worker of the run any more")
        return key[0]


_HANDLERS: dict[type, Any] = {
    m.Join: Desk.join,
    m.Init: Desk.init,
    m.Start: Desk.start,
    m.Attach: Desk.attach,
    m.AskStatus: Desk.status,
    m.Pause: Desk.pause,
    m.Resume: Desk.resume,
    m.Barrier: Desk.barrier,
    m.Ready: switching.ready,
    m.SwitchMode: switching.switch_mode,
    m.Align: switching.align,
    m.Steps: Desk.steps,
    m.Fetch: Desk.fetch,
    m.Assign: Desk.assign,
    m.AskDecisions: switching.decisions,
    m.Position: saving.position,
    m.Copy: saving.copy,
    m.FreeCopy: saving.free_copy,
    m.Rewind: saving.rewind,
    m.Restored: saving.restored,
    m.Describe: Desk.describe,
    m.Close: Desk.close,
    m.Serves: Desk.serves,
    m.Lost: Desk.lost,
    m.SaveSoon: Desk.save_soon,
}
