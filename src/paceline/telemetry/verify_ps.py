"""WHAT does one ps's ledger prove? Its records are followed in order, as if the ps were run again.

Called by telemetry/verify. Pure: records in, violations and what the others are compared with out. Reads no other
task's records, and takes nothing for true because the ps says so: versions, clocks and rounds are counted again.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import NamedTuple

from paceline.telemetry import ledger as led
from paceline.telemetry.ledger import Kind, Record
from paceline.telemetry.verify_records import Owner, Rounds, Say, Track, in_order
from paceline.wire.frames import Outcome

# The fields that mean something, beside kind, lineage and number; all others are 0.
USED = {
    Kind.START: {"outcome", "version"},
    Kind.MODE: {"outcome", "push_id", "version", "amount"},
    Kind.ENTER: {"other", "incarnation", "push_id", "version"},
    Kind.LEAVE: {"outcome", "other", "incarnation"},
    Kind.APPLY: {"other", "incarnation", "push_id", "version", "amount"},
    Kind.ADD: {"other", "incarnation", "push_id", "version", "amount"},
    Kind.ROUND: {"push_id", "version", "amount"},
    Kind.DISCARD: {"outcome", "other", "incarnation", "push_id", "version"},
    Kind.CHECKPOINT: {"push_id", "version"},
    Kind.RESTORE: {"outcome", "version"},
    Kind.FULL: set(),
}


class Held(NamedTuple):
    """The mode since some version: rounds?"""

    since: int
    has_rounds: bool


class Shard:
    """One ps, as its ledger tells it. `is_first`: ps:0, which alone keeps the clocks that count."""

    def __init__(self, is_first: bool, say: Say) -> None:
        self._say = say
        self._is_first = is_first
        self.tracks: dict[Owner, Track] = {}
        self.discards: dict[Owner, dict[int, int]] = {}  # push id -> outcome
        self.duplicates: dict[Owner, set[int]] = {}  # push ids that came again
        self.added: dict[Owner, set[int]] = {}  # push ids that counted in a round that was still open
        self.lost: dict[Owner, dict[int, int]] = {}  # push id -> version, gone with a restore
        self.rounds: dict[int, Rounds] = {}  # by lineage
        self.modes: dict[int, tuple[int, int]] = {}  # turn -> (mode, bound)
        self.tops: dict[int, int] = {}  # lineage -> its newest version
        self.copies: dict[tuple[int, int], tuple[int, int]] = {}  # (lineage, global step) -> (round or -1, record)
        self.entered: dict[int, set[int]] = {}  # worker -> its incarnations
        self.version = 0
        self.lineage = 0
        self._held = [Held(0, False)]
        self._mode, self._bound, self._turn = led.MODE_EACH_PUSH, 0, -1
        self._offset: int | None = None  # this shard's version less ps:0's, in the rounds of this turn
        self._open: list[tuple[int, int, int, int]] = []  # (worker, incarnation, gradients, last id) of the round
        self._adds: dict[Owner, list[int]] = {}
        self._training: dict[int, int] = {}  # worker -> incarnation
        self._clocks: dict[int, int] = {}
        self._has_begun = False
        self._lost_at = 0  # the version that went with its memory
        self._is_restored = False  # and has not made a change of the mode since

    def follow(self, records: Iterable[Record]) -> None:
        handlers: dict[int, Callable[[Record], None]] = {
            Kind.START: self._start, Kind.MODE: self._take_mode, Kind.ENTER: self._enter, Kind.LEAVE: self._leave,
            Kind.APPLY: self._apply, Kind.ADD: self._add, Kind.ROUND: self._round, Kind.DISCARD: self._discard,
            Kind.CHECKPOINT: self._copy, Kind.RESTORE: self._restore, Kind.FULL: self._full,
        }  # fmt: skip
        for record in in_order(records, USED, self._say):
            if self._open and record.kind not in (Kind.APPLY, Kind.ROUND):
                self._say(record.number, f"stands in the middle of the round that made version {self.version + 1}")
                self._open = []
            if record.lineage < self.lineage and record.kind != Kind.START:
                self._say(record.number, f"belongs to lineage {record.lineage}, and {self.lineage} had begun")
            elif record.kind != Kind.RESTORE:
                self.lineage = record.lineage
            if not self._has_begun and record.kind != Kind.START:
                self._say(record.number, "comes before the ps has started")
            handlers[record.kind](record)
            self._has_begun = True
            self.tops[self.lineage] = max(self.tops.get(self.lineage, 0), self.version)

    def version_of(self, owner: Owner, push_id: int) -> int | None:
        """The version that this gradient is in, if it is in one."""
        track = self.tracks.get(owner)
        return track.version_of(push_id) if track is not None else None

    def is_counted(self, owner: Owner, push_id: int) -> bool:
        """Whether it counts in a round that was never closed."""
        return push_id in self._adds.get(owner, ())

    def is_round(self, version: int) -> bool:
        """Whether this version was made by a round."""
        at = bisect_left(self._held, version, key=lambda held: held.since)
        return self._held[at - 1].has_rounds if at else False

    def top(self, lineage: int) -> int:
        """The newest version that anybody of that lineage can have read."""
        return max((top for each, top in self.tops.items() if each >= lineage), default=0)

    # --- the ps itself ----------------------------------------------------------------------------------------

    def _start(self, record: Record) -> None:
        if record.outcome == led.START_KEPT:
            if not self._has_begun:
                self._say(record.number, "started with what an earlier one knew, and there was none")
            if record.version != self.version:
                self._say(record.number, f"I5: came back at version {record.version}, not at {self.version}")
            return
        if record.version:
            self._say(record.number, f"started from nothing at version {record.version}")
        self._lost_at = max(self.version, self._lost_at)
        self.version = 0
        self._training.clear()
        self._clocks.clear()
        self._adds.clear()
        self._turn = -1

    def _take_mode(self, record: Record) -> None:
        self._expect_version(record)
        turn = record.push_id
        known = self.modes.get(turn)
        if known not in (None, (record.outcome, record.amount)) or (self._turn >= 0 and turn not in self._next_turns()):
            self._say(record.number, f"another mode for turn {turn}, after turn {self._turn}")
        if turn != self._turn:
            self._clocks.clear()
            self._adds.clear()
            self._offset = None
        self.modes[turn] = (record.outcome, record.amount)
        self._mode, self._bound, self._turn, self._is_restored = record.outcome, record.amount, turn, False
        self._held.append(Held(self.version, record.outcome == led.MODE_ROUNDS))

    def _next_turns(self) -> range:
        """A shard that only obeys may hear of a later change first; ps:0 makes one at a time, if it has its memory."""
        is_next = self._is_first and not self._is_restored
        return range(self._turn, self._turn + (2 if is_next else 1 << 32))

    def _restore(self, record: Record) -> None:
        is_first = not self.tracks and not self.version
        if not is_first and record.lineage <= max(self.tops):
            self._say(record.number, f"went back in lineage {record.lineage}, which is no new one")
        before = max(self.version, self._lost_at)
        if not is_first and record.version > before:
            self._say(record.number, f"was at version {before} and went back to {record.version}")
        for owner, track in self.tracks.items():
            gone = track.cut(record.version)
            if gone:
                self.lost.setdefault(owner, {}).update(gone)
        self.version, self.lineage = record.version, record.lineage
        self._held = [held for held in self._held if held.since <= record.version] or [Held(0, False)]
        self._held.append(Held(self.version, self._mode == led.MODE_ROUNDS))
        self._adds.clear()
        self._offset = None
        self._lost_at, self._is_restored = 0, record.outcome != led.FROM_RESUME

    def _copy(self, record: Record) -> None:
        self._expect_version(record)
        is_round = self._mode == led.MODE_ROUNDS and self._offset is not None
        round_ = record.version - (self._offset or 0) if is_round else -1
        self.copies[record.lineage, record.push_id] = (round_, record.number)

    def _full(self, record: Record) -> None:
        self._say(record.number, "the disk was full: nothing was written down from here on")

    # --- who trains -------------------------------------------------------------------------------------------

    def _enter(self, record: Record) -> None:
        self._expect_version(record)
        worker, incarnation, clock = record.other, record.incarnation, record.push_id
        known = self.entered.setdefault(worker, set())
        if worker in self._training:
            self._say(record.number, f"worker:{worker} came in twice")
        if known and incarnation < max(known):
            self._say(record.number, f"I2: worker:{worker} came in as incarnation {incarnation}, after {max(known)}")
        others = [self._clocks.get(w, 0) for w in self._training]
        if self._mode != led.MODE_BOUNDED:
            if clock:
                self._say(record.number, f"worker:{worker} has a clock where none are kept")
        elif clock < max(self._clocks.get(worker, 0), min(others, default=0)):
            self._say(record.number, f"I3: worker:{worker} came in at clock {clock}, behind its own or all others'")
        elif others and clock > max(self._clocks.get(worker, 0), min(others)):
            self._say(record.number, f"I3: worker:{worker} came in at clock {clock}, ahead of the slowest")
        known.add(incarnation)
        self._training[worker] = incarnation
        self._clocks[worker] = clock

    def _leave(self, record: Record) -> None:
        trained = self._training.pop(record.other, None)
        if trained is None and record.outcome == led.LEFT_PAUSED:
            self._say(record.number, f"worker:{record.other} paused, and did not train")
        if trained not in (None, record.incarnation) and record.outcome != led.LEFT_LOST:
            told = f"worker:{record.other} left as incarnation {record.incarnation}"
            self._say(record.number, f"{told}, and trained as {trained}")

    # --- gradients --------------------------------------------------------------------------------------------

    def _expect_version(self, record: Record) -> None:
        if record.version != self.version:
            self._say(record.number, f"tells version {record.version}, and the ps was at {self.version}")

    def _apply(self, record: Record) -> None:
        worker, incarnation = owner = record.other, record.incarnation
        if record.version != self.version + 1:
            self._say(record.number, f"I5: made version {record.version} of version {self.version}")
            self.version = record.version - 1
        if self._turn < 0:
            self._say(record.number, "made an update before it had a mode")
        if self._lost_at:
            self._say(record.number, f"I5: went on without the {self._lost_at} updates that it had lost")
            self._lost_at = 0
        known = self.entered.get(worker, set())
        is_fenced = self._mode != led.MODE_ROUNDS and known and incarnation < max(known)
        if incarnation not in known or is_fenced:
            self._say(record.number, f"I2: worker:{worker} incarnation {incarnation} was applied and is not in")
        if self._mode == led.MODE_ROUNDS:
            self._open.append((worker, incarnation, record.amount, record.push_id))
        else:
            self._tick(record)
            self.version = record.version
        self._count(record, owner)

    def _count(self, record: Record, owner: Owner) -> None:
        """Which gradients are in it: those counted before, and the one that came last."""
        ids = self._adds.pop(owner, [])
        if record.push_id not in ids:
            ids.append(record.push_id)
        elif record.push_id != ids[-1]:
            self._say(record.number, f"push {record.push_id} is called worker:{owner[0]}'s last, and {ids[-1]} was")
        if record.amount != len(ids):
            self._say(record.number, f"{record.amount} gradients of worker:{owner[0]}, and {len(ids)} were counted")
        track = self.tracks.get(owner)
        if track is None:
            track = self.tracks[owner] = Track()
        for push_id in ids:
            if push_id <= track.last:
                is_double = track.version_of(push_id) is not None
                what = "was applied already" if is_double else f"came after its push {track.last}"
                self._say(record.number, f"I2: push {push_id} of worker:{owner[0]} incarnation {owner[1]} {what}")
                continue
            if self.discards.get(owner, {}).get(push_id, Outcome.DUPLICATE) != Outcome.DUPLICATE:
                self._say(record.number, f"I2: push {push_id} of worker:{owner[0]} was applied after it was discarded")
            track.add(push_id, record.version, record.number)

    def _tick(self, record: Record) -> None:
        """INVARIANT I3: whoever pushes was at most `bound` ahead of the slowest when it began."""
        worker = record.other
        if self._mode != led.MODE_BOUNDED or not self._is_first:
            return
        done = self._clocks.get(worker, 0)
        slowest = min((self._clocks.get(w, 0) for w in self._training), default=done)
        if worker in self._training and done - slowest > self._bound:
            ahead = f"{done - slowest} steps ahead of the slowest"
            self._say(record.number, f"I3: worker:{worker} was {ahead}, and {self._bound} is the bound")
        self._clocks[worker] = done + 1

    def _add(self, record: Record) -> None:
        self._expect_version(record)
        if self._mode != led.MODE_ROUNDS:
            self._say(record.number, "counted a gradient for a round, and there are none in this mode")
        if record.amount != 1:
            self._say(record.number, f"counted {record.amount} gradients at once")
        owner = record.other, record.incarnation
        if record.incarnation not in self.entered.get(record.other, ()):
            self._say(record.number, f"I2: worker:{owner[0]} incarnation {owner[1]} was counted and is not in")
        adds = self._adds.setdefault(owner, [])
        if record.push_id in adds:
            self._say(record.number, f"I2: push {record.push_id} of worker:{owner[0]} was counted twice")
        if self.version_of(owner, record.push_id) is not None:
            self._say(record.number, f"I2: push {record.push_id} of worker:{owner[0]} was counted and applied already")
        adds.append(record.push_id)
        self.added.setdefault(owner, set()).add(record.push_id)

    def _round(self, record: Record) -> None:
        workers = [worker for worker, *_ in self._open]
        if self._mode != led.MODE_ROUNDS or not self._open or record.version != self.version + 1:
            self._say(record.number, f"I1: closed a round at version {record.version}, which none was open for")
        elif record.amount != len(workers) or workers != sorted(set(workers)):
            self._say(record.number, f"I1: a round of {record.amount} workers, and these are in it: {workers}")
        if self._adds:
            left = ", ".join(f"worker:{worker}" for worker, _ in self._adds)
            self._say(record.number, f"I5: gradients of {left} were counted and are not in the round")
            self._adds.clear()
        offset = record.version - 1 - record.push_id
        if self._offset not in (None, offset) or (self._is_first and offset):
            self._say(record.number, f"I1: round {record.push_id} made version {record.version}: a round was left out")
        self._offset = offset
        self.rounds.setdefault(record.lineage, Rounds()).add(record.push_id, hash(tuple(self._open)), record.number)
        self.version = record.version
        self._open = []

    def _discard(self, record: Record) -> None:
        self._expect_version(record)
        owner, push_id = (record.other, record.incarnation), record.push_id
        told = self.discards.setdefault(owner, {})
        is_known = self.version_of(owner, push_id) is not None or push_id in self._adds.get(owner, ())
        if record.outcome == Outcome.DUPLICATE:
            if not (is_known or push_id in told or push_id in self.lost.get(owner, {})):
                self._say(record.number, f"I2: push {push_id} of worker:{owner[0]} is called a duplicate of nothing")
            self.duplicates.setdefault(owner, set()).add(push_id)
            return
        if is_known:
            self._say(record.number, f"I2: push {push_id} of worker:{owner[0]} was discarded after it was applied")
        if record.outcome not in (Outcome.DISCARDED, Outcome.NOT_FINITE, Outcome.FENCED):
            self._say(record.number, f"discarded with outcome {record.outcome}")
        elif record.outcome == Outcome.NOT_FINITE:
            self._tick(record)
        told[push_id] = record.outcome
