"""DOES a worker's ledger agree with those of the ps? What it pushed, was told and read, against what they made of it.

Called by telemetry/verify after every ps was followed. Pure. The worker's records are its own: it wrote down each push
before it was sent, each answer when it was taken.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from paceline.telemetry.ledger import Kind, Record
from paceline.telemetry.verify_ps import Shard
from paceline.telemetry.verify_records import Say, in_order
from paceline.wire.frames import Flag, Outcome

USED = {
    Kind.START: {"other", "incarnation"},
    Kind.ENTER: {"outcome", "other", "incarnation", "version"},
    Kind.PUSH: {"outcome", "other", "incarnation", "push_id", "version", "amount"},
    Kind.ANSWER: {"outcome", "other", "incarnation", "push_id", "version"},
    Kind.PULL: {"other", "incarnation", "version"},
    Kind.CHECKPOINT: {"push_id", "version"},
    Kind.FULL: set(),
}
UNCOUNTED = (Outcome.DISCARDED, Outcome.NOT_FINITE, Outcome.FENCED)


@dataclass(slots=True)
class Link:
    """One ps, as this worker knows it."""

    version: int = 0
    lineage: int = 0
    incarnation: int = 0
    pending: int = 0  # the push that waits for its answer; 0: none
    pushed: int = 0  # the last one
    is_bad: bool = False  # it was not finite
    is_staged: bool = False
    answered: int = 0  # the version that came with the last answer


class Worker:
    """One worker's story. `lose` is told of what was acknowledged and went with a restore."""

    def __init__(self, index: int, shards: Mapping[int, Shard], say: Say, lose: Callable[[str], None]) -> None:
        self._index = index
        self._shards = shards
        self._say = say
        self._lose = lose
        self._links: dict[int, Link] = {}
        self._pushed: dict[tuple[int, int], array[int]] = {}  # (ps, incarnation) -> ids
        self._incarnation = 0
        self._newest = 0
        self.incarnations: set[int] = set()
        self.asked: set[int] = set()  # the ps that it joined

    def follow(self, records: Iterable[Record]) -> None:
        handlers: dict[int, Callable[[Record], None]] = {
            Kind.START: self._start, Kind.ENTER: self._enter, Kind.PUSH: self._push, Kind.ANSWER: self._answer,
            Kind.PULL: self._pull, Kind.CHECKPOINT: lambda record: None, Kind.FULL: self._full,
        }  # fmt: skip
        for record in in_order(records, USED, self._say):
            if record.kind not in (Kind.START, Kind.CHECKPOINT, Kind.FULL):
                if not self._incarnation:
                    self._say(record.number, "comes before the worker has started")
                elif record.other not in self._links and record.kind != Kind.ENTER:
                    self._say(record.number, f"ps:{record.other} was not joined")
                if record.incarnation < self._incarnation:
                    self._say(record.number, f"is of incarnation {record.incarnation}, after {self._incarnation}")
                elif record.incarnation > self._incarnation:
                    self._become(record.incarnation)
            handlers[record.kind](record)
        self._compare()

    def _become(self, incarnation: int) -> None:
        self._incarnation, self._newest = incarnation, 0
        self.incarnations.add(incarnation)

    def _start(self, record: Record) -> None:
        if record.other != self._index:
            self._say(record.number, f"is of worker:{record.other}, in the ledger of worker:{self._index}")
        if record.incarnation <= self._incarnation:
            self._say(record.number, f"started as incarnation {record.incarnation}, after {self._incarnation}")
        if record.lineage:
            self._say(record.number, "started in a lineage before it had joined")
        self._links.clear()
        self._become(record.incarnation)

    def _enter(self, record: Record) -> None:
        known = self._links.get(record.other)
        link = known or self._links.setdefault(record.other, Link(lineage=record.lineage))
        version, lineage = link.version, link.lineage
        self._read(link, record, is_new=True)
        if known is not None:  # on another connection: what it has is still what it read
            link.version, link.lineage = version, lineage
        self.asked.add(record.other)
        link.pending = 0  # it sends that push again, or gives it up
        link.incarnation = record.incarnation

    def _full(self, record: Record) -> None:
        self._say(record.number, "the disk was full: nothing was written down from here on")

    # --- the two verbs ----------------------------------------------------------------------------------------

    def _push(self, record: Record) -> None:
        link, push_id, number = self._links.setdefault(record.other, Link()), record.push_id, record.number
        is_again = push_id == link.pushed and record.incarnation == link.incarnation
        if link.pending:
            self._say(number, f"push {push_id} to ps:{record.other}, and push {link.pending} had no answer")
        shard = self._shards.get(record.other)
        newest = shard.lineage if shard is not None else record.lineage
        if not link.lineage <= record.lineage <= newest:
            self._say(number, f"push {push_id} is of lineage {record.lineage}, after {link.lineage}, before {newest}")
        if push_id not in (self._newest, self._newest + 1) and self._newest:
            self._say(number, f"push {push_id} comes after push {self._newest}")
        if not is_again and record.version != link.version:
            what = f"version {record.version}, and version {link.version} was read"
            self._say(number, f"push {push_id} to ps:{record.other} was computed from {what}")
        if record.outcome not in (0, Flag.NOT_FINITE) or record.amount > 1:
            self._say(number, f"push {push_id} has values that none has")
        self._newest = max(self._newest, push_id)
        link.pending, link.pushed, link.is_bad = push_id, push_id, bool(record.outcome)
        link.is_staged, link.incarnation = bool(record.amount), record.incarnation
        ids = self._pushed.setdefault((record.other, record.incarnation), array("Q"))
        if not ids or push_id > ids[-1]:
            ids.append(push_id)
        if shard is not None and not is_again:
            self._check_base(shard, record, bool(record.outcome))

    def _check_base(self, shard: Shard, record: Record, is_bad: bool) -> None:
        """What it was computed from, and what it became."""
        made = shard.version_of((self._index, record.incarnation), record.push_id)
        if made is None:
            return
        told = f"push {record.push_id} to ps:{record.other}"
        if is_bad:
            self._say(record.number, f"{told} was not finite and is in version {made}")
        if record.version >= made:
            self._say(record.number, f"{told}, computed from version {record.version}, is in version {made}")
        elif shard.is_round(made) and record.version != made - 1:
            self._say(record.number, f"{told}, computed from version {record.version}, is in the round of {made - 1}")
        elif bool(record.amount) != (shard.is_round(made) and record.other > 0):
            self._say(record.number, f"{told} was staged where it should be pushed, or pushed where staged")

    def _answer(self, record: Record) -> None:
        link, push_id, number = self._links.setdefault(record.other, Link()), record.push_id, record.number
        if push_id != link.pending:
            self._say(number, f"ps:{record.other} answered push {push_id}, and {link.pending or 'none'} was sent")
        if link.is_staged != (record.outcome == Outcome.STAGED) and record.outcome not in UNCOUNTED:
            self._say(number, f"push {push_id} to ps:{record.other} was answered as staged, or was staged")
        link.pending, link.answered = 0, record.version
        shard = self._shards.get(record.other)
        if shard is None:
            return
        if record.version > shard.top(record.lineage):
            self._say(number, f"ps:{record.other} answered with version {record.version}, which it never made")
        self._check_outcome(shard, record, link.is_bad)

    def _check_outcome(self, shard: Shard, record: Record, is_bad: bool) -> None:
        """INVARIANTS I2, I5: what this worker was told is what the ps did."""
        owner, push_id, outcome = (self._index, record.incarnation), record.push_id, record.outcome
        told = f"push {push_id} to ps:{record.other}"
        made = shard.version_of(owner, push_id)
        gone = shard.lost.get(owner, {}).get(push_id)
        discarded = shard.discards.get(owner, {}).get(push_id)
        is_counted = shard.is_counted(owner, push_id)
        if outcome != Outcome.FENCED and record.incarnation not in shard.entered.get(self._index, ()):
            self._say(record.number, f"{told} was answered, and the ps says that this worker was never in")
        if outcome in (Outcome.APPLIED, Outcome.ADDED):
            if (outcome == Outcome.ADDED) != (push_id in shard.added.get(owner, ())):
                self._say(record.number, f"{told} was answered with {Outcome(outcome).name}, and the ps says another")
            if gone is not None:
                self._lose(f"{told} of worker:{self._index}, in version {gone}, went with a restore")
            elif made is None and not is_counted:
                self._say(record.number, f"I5: {told} was acknowledged and never applied")
            elif made is not None and outcome == Outcome.APPLIED and made > record.version:
                self._say(record.number, f"{told} was acknowledged at version {record.version} and is in {made}")
        elif outcome in UNCOUNTED:
            if made is not None:
                self._say(record.number, f"I2: {told} was refused ({Outcome(outcome).name}) and is in version {made}")
            elif discarded != outcome:
                self._say(record.number, f"{told} was refused ({Outcome(outcome).name}), and the ps does not say so")
        elif outcome == Outcome.DUPLICATE:
            if made is None and gone is None and discarded is None and not is_counted:
                self._say(record.number, f"I5: {told} was called a duplicate and never applied")
            elif push_id not in shard.duplicates.get(owner, ()):
                self._say(record.number, f"{told} was called a duplicate, and the ps does not say so")
        elif outcome != Outcome.STAGED:
            self._say(record.number, f"{told} was answered with outcome {outcome}")
        if (outcome == Outcome.NOT_FINITE and not is_bad) or (is_bad and outcome in (Outcome.APPLIED, Outcome.ADDED)):
            self._say(record.number, f"{told} was answered with {Outcome(outcome).name}, which it was not")

    def _pull(self, record: Record) -> None:
        link = self._links.setdefault(record.other, Link())
        if link.pending:
            self._say(record.number, f"read ps:{record.other} while push {link.pending} had no answer")
        if record.version < link.answered and record.lineage == link.lineage:
            what = f"version {record.version}, and its answer was of version {link.answered}"
            self._say(record.number, f"I5: read {what}")
        self._read(link, record)

    def _read(self, link: Link, record: Record, is_new: bool = False) -> None:
        """Versions that a worker reads never go back, in a lineage, and the ps has made them."""
        if record.lineage < link.lineage:
            self._say(record.number, f"ps:{record.other} is of lineage {record.lineage}, after {link.lineage}")
        if record.lineage == link.lineage and record.version < link.version and (record.outcome or not is_new):
            what = f"version {record.version} after version {link.version}"
            self._say(record.number, f"I5: read {what} of ps:{record.other}")
        shard = self._shards.get(record.other)
        if shard is not None and record.version > shard.top(record.lineage):
            self._say(record.number, f"read version {record.version} of ps:{record.other}, which it never made")
        if record.lineage != link.lineage:
            link.answered = 0
        link.version, link.lineage = record.version, record.lineage

    # --- at the end -------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        """Nothing was applied that this worker did not push."""
        for ps, shard in self._shards.items():
            for (worker, incarnation), track in shard.tracks.items():
                if worker == self._index:
                    pushed = self._pushed.get((ps, incarnation), array("Q"))
                    for push_id, number in zip(track.ids, track.numbers, strict=True):
                        at = bisect_left(pushed, push_id)
                        if at == len(pushed) or pushed[at] != push_id:
                            what = f"applied push {push_id} of worker:{worker} incarnation {incarnation}"
                            self._say(0, f"I2: ps:{ps} {what} (its record {number}), which it never pushed")
