"""WHAT is saved, and when? ps:0 announces an update that will be saved; every shard copies itself when it is made.

Used by server/core (after updates) and server/desk (the writer's questions). Making the copy is the only time
that training waits for a checkpoint; fetching and writing it happens elsewhere, meanwhile.

1. `--save-every` says that the next update is due: answers carry SAVE from now on, to one worker also WRITES,
2. in modes with rounds the decision about that round has a mark, so that every shard copies itself at the same round;
   elsewhere each does when the writer asks,
3. workers tell where they are after it (wire/messages Position); beside that every heartbeat says it roughly,
4. the writer fetches the copies and lets go of them; until then nothing else is announced. It says which copy it
   means, so what it fetches is of one version: another copy may have been asked for meanwhile.

Every method but `fetched` wants the core's lock held, as all of the core does.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from paceline.checkpoint.policy import SavePolicy
from paceline.cluster.membership import Phase
from paceline.errors import Refused
from paceline.params.arena import Arena
from paceline.server.control.actions import Answer
from paceline.server.control.shares import Shares
from paceline.telemetry.ledger import FROM_RESUME
from paceline.wire import messages as m
from paceline.wire.frames import Flag

if TYPE_CHECKING:
    from paceline.server.core import Core, Peer
    from paceline.server.shard import Shard

GIVE_UP_S = 900.0  # a writer that has not let go after so long is forgotten
NOTHING = memoryview(b"")


@dataclass(slots=True)
class Snapshot:
    """One shard as it was; its memory is not used again while there are readers."""

    number: int = 0
    readers: int = 0
    version: int = 0
    round: int = 0
    lineage: int = 0
    pause_ms: float = 0.0
    parameters: memoryview = NOTHING
    averages: bytearray | None = None
    entries: list[m.SlotEntry] = field(default_factory=list)
    slots: memoryview = NOTHING
    carried: bytes = b""
    applied: dict[int, tuple[int, int]] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)  # each worker's that are in it, where that is known
    optimizer: m.OptimizerSpec | None = None
    spec_turn: int = 0

    def take(self, core: "Core", shard: "Shard") -> None:
        """Copy everything, into the memory of the copy before where it fits: new pages cost more than the copying."""
        began = time.perf_counter()
        self.parameters = _filled(self.parameters, [shard.memory])
        self.averages = shard.averages() if core.config.ema is not None else None
        self.entries, views = shard.slots()
        self.slots = _filled(self.slots, views)
        self.carried = bytes(core.carried)
        self.version, self.round = core.updates, core.updates - core.state.offset  # one more may be decided already
        self.lineage, self.spec_turn = core.lineage, core.state.turn
        self.applied = dict(core.state.applied)
        self.steps = core.snapshots.shares.exact(core.state)
        self.optimizer = m.OptimizerSpec(shard.optimizer_name, shard.options)
        self.pause_ms = 1e3 * (time.perf_counter() - began)


def _filled(into: memoryview, views: Sequence[memoryview]) -> memoryview:
    size, position = sum(view.nbytes for view in views), 0
    if size and into.nbytes != size:
        into = Arena.private(size).memory
    for view in views if size else ():  # a shard may be empty
        into[position : position + view.nbytes] = view
        position += view.nbytes
    return into


class Snapshots:
    """The copies of one ps, and on ps:0 who was where."""

    def __init__(self, save_every: str, is_coordinator: bool) -> None:
        is_ours = is_coordinator and save_every != "none"
        self._policy = SavePolicy(save_every) if is_ours else None
        self._target: int | None = None  # the version that was announced
        self._since_s = 0.0
        self._writer = -1
        self._is_taken = False  # the announced one
        self._announced = 0  # its number
        self._copies = 0
        self._has_heard: set[int] = set()  # of the announcement; late ones, in k of n, may not
        self._awaited: set[int] = set()
        self._collected: dict[int, m.Position] = {}
        self._copy: Snapshot | None = None
        self.flags = 0  # for answers that are about to leave
        self.newest: dict[int, m.Position] = {}  # where each worker was, as last heard
        self.shares = Shares()
        self.buffers: dict[int, bytes] = {}  # of each worker but the chief, as last heard
        self.told: dict[int, tuple[int, float | None]] = {}  # steps and samples of each worker when it sent its buffers

    @property
    def saved_s(self) -> float | None:
        """When the last one was announced; survives a ps, because the clock does."""
        return self._policy.last_s if self._policy is not None else None

    @saved_s.setter
    def saved_s(self, last_s: float | None) -> None:
        if self._policy is not None:
            self._policy.last_s = last_s

    # --- announcing -------------------------------------------------------------------------------------------

    def updated(self, core: "Core") -> None:
        """After an update of ps:0, and before the first one: is the next one to be saved?"""
        if self._policy is None:
            return
        now_s, version = time.monotonic(), core.state.version
        is_due = self._policy.is_due(version + 1, now_s)
        if self._target is not None:
            if now_s - self._since_s < GIVE_UP_S and self._writer in core.members.live:
                return
            self.forget(core)
        if is_due and core.members.live:
            self._policy.saved(now_s)
            self._target, self._since_s, self._writer = version + 1, now_s, min(core.members.live)
            self._is_taken, self._collected, self._has_heard = False, {}, set()
            core.state.copy_at = self._target
            self.flags = Flag.SAVE

    def want(self) -> bool:
        """Save soon: the next update announces the one after it. False: this run saves nothing."""
        if self._policy is None:
            return False
        self._policy.want()
        return True

    def forget(self, core: "Core") -> None:
        """Nothing is announced any more."""
        self._target, self._is_taken, self.flags, core.state.copy_at = None, False, 0, None

    def marked(self, answer: Answer) -> Answer:
        """An answer that says that the next update will be saved, and by whom. A writer without which that update was
        made, in k of n, hears of it afterwards."""
        worker, is_late = answer.key[0], self._is_taken
        if is_late and worker != self._writer:
            return answer
        self._has_heard.add(worker)
        flags = self.flags | (Flag.WRITES if worker == self._writer else 0)
        if is_late:
            self.flags = 0
        return answer._replace(flags=answer.flags | flags)

    def started(self, core: "Core", peer: "Peer") -> m.Started:
        """What a worker is told when it may begin: beside all else, where its predecessor was."""
        if core.state.version == 0:
            self.updated(core)
        worker = peer.key[0] if peer.key is not None else -1
        position = self.shares.goes_on(core.state, worker, self.newest.get(worker))
        is_next = bool(self.flags) and not self._is_taken
        if is_next and peer.key is not None:
            self._has_heard.add(worker)
        state = core.state
        is_again = self.shares.has_trained(state, worker)
        return m.Started(core.seed, state.version, core.open_decisions, core.dial, position, is_next, is_again)

    def ended(self, core: "Core") -> dict[int, tuple[int, int]]:
        """Return the whole passes and the steps of each worker that has closed."""
        closed = [w for w, member in enumerate(core.members) if member.phase is Phase.CLOSED]
        return {w: (self.newest[w].done, self.newest[w].steps) for w in closed if w in self.newest}

    def restored(self, core: "Core", shard: "Shard", init: m.Init) -> None:
        """The chief's first values are a checkpoint's: go on counting where it was."""
        if init.seed is not None:
            core.seed = init.seed
        if init.version == 0 and init.lineage == 0:
            return
        core.lineage, core.updates, core.state.version = init.lineage, init.version, init.version
        shard.set_version(init.version)
        self.newest.update({position.worker: position for position in init.positions})
        self.told.update({position.worker: (position.steps, position.samples) for position in init.positions})
        self.shares.resumed(init.version, init.positions)
        if core.ledger is not None:
            core.ledger.restored(init.version, init.lineage, FROM_RESUME)

    # --- copying ----------------------------------------------------------------------------------------------

    def take(self, core: "Core") -> None:
        """The announced update is made: copy it."""
        self._take(core)
        if self._target is not None and core.config.index == 0:
            self._is_taken, core.state.copy_at = True, None
            self.flags = 0 if self._writer in self._has_heard else self.flags
            # Where every push is an update, who heard of it says where it is; of the others the last heartbeat does.
            self._awaited = self._has_heard & set(core.members.live) if core.state.mode.has_rounds else set()
            self._announced = self._copies

    def _take(self, core: "Core") -> Snapshot:
        if core.shard is None or not core.is_initialised:
            raise Refused("there is nothing to save yet: no chief has brought its model")
        if self._copy is None or self._copy.readers:
            self._copy = Snapshot()  # the other one is on its way to whoever asked for it
        self._copies += 1
        self._copy.number = self._copies
        self._copy.take(core, core.shard)
        if core.ledger is not None:
            core.ledger.copied(self._copy.version, self._copy.round)
        return self._copy

    def asked(self, core: "Core", message: m.Copy) -> m.Copied:
        """The writer asks."""
        has_rounds = core.state.mode.has_rounds
        if message.position is not None and message.position.worker == message.worker:
            self.note(message.position, has_rounds)
        if message.decisions:  # whoever saves carries ps:0's open decisions first
            core.perform(core.state.carry((message.worker, message.incarnation), 0, message.decisions)[:-1])
        if message.is_now or (message.is_again and self._copy is not None):
            copy = self._take(core) if message.is_now else self._copy
            assert copy is not None
            return self._told(core, copy, self.newest.values(), self._behind(core, copy.version))
        if core.config.index != 0:
            copy = self._copy
            return self._told(core, copy, (), ()) if copy is not None else m.Copied(False, True)
        if self._target is None:
            return m.Copied(is_taken=False)
        if not self._is_taken and not has_rounds:
            self.take(core)
        if self._is_taken and self._announced != self._copies:
            self.forget(core)  # somebody had a newer one made, and saves that
            return m.Copied(is_taken=False)
        if not self._is_taken:
            is_missed = core.state.copy_at != self._target or core.state.version >= self._target
            if is_missed:
                self.forget(core)
            return m.Copied(is_taken=False, is_wanted=not is_missed, has_rounds=has_rounds)
        awaited = self._awaited & set(core.members.live) - self._collected.keys()
        positions = {**self.newest, **self._collected}.values()
        return self._told(core, self._copy, positions, awaited)

    def _behind(self, core: "Core", version: int) -> list[int]:
        """Who has not said where it is at this version."""
        known = {w for w, position in self.newest.items() if position.version == version}
        return sorted(set(core.members.live) - known)

    def _told(
        self, core: "Core", copy: Snapshot | None, positions: Iterable[m.Position], awaited: Iterable[int]
    ) -> m.Copied:
        assert copy is not None
        steps = copy.steps
        where = [msgspec.structs.replace(p, steps=steps.get(p.worker, p.steps)) for p in positions]
        return m.Copied(
            is_taken=True,
            is_wanted=True,
            version=copy.version,
            round=copy.round,
            has_rounds=core.state.mode.has_rounds,
            lineage=copy.lineage,
            pause_ms=copy.pause_ms,
            seed=core.seed,
            turn=copy.spec_turn,
            spec=core.state.mode.spec,
            has_averages=copy.averages is not None,
            optimizer=copy.optimizer,
            applied=copy.applied,
            awaited=sorted(awaited),
            positions=sorted(where, key=lambda p: p.worker),
            decisions=core.open_decisions if core.config.index == 0 else (),
            buffers_of={worker: self.told.get(worker, (0, 0.0)) for worker in (0, *sorted(self.buffers))},
            number=copy.number,
        )

    @contextmanager
    def fetched(self, core: "Core", message: m.Fetch) -> Iterator[tuple[m.Fetched, memoryview | bytes]]:
        """A part of the copy, to be sent inside: it does not change until then. Takes the lock itself, for a moment."""
        with core.lock:
            copy = self._copy
            if copy is None or copy.number != message.number:
                raise Refused(f"there is no copy {message.number} to fetch (any more): ask for one first")
            part = self._part(copy, message.what, message.worker)
            copy.readers += 1
        try:
            yield part
        finally:
            with core.lock:
                copy.readers -= 1

    def _part(self, copy: Snapshot, what: str, worker: int | None) -> tuple[m.Fetched, memoryview | bytes]:
        if what == "parameters":
            return m.Fetched(copy.version), copy.parameters
        if what == "slots":
            return m.Fetched(copy.version, copy.entries), copy.slots
        if what == "carried":
            return m.Fetched(copy.version), copy.carried if worker is None else self.buffers.get(worker, b"")
        if what == "ema" and copy.averages is not None:
            return m.Fetched(copy.version), memoryview(copy.averages)
        raise Refused(f"a copy holds parameters, slots, carried and ema, not {what}")

    def free(self, core: "Core") -> None:
        """The writer is done; the memory stays for the next copy."""
        if self._target is not None and self._is_taken:
            self.forget(core)

    def carry(self, core: "Core", worker: int, block: bytearray) -> None:
        """A worker's buffers, as they are after the update that is to be saved; the chief's are everybody's."""
        if worker != 0:
            self.buffers[worker] = bytes(block)
            return
        core.carried = block
        if core.durable is not None:
            core.durable.carried()
        if self._copy is not None:
            self._copy.carried = bytes(block)

    # --- who is where -----------------------------------------------------------------------------------------

    def note(self, position: m.Position, has_rounds: bool) -> None:
        """Note where a worker is; its buffers have come before."""
        self.newest[position.worker] = position
        self.told[position.worker] = position.steps, position.samples
        if self._target is not None and (not has_rounds or position.version >= self._target):
            self._collected[position.worker] = position

    def heard(self, position: m.Position) -> None:
        """A heartbeat says where a worker is; one that stands where it stood keeps what it said in full."""
        known = self.newest.get(position.worker)
        is_newer = known is not None and not known.at and position.groups is not None
        if known is None or known.numbers != position.numbers or is_newer:
            self.newest[position.worker] = position
