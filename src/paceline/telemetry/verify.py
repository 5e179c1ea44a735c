"""WAS every gradient counted once, by all shards alike, and none lost? A run's ledgers, checked against each other.

Called by `paceline verify` and by tests. Pure: records in, a verdict out. What it proves (design 5):

I1  a round has one contributor set on all shards, and no shard is more than the last round behind ps:0
I2  a (worker, incarnation, push id) is applied at most once a shard, and only if that worker pushed it
I3  in bounded mode nobody began a step more than the bound ahead of the slowest
I5  versions have no gaps and go back only with a restore; what was acknowledged is applied, or named as lost with it
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.modes import make as make_mode
from paceline.modes.spec import ModeSpec
from paceline.telemetry import ledger as led
from paceline.telemetry.ledger import Record
from paceline.telemetry.verify_ps import Shard
from paceline.telemetry.verify_records import Rounds, Say
from paceline.telemetry.verify_worker import Worker


class Violation(NamedTuple):
    """`number` counts the task's records from 1; 0: no single one."""

    task: str
    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.task} record {self.number}: {self.what}" if self.number else f"{self.task}: {self.what}"


@dataclass(slots=True)
class Verdict:
    """`lost`: what was acknowledged and went with a restore: no violation. `missing`: whom nobody could ask. `damaged`:
    whose ledger is not what was written, and why; nothing is compared with it."""

    records: int = 0
    violations: list[Violation] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return not self.violations and not self.damaged


class _Counted:
    """Records on their way, counted."""

    def __init__(self, records: Iterable[Record], verdict: Verdict) -> None:
        self._records = records
        self._verdict = verdict

    def __iter__(self) -> Iterator[Record]:
        for record in self._records:
            self._verdict.records += 1
            yield record


def check(
    ps: Mapping[int, Iterable[Record]],
    workers: Mapping[int, Iterable[Record]],
    first_mode: ModeSpec | None = None,
) -> Verdict:
    """All ledgers of one run, by index. `first_mode`: what it was started with, if that is known.

    >>> check({}, {0: [Record(led.Kind.START, incarnation=1, number=1)]}).is_ok
    True
    """
    verdict = Verdict()
    shards: dict[int, Shard] = {}
    for index, records in sorted(ps.items()):
        shards[index] = Shard(index == 0, _sayer(verdict, f"ps:{index}"))
        shards[index].follow(_Counted(records, verdict))
    _check_modes(shards, first_mode, verdict)
    _check_rounds(shards, verdict)
    _check_counted(shards, verdict)
    _check_copies(shards, verdict)
    asked: set[int] = set()
    for index, records in sorted(workers.items()):
        story = Worker(index, shards, _sayer(verdict, f"worker:{index}"), verdict.lost.append)
        story.follow(_Counted(records, verdict))
        _check_who(shards, index, story.incarnations, verdict)
        asked |= story.asked
    named = {worker for shard in shards.values() for worker in shard.entered}
    verdict.missing += [f"ps:{index}" for index in sorted(asked - ps.keys())]
    verdict.missing += [f"worker:{index}" for index in sorted(named - workers.keys())]
    return verdict


def _sayer(verdict: Verdict, task: str) -> Say:
    return lambda number, what: verdict.violations.append(Violation(task, number, what))


def _check_modes(shards: Mapping[int, Shard], first_mode: ModeSpec | None, verdict: Verdict) -> None:
    if 0 not in shards:
        return
    decided = dict(shards[0].modes)
    if first_mode is not None:
        some = first_mode.replicas_to_aggregate or 1  # how many there are changes neither of these
        mode = make_mode(first_mode, num_workers=some)
        wanted = (led.MODE_ROUNDS if mode.has_rounds else led.MODE_EACH_PUSH, 0)
        if mode.keeps_clocks:
            wanted = (led.MODE_BOUNDED, min(first_mode.staleness, led.MAX_AMOUNT))
        if decided.setdefault(0, wanted) != wanted:
            verdict.violations.append(Violation("ps:0", 0, f"began in another mode than {first_mode}"))
    for index, shard in shards.items():
        for turn, held in shard.modes.items():
            if decided.get(turn) != held:
                told = f"its mode of turn {turn} is not the one that ps:0 decided"
                verdict.violations.append(Violation(f"ps:{index}", 0, told))


def _check_rounds(shards: Mapping[int, Shard], verdict: Verdict) -> None:
    """INVARIANT I1."""
    if 0 not in shards:
        return
    for index, shard in shards.items():
        for lineage in shards[0].rounds.keys() | shard.rounds.keys():
            decided, made = shards[0].rounds.get(lineage, Rounds()), shard.rounds.get(lineage, Rounds())
            _compare_rounds(f"ps:{index}", decided, made, verdict)


def _compare_rounds(task: str, decided: Rounds, made: Rounds, verdict: Verdict) -> None:
    for round_, who, number in zip(made.ids, made.who, made.numbers, strict=True):
        at = decided.find(round_)
        if at is None:
            verdict.violations.append(Violation(task, number, f"I1: round {round_} was never decided by ps:0"))
        elif decided.who[at] != who:
            told = f"I1: round {round_} has other contributors than on ps:0 (its record {decided.numbers[at]})"
            verdict.violations.append(Violation(task, number, told))
    for round_, number in zip(decided.ids[:-1], decided.numbers[:-1], strict=True):  # the last one may be on its way
        if made.find(round_) is None:
            told = f"I1: round {round_} was decided by ps:0 (its record {number}) and is not here"
            verdict.violations.append(Violation(task, 0, told))


def _check_counted(shards: Mapping[int, Shard], verdict: Verdict) -> None:
    """What a shard has added up for the open round, ps:0 had counted before; the round may never have closed."""
    if 0 not in shards:
        return
    for index, shard in shards.items():
        for owner, push_ids in shard.added.items():
            for strange in sorted(push_ids - shards[0].added.get(owner, set())):
                told = f"I1: push {strange} of worker:{owner[0]} incarnation {owner[1]} was added up"
                told += ", and ps:0 had not counted it"
                verdict.violations.append(Violation(f"ps:{index}", 0, told))


def _check_copies(shards: Mapping[int, Shard], verdict: Verdict) -> None:
    """A checkpoint of rounds is of one round on all shards."""
    if 0 not in shards:
        return
    for index, shard in shards.items():
        for key, (round_, number) in shard.copies.items():
            first = shards[0].copies.get(key)
            if first is not None and first[0] != round_ and -1 not in (first[0], round_):
                told = f"I1: the checkpoint of step {key[1]} is of round {round_}, and on ps:0 of {first[0]}"
                verdict.violations.append(Violation(f"ps:{index}", number, told))


def _check_who(shards: Mapping[int, Shard], worker: int, incarnations: set[int], verdict: Verdict) -> None:
    for index, shard in shards.items():
        for strange in sorted(shard.entered.get(worker, set()) - incarnations):
            told = f"worker:{worker} came in as incarnation {strange}, which it never was"
            verdict.violations.append(Violation(f"ps:{index}", 0, told))
