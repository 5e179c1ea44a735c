"""WHAT is a ledger checked by? Its records in order, and what is kept of them while others are compared.

Used by telemetry/verify_ps and verify_worker. Pure. A run may have millions of records, so what is kept is numbers in
arrays, not records.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

from paceline.telemetry.ledger import Kind, Record

Owner = tuple[int, int]  # (worker, incarnation)
Say = Callable[[int, str], None]  # (record number, what is wrong)


def in_order(records: Iterable[Record], used: dict[Kind, set[str]], say: Say) -> Iterator[Record]:
    """The records that can be followed; what is not numbered on, or not of a form that is written, is told."""
    always = {"kind", "lineage", "number"}
    idle = {int(k): [i for i, f in enumerate(Record._fields) if f not in fields | always] for k, fields in used.items()}
    expected = 1
    for record in records:
        number = record.number
        if number != expected & 0xFFFFFFFF:
            say(number, f"is where record {expected} belongs: records are missing, double or out of order")
        expected = number + 1
        unused = idle.get(record.kind)
        if unused is None:
            say(number, f"is of kind {record.kind}, which this task does not write")
        elif any(record[i] for i in unused):
            say(number, f"{Kind(record.kind).name} has values in fields that it does not use")
        else:
            yield record


class Track:
    """What one incarnation of a worker gave to a shard: push ids, and the version that each went into."""

    def __init__(self) -> None:
        self.ids, self.versions, self.numbers = array("Q"), array("Q"), array("Q")

    def add(self, push_id: int, version: int, number: int) -> None:
        self.ids.append(push_id)
        self.versions.append(version)
        self.numbers.append(number)

    def version_of(self, push_id: int) -> int | None:
        at = bisect_left(self.ids, push_id)
        return self.versions[at] if at < len(self.ids) and self.ids[at] == push_id else None

    @property
    def last(self) -> int:
        return self.ids[-1] if self.ids else 0

    def cut(self, version: int) -> dict[int, int]:
        """Forget what came after that version; it comes back, by push id."""
        at = bisect_left(self.versions, version + 1)
        gone = dict(zip(self.ids[at:], self.versions[at:], strict=True))
        del self.ids[at:], self.versions[at:], self.numbers[at:]
        return gone


class Rounds:
    """The rounds of one lineage: who was in each, as a hash, and its record."""

    def __init__(self) -> None:
        self.ids, self.who, self.numbers = array("Q"), array("q"), array("Q")

    def add(self, round_: int, who: int, number: int) -> None:
        self.ids.append(round_)
        self.who.append(who)
        self.numbers.append(number)

    def find(self, round_: int) -> int | None:
        """Where it is."""
        at = bisect_left(self.ids, round_)
        return at if at < len(self.ids) and self.ids[at] == round_ else None
